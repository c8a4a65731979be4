r"""Online Normalization: normalisation by running statistics, at batch one.

Chiley et al., "Online Normalization for Training Neural Networks", NeurIPS 2019
(https://arxiv.org/abs/1905.05894), which "Pipelined Backpropagation at Scale"
names as an alternative to Group Normalization. The equations are those of the
authors' public code (github.com/Cerebras/online-normalization, read there); the
paper's text was not at hand.

The forward pass normalises each channel by statistics of the samples before;
the backward pass keeps the gradient orthogonal, on average over samples, to
what Batch Normalization's would be orthogonal to, by two control variables.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from pbp_jax.models import normalization


class OnlineNorm(nn.Module):
  r"""Normalises each channel online, scales it, and guards its size.

  With `online_normalize` for the normaliser, and the mean over all positions
  and channels of a sample,

  .. math::

    z = \gamma_c \, \mathrm{normalize}(x) + \beta_c, \qquad
    y = z / \sqrt{\langle z^2 \rangle + \epsilon}.

  The last step is the authors' layer scaling, which bounds the activations
  while the statistics are far from the truth.

  Variables of shape (channels,): `mean` and `variance` in the collection
  `forward_state`; `u` and `v` in `backward_state`. So it becomes a stage by
  `pbp_jax.stateful_stage`. A sample is normalised by the statistics of the
  samples before it, so evaluation is the same function. As published for
  micro-batches of one sample; the samples of a larger one count here as one
  sample of so many more positions, where the authors' code takes them one after
  the other.

  Attributes:
    forward_decay: :math:`\alpha_f`, in [0, 1].
    backward_decay: :math:`\alpha_b`, in [0, 1].
    epsilon: Added to the variance, and to the mean of squares.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> from pbp_jax.models import online_normalization
    >>> stage = pbp.stateful_stage(online_normalization.OnlineNorm())
    >>> x = jnp.full((1, 4, 4, 2), 3.0)
    >>> key = jax.random.key(0)
    >>> y, state = stage.apply(stage.init(key, x), stage.init_state(key, x), x)
    >>> print(state["forward_state"]["mean"].round(5))
    [0.003 0.003]
  """

  forward_decay: float = 0.999
  backward_decay: float = 0.99
  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises x, of shape (batch, ..., channels)."""
    vector = x.shape[-1:]
    dtype = normalization.in_single(x).dtype
    scale = self.param("scale", nn.initializers.ones, vector)
    bias = self.param("bias", nn.initializers.zeros, vector)
    mean = self.variable("forward_state", "mean", jnp.zeros, vector, dtype)
    variance = self.variable(
      "forward_state", "variance", jnp.ones, vector, dtype
    )
    u = self.variable("backward_state", "u", jnp.zeros, vector, dtype)
    v = self.variable("backward_state", "v", jnp.zeros, vector, dtype)
    y: Any = online_normalize(
      x,
      mean.value,
      variance.value,
      u.value,
      v.value,
      self.backward_decay,
      self.epsilon,
    )
    if not self.is_initializing():
      mean.value, variance.value = next_statistics(
        lax.stop_gradient(x), mean.value, variance.value, self.forward_decay
      )
    per_channel = functools.partial(normalization.per_channel, x=x)
    y = y * per_channel(scale) + per_channel(bias)
    square = jnp.square(y).mean(tuple(range(1, y.ndim)), keepdims=True)
    y = y * lax.rsqrt(square + self.epsilon)
    return y.astype(jnp.result_type(x, scale, bias))


