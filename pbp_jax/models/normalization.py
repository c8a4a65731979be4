"""Normalisation that is fast at batch one on a CPU.

Group Normalization (Wu and He, "Group Normalization", 2018,
https://arxiv.org/abs/1803.08494) normalises each sample by itself, so it works
at batch one, where Batch Normalization can't. Layer Normalization (Ba et al.,
"Layer Normalization", 2016, https://arxiv.org/abs/1607.06450) is the same with
one group.

Both have a derivative rule of their own. It takes fewer sums, and it keeps XLA
from fusing the sums of residual branches into every sum of the backward pass,
which made a chain of 31 residual blocks several times slower.
"""

from collections.abc import Callable
import functools
import math

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from pbp_jax import materialization


class GroupNorm(nn.Module):
  r"""Normalises each sample over groups of neighbouring channels.

  .. math::

    y = \gamma_c \, \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta_c

  with mean :math:`\mu_g` and variance :math:`\sigma_g^2` over all positions
  of a sample and the channels of the group :math:`g` that holds the channel
  :math:`c`. Parameters and values are those of `flax.linen.GroupNorm` with
  `use_fast_variance=False`; `group_norm` computes them.

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
    return group_norm(x, scale, bias, self.num_groups, self.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def group_norm(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  num_groups: int,
  epsilon: float,
) -> jax.Array:
  r"""The function of `GroupNorm`, with a derivative rule for speed.

  Sums are first taken for each channel over the positions and then pooled over
  the channels of a group: XLA is slow on a CPU at reducing over an array that
  is reshaped to split the channels. The variance is the mean of squared
  deviations: it can't be negative, and it keeps its digits where the mean is
  large. With :math:`\hat x` for what is normalised, :math:`\dot y` for the
  cotangent and :math:`\langle \cdot \rangle_g` for the mean over a group,

  .. math::

    \dot x = \frac{\gamma_c \dot y - \langle \gamma \dot y \rangle_g
    - \hat x \langle \gamma \dot y \hat x \rangle_g}
    {\sqrt{\sigma_g^2 + \epsilon}},

  whose means follow from the same two sums a channel as the gradients of
  :math:`\gamma` and :math:`\beta`. Half precision is computed in single.

  Args:
    x: The input, of shape (batch, ..., channels).
    scale: :math:`\gamma`, of shape (channels,).
    bias: :math:`\beta`, of shape (channels,).
    num_groups: Number of groups, a divisor of the channels. Static.
    epsilon: Added to the variance. Static.

  Returns:
    An array like x, of the type that x, scale and bias promote to.

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax.models import normalization
    >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
    >>> y = normalization.group_norm(x, jnp.ones(4), jnp.zeros(4), 1, 1e-6)
    >>> print(y.round(2))
    [[-0.87 -0.7  -0.09  1.66]]
  """
  return _forward(x, scale, bias, num_groups, epsilon)[0]


def _forward(x, scale, bias, num_groups, epsilon):
  dtype = jnp.result_type(x, scale, bias)
  mean = _pooled_mean(in_single(x), num_groups)
  deviation = in_single(x) - mean
  variance = _pooled_mean(jnp.square(deviation), num_groups)
  factor = lax.rsqrt(variance + epsilon)
  y = deviation * (factor * per_channel(scale, x)) + per_channel(bias, x)
  return y.astype(dtype), (x, mean, factor, scale, bias)


def _backward(num_groups, epsilon, residuals, cotangent):
  del epsilon
  x, mean, factor, scale, bias = residuals
  positions = tuple(range(1, x.ndim - 1))
  deviation = in_single(x) - mean
  cotangent = in_single(cotangent)
  sums = cotangent.sum(positions, keepdims=True)
  products = (cotangent * deviation).sum(positions, keepdims=True) * factor
  scale_per_channel = per_channel(scale, x)
  count = math.prod(x.shape[1:-1])
  mean_cotangent = _pool(scale_per_channel * sums, num_groups) / count
  mean_product = _pool(scale_per_channel * products, num_groups) / count
  dx = (
    cotangent * (factor * scale_per_channel)
    - deviation * (mean_product * jnp.square(factor))
    - mean_cotangent * factor
  )
  others = tuple(range(x.ndim - 1))
  return (
    dx.astype(x.dtype),
    products.sum(others).astype(scale.dtype),
    sums.sum(others).astype(bias.dtype),
  )


group_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def layer_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
  """Layer Normalization over the last axis, without parameters.

  As `flax.linen.LayerNorm(use_scale=False, use_bias=False,
  use_fast_variance=False)`; the rule is that of `group_norm` with one group.

  Args:
    x: The input, of shape (..., features).
    epsilon: Added to the variance. Static.

  Returns:
    An array like x.

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax.models import normalization
    >>> print(normalization.layer_norm(jnp.array([1.0, 3.0])).round(3))
    [-1.  1.]
  """
  return _layer_forward(x, epsilon)[0]


def _layer_forward(x, epsilon):
  mean = in_single(x).mean(axis=-1, keepdims=True)
  deviation = in_single(x) - mean
  variance = jnp.square(deviation).mean(axis=-1, keepdims=True)
  factor = lax.rsqrt(variance + epsilon)
  return (deviation * factor).astype(x.dtype), (x, mean, factor)


def _layer_backward(epsilon, residuals, cotangent):
  del epsilon
  x, mean, factor = residuals
  y = (in_single(x) - mean) * factor
  cotangent = in_single(cotangent)
  mean_cotangent = cotangent.mean(axis=-1, keepdims=True)
  mean_product = (cotangent * y).mean(axis=-1, keepdims=True)
  dx = factor * (cotangent - mean_cotangent - y * mean_product)
  return (dx.astype(x.dtype),)


layer_norm.defvjp(_layer_forward, _layer_backward)


def in_single(x: jax.Array) -> jax.Array:
  """The same numbers in single precision at least."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def per_channel(vector: jax.Array, x: jax.Array) -> jax.Array:
  """A vector of channels as an array that broadcasts against x."""
  return in_single(vector).reshape((1,) * (x.ndim - 1) + vector.shape)


def _pooled_mean(x: jax.Array, num_groups: int) -> jax.Array:
  """The mean of a sample's group, for each channel: (batch, 1, ..., c)."""
  return _pool(x.mean(tuple(range(1, x.ndim - 1)), keepdims=True), num_groups)


@materialization.materialized(static_argnums=1)
def _pool(x: jax.Array, num_groups: int) -> jax.Array:
  """The mean over the channels of a group, for each channel.

  Kept in memory: a loop over positions that had to look up the group of each
  channel would not go through several channels at a time.
  """
  batch, channels = x.shape[0], x.shape[-1]
  grouped = x.reshape(batch, num_groups, channels // num_groups)
  pooled = grouped.mean(axis=-1, keepdims=True)
  return jnp.broadcast_to(pooled, grouped.shape).reshape(x.shape)
