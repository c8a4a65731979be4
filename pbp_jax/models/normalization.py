"""Group Normalization that is fast at batch one on a CPU.

Group Normalization (Wu and He, "Group Normalization", 2018,
https://arxiv.org/abs/1803.08494) normalises each sample by itself, so it works
at batch one, where Batch Normalization can't.
"""

from collections.abc import Callable

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp


class GroupNorm(nn.Module):
  r"""Normalises each sample over groups of neighbouring channels.

  .. math::

    y = \gamma_c \, \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta_c

  with mean :math:`\mu_g` and variance :math:`\sigma_g^2` over all positions
  of a sample and the channels of the group :math:`g` that holds the channel
  :math:`c`. Parameters and values are those of `flax.linen.GroupNorm`. Two
  things differ:

  - sums are first taken for each channel over the positions and then pooled
    over the channels of a group: XLA is slow on a CPU at reducing over an
    array that is reshaped to split the channels;
  - the variance is the mean of squared deviations, which can't be negative
    and keeps its digits where the mean is large (as with linen's
    `use_fast_variance=False`), and :math:`\gamma` multiplies what is
    normalised, so that a backward pass on other weights meets it in one
    product only.

  Attributes:
    num_groups: Number of groups; must divide the number of channels.
    epsilon: Added to the variance.
    scale_init: Initialiser of :math:`\gamma`, of shape (channels,).
    bias_init: Initialiser of :math:`\beta`, of shape (channels,).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from pbp_jax.models import normalization
    >>> norm = normalization.GroupNorm(num_groups=2)
    >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
    >>> y = norm.apply(norm.init(jax.random.key(0), x), x)
    >>> print(y.round(3))
    [[-1.  1. -1.  1.]]
  """

  num_groups: int
  epsilon: float = 1e-6
  scale_init: Callable[..., jax.Array] = nn.initializers.ones
  bias_init: Callable[..., jax.Array] = nn.initializers.zeros

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises x, of shape (batch, ..., channels)."""
    channels = x.shape[-1]
    if self.num_groups < 1 or channels % self.num_groups:
      raise ValueError(
        f"num_groups must divide the number of channels, {channels}, got "
        f"{self.num_groups}."
      )
    scale = self.param("scale", self.scale_init, (channels,))
    bias = self.param("bias", self.bias_init, (channels,))
    dtype = jnp.result_type(x, scale, bias)
    y = _normalize(
      x.astype(jnp.promote_types(x.dtype, jnp.float32)),
      self.num_groups,
      self.epsilon,
    )
    per_channel = (1,) * (x.ndim - 1) + (channels,)
    y = y * scale.reshape(per_channel) + bias.reshape(per_channel)
    return y.astype(dtype)


def _normalize(x: jax.Array, num_groups: int, epsilon: float) -> jax.Array:
  batch, channels = x.shape[0], x.shape[-1]
  positions = tuple(range(1, x.ndim - 1))

  def mean(x):
    per_channel = x.mean(positions, keepdims=True)
    grouped = per_channel.reshape(batch, num_groups, channels // num_groups)
    pooled = grouped.mean(axis=-1, keepdims=True)
    return jnp.broadcast_to(pooled, grouped.shape).reshape(per_channel.shape)

  deviation = x - mean(x)
  return deviation * lax.rsqrt(mean(jnp.square(deviation)) + epsilon)