def next_statistics(
  x: jax.Array, mean: jax.Array, variance: jax.Array, decay: float
) -> tuple[jax.Array, jax.Array]:
  r"""The running statistics after a micro-batch.

  With the mean :math:`m` and variance :math:`s^2` of a channel over the
  micro-batch's positions, and :math:`\alpha` for `decay`,

  .. math::

    \sigma_t^2 &= \alpha \sigma_{t-1}^2 + (1 - \alpha) s^2
      + \alpha (1 - \alpha) (m - \mu_{t-1})^2 \\
    \mu_t &= \alpha \mu_{t-1} + (1 - \alpha) m.

  Args:
    x: The micro-batch, of shape (batch, ..., channels).
    mean: :math:`\mu_{t-1}`, of shape (channels,).
    variance: :math:`\sigma_{t-1}^2`, likewise.
    decay: :math:`\alpha`.

  Returns:
    The next mean and variance.

  Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [3.0]]])
    >>> mean, variance = next_statistics(x, jnp.zeros(1), jnp.ones(1), 0.5)
    >>> float(mean[0]), float(variance[0])
    (1.0, 2.0)
  """
  positions = tuple(range(x.ndim - 1))
  x = normalization.in_single(x)
  sample_mean = x.mean(positions)
  deviation = x - normalization.per_channel(sample_mean, x)
  sample_variance = jnp.square(deviation).mean(positions)
  step = sample_mean - mean
  return (
    mean + (1 - decay) * step,
    decay * variance
    + (1 - decay) * sample_variance
    + decay * (1 - decay) * jnp.square(step),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def online_normalize(
  x: jax.Array,
  mean: jax.Array,
  variance: jax.Array,
  u: jax.Array,
  v: jax.Array,
  decay: float,
  epsilon: float,
) -> jax.Array:
  r"""The normaliser, with the control process as its derivative rule.

  .. math::

    y = (x - \mu) / \sqrt{\sigma^2 + \epsilon}

  Backwards, with the error :math:`\dot y`, :math:`\alpha` for `decay` and the
  mean over all positions of a channel,

  .. math::

    \tilde y &= \dot y - (1 - \alpha) v_{t-1} y, &
    v_t &= v_{t-1} + \langle \tilde y \, y \rangle, \\
    \dot x &= \tilde y / \sqrt{\sigma^2 + \epsilon} - (1 - \alpha) u_{t-1}, &
    u_t &= u_{t-1} + \langle \dot x \rangle.

  The "gradients" of u and v are :math:`u_t` and :math:`v_t`, as
  `pbp_jax.BackwardState` wants them; those of the statistics are zero.

  Args:
    x: The input, of shape (batch, ..., channels).
    mean: :math:`\mu`, of shape (channels,).
    variance: :math:`\sigma^2`, likewise.
    u: :math:`u_{t-1}`, likewise.
    v: :math:`v_{t-1}`, likewise.
    decay: :math:`\alpha`. Static.
    epsilon: Added to the variance. Static.

  Returns:
    An array like x, in single precision at least.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> zero, one = jnp.zeros(1), jnp.ones(1)
    >>> y, pullback = jax.vjp(
    ...   lambda x, u, v: online_normalize(x, one, 4 * one, u, v, 0.5, 0.0),
    ...   jnp.array([[7.0]]), zero, zero)
    >>> float(y[0, 0]), [float(d.item()) for d in pullback(jnp.ones((1, 1)))]
    (3.0, [0.5, 0.5, 3.0])
  """
  return _forward(x, mean, variance, u, v, decay, epsilon)[0]


def _forward(x, mean, variance, u, v, decay, epsilon):
  del decay
  factor = lax.rsqrt(variance + epsilon)
  y = (normalization.in_single(x) - normalization.per_channel(mean, x)) * (
    normalization.per_channel(factor, x)
  )
  return y, (jnp.zeros((), x.dtype), y, factor, u, v)


def _backward(decay, epsilon, residuals, cotangent):
  del epsilon
  of_input_type, y, factor, u, v = residuals
  per_channel = functools.partial(normalization.per_channel, x=y)
  positions = tuple(range(y.ndim - 1))
  error = cotangent - (1 - decay) * per_channel(v) * y
  dx = error * per_channel(factor) - (1 - decay) * per_channel(u)
  zero = jnp.zeros_like(factor)
  return (
    dx.astype(of_input_type.dtype),
    zero,
    zero,
    u + dx.mean(positions),
    v + (error * y).mean(positions),
  )


online_normalize.defvjp(_forward, _backward)
