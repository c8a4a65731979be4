"""Spike compensation: momentum that makes up for the delay of its gradients."""

from typing import NamedTuple

import jax
from jax import core as jax_core
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import arithmetic, per_stage


class SpikeCompensationState(NamedTuple):
  """State of `spike_compensation`.

  Attributes:
    trace: The velocity v, like the parameters. It has the name of optax's
      momentum buffer, so that weight prediction finds it.
  """

  trace: optax.Updates


def spike_coefficients(
  momentum: ArrayLike, delay: ArrayLike
) -> tuple[ArrayLike, ArrayLike]:
  """The coefficients of SC_D.

  `a = m^D` and `b = (1 - m^D) / (1 - m)`, whose limit at m = 1 is D. Known
  numbers are computed in float64, traced ones in float32 at least, without the
  five digits that the plain form loses there near m = 1.

  First derivatives are exact in all of the range, at m = 0 and m = 1 too: those
  with respect to m at 0 are infinite for 0 < D < 1, as those of `m^D` are. At
  m = 0 and D = 0, a and b jump as D grows; their derivatives are given as 0.

  Args:
    momentum: m, in [0, 1].
    delay: D >= 0, in updates; broadcast against `momentum`.

  Returns:
    a and b.

  Example:
    >>> a, b = spike_coefficients(momentum=0.5, delay=2)
    >>> float(a), float(b)
    (0.25, 1.5)
  """
  if any(isinstance(x, jax_core.Tracer) for x in (momentum, delay)):
    m, d = jnp.asarray(momentum), jnp.asarray(delay)
    xp, dtype = jnp, jnp.promote_types(jnp.result_type(m, d), jnp.float32)
  else:
    m, d = np.asarray(momentum), np.asarray(delay)
    xp, dtype = np, np.float64
  m, d = m.astype(dtype), d.astype(dtype)

  def power(m):
    # 0^0 has no derivatives, 1^0 has those that are wanted.
    return xp.power(xp.where((m == 0) & (d == 0), 1, m), d)

  # With l = log m, b = expm1(D l) / expm1(l), smooth at m = 1 once both are
  # divided by their arguments. Where |D l| is not small, the plain form does,
  # down to m = 0. Each form meets only its own numbers: `where` would make NaN
  # of the infinite derivatives that it has elsewhere.
  exponent = d * xp.log(xp.where(m > 0, m, 1))
  is_smooth = (m > 0) & (xp.abs(exponent) < 1)
  d_smooth = xp.where(is_smooth, d, 1)
  log = xp.log(xp.where(is_smooth, m, 1))
  smooth = d_smooth * _expm1_ratio(d_smooth * log) / _expm1_ratio(log)
  m_plain = xp.where(is_smooth, 0.5, m)
  plain = (1 - power(m_plain)) / (1 - m_plain)
  return power(m), xp.where(is_smooth, smooth, plain)


def _expm1_ratio(x: ArrayLike) -> ArrayLike:
  """`expm1(x) / x`, whose limit at 0 is 1, with its derivatives."""
  xp = jnp if isinstance(x, jax_core.Tracer) else np
  is_near = xp.abs(x) < 1
  near, far = xp.where(is_near, x, 0), xp.where(is_near, 1, x)
  series = 1.0
  for k in range(18, 1, -1):  # to all digits of float64
    series = 1 + series * near / k
  return xp.where(is_near, series, xp.expm1(far) / far)


def spike_compensation(
  momentum: per_stage.PerStage,
  delay: per_stage.PerStage | None = None,
  *,
  a: per_stage.PerStage | None = None,
  b: per_stage.PerStage | None = None,
) -> optax.GradientTransformation:
  """Momentum with spike compensation, for gradients that are D updates old.

  `vₜ₊₁ = m vₜ + gₜ`, update `a vₜ₊₁ + b gₜ` with `a = m^D` and
  `b = (1 - m^D) / (1 - m)`. When a gradient arrives at last, it is given at
  once the part that the delay has kept it from contributing; from then on its
  cumulative contribution is that of an undelayed gradient, and its total stays
  `1 / (1 - m)`. D = 0 is SGD with momentum (`optax.trace`) and D = 1 is
  Nesterov's (`optax.trace(nesterov=True)`); 2 D gives SC_2D.

  It takes the place of `optax.trace`, and is followed by the learning rate.
  Put no other momentum beside it, that of `optax.adam` or `optax.sgd`: that is
  no error, but makes steps `1 / (1 - m)` times too long. Adam goes without its
  own by `b1=0`, at the rate times `1 - m`, since v sums what Adam averages.

  Args:
    momentum: m in [0, 1], may be traced.
    delay: D, any real >= 0, in updates (`schedule.delay`). A scalar, one value
      a stage, or a pytree prefix of the parameters; may be traced.
    a: With `b`, in place of `delay`: the coefficients of generalised spike
      compensation, in the same forms.
    b: See `a`.

  Returns:
    A transformation with a `SpikeCompensationState`. Coefficients are applied
    in float32 at least, and updates and state keep the gradients' dtype.

  Raises:
    ValueError: If not exactly one of `delay` and (`a`, `b`) is given, a number
      is out of range, or, in use, a value does not fit the parameters.

  References:
    Kosson et al., Pipelined Backpropagation at Scale, arXiv 2003.11666. The
    form is recalled, not re-read at the source; the properties above are
    tested.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.spike_compensation(momentum=0.5, delay=2)
    >>> params = jnp.zeros(())
    >>> state = link.init(params)
    >>> for gradient in (1.0, 0.0, 0.0):
    ...   update, state = link.update(jnp.asarray(gradient), state, params)
    ...   print(update)
    1.75
    0.125
    0.0625
  """
  per_stage.check_numbers(momentum, "momentum", maximum=1.0)
  if (delay is None) == (a is None) or (a is None) != (b is None):
    raise ValueError(
      "spike_compensation takes either delay or both a and b, got"
      f" delay={delay!r}, a={a!r}, b={b!r}."
    )
  if delay is not None:
    per_stage.check_numbers(delay, "delay")
  else:
    per_stage.check_numbers(a, "a", minimum=-np.inf)
    per_stage.check_numbers(b, "b", minimum=-np.inf)

  def coefficients(updates):
    """Trees of a and b like the updates."""
    if delay is None:
      return (
        per_stage.broadcast(a, updates, "a"),
        per_stage.broadcast(b, updates, "b"),
      )
    delays = per_stage.broadcast(delay, updates, "delay")
    momenta = per_stage.broadcast(momentum, updates, "momentum")
    # Not as a tree of pairs: a tree without leaves could not be transposed.
    return tuple(
      jax.tree.map(
        lambda m, d, i=i: spike_coefficients(m, d)[i], momenta, delays
      )
      for i in range(2)
    )

  def init_fn(params):
    return SpikeCompensationState(trace=optax.tree.zeros_like(params))

  def update_fn(updates, state, params=None):
    del params
    momenta = per_stage.broadcast(momentum, updates, "momentum")
    trace = jax.tree.map(
      lambda g, v, m: arithmetic.linear_combination((1, g), (m, v)),
      updates,
      state.trace,
      momenta,
    )
    compensated = jax.tree.map(
      lambda v, g, a, b: arithmetic.linear_combination((a, v), (b, g)),
      trace,
      updates,
      *coefficients(updates),
    )
    return compensated, SpikeCompensationState(trace=trace)

  return optax.GradientTransformation(init_fn, update_fn)
