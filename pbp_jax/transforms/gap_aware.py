"""Gap-aware gradients: divided by how many steps their weights are away."""

from typing import Any, NamedTuple

import jax
from jax import core as jax_core
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import per_stage, scalars
from pbp_jax.transforms import stale_params as stale_params_lib


class GapAwareState(NamedTuple):
  """State of `gap_aware`.

  Attributes:
    count: Updates done, int32.
    max_learning_rate: The largest rate so far, a scalar.
    velocity: The momentum buffer of what went out, like the parameters, in
      float32 at least. It is not called `trace`, so that no prediction takes it
      for the optimizer's own.
    mean_square: The moving average of the squared velocity, likewise.
  """

  count: jax.Array
  max_learning_rate: jax.Array
  velocity: Any
  mean_square: Any


def gap_aware(
  momentum: per_stage.PerStage,
  learning_rate: optax.ScalarOrSchedule,
  decay: ArrayLike = 0.999,
  epsilon: ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  """Divides gradients by the gap to their weights, in steps of usual size.

  Elementwise, with w the newest weights and ŵ those that the forward passes met
  (the extra argument `stale_params`)::

      C = η (√(MS / (1 - ρᵗ)) + ε),   p = 1 + |w - ŵ| / C,   u = g / p,

  then `v = m v + u` and `MS = ρ MS + (1 - ρ) v²`: C is the size of a usual
  step, with η the largest learning rate so far, and t the updates done. In the
  first update, and at a rate of zero, there is no usual step yet and p = 1, as
  where the weights have not moved.

  Put it after coupled weight decay, which is divided like the gradient, and
  before the momentum. It keeps a velocity of its own for SGD with momentum m,
  so that it needs no particular momentum after it. The gap is in the weights:
  it measures the delay without counting it, and under a prediction it is what
  the prediction missed. Rates that differ from stage to stage it does not know.

  Args:
    momentum: m in [0, 1], that of the momentum that follows: a scalar, one
      value a stage, or a pytree prefix of the parameters; may be traced.
    learning_rate: The rate that the chain applies: a number (may be traced) or
      an optax schedule.
    decay: ρ in [0, 1); may be traced.
    epsilon: ε > 0; may be traced.

  Returns:
    A transformation with a `GapAwareState`, whose update takes `params` and
    `stale_params`; both may be whole trees where the gradients are masked.

  Raises:
    ValueError: If a number is out of range, or in use does not fit the
      parameters or `params` or `stale_params` are missing.

  References:
    Barkai et al., Gap Aware Mitigation of Gradient Staleness, arXiv 1909.10802:
    as read in the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.gap_aware(momentum=0.0, learning_rate=0.5)
    >>> params, stale = jnp.array(2.0), jnp.array(1.0)
    >>> state = link.init(params)
    >>> for _ in range(2):  # usual step 0.5, so a gap of 1 is two steps
    ...   update, state = link.update(
    ...     jnp.array(1.0), state, params, stale_params=stale)
    ...   print(f"{update:.3f}")
    1.000
    0.333
  """
  per_stage.check_numbers(momentum, "momentum", maximum=1.0)
  scalars.check_rate(learning_rate)
  per_stage.check_number(decay, "decay", below=1.0)
  per_stage.check_number(epsilon, "epsilon", above=0.0)
  # 1 - ρᵗ would lose four digits of float32 for ρ near 1.
  xp = jnp if isinstance(decay, jax_core.Tracer) else np
  is_large = xp.asarray(decay) > 0.5
  log_decay = xp.log(xp.where(is_large, decay, 1))
  small_decay = xp.where(is_large, 0, decay)

  def init_fn(params):
    return GapAwareState(
      count=jnp.zeros([], jnp.int32),
      max_learning_rate=jnp.zeros([], float),
      velocity=stale_params_lib.wide_zeros(params),
      mean_square=stale_params_lib.wide_zeros(params),
    )

  def update_fn(updates, state, params=None, *, stale_params=None, **extra):
    del extra
    highest = jnp.maximum(
      state.max_learning_rate, scalars.rate_at(learning_rate, state.count)
    )
    is_known = (state.count > 0) & (highest > 0)
    share = jnp.where(
      is_large,
      -jnp.expm1(state.count * log_decay),
      1 - jnp.asarray(small_decay, dtype=float) ** state.count,
    )
    correction = jnp.where(is_known, share, 1)

    def divide(g, gap, mean_square):
      step = highest * (jnp.sqrt(mean_square / correction) + epsilon)
      return g / (1 + jnp.abs(gap) / jnp.where(is_known, step, jnp.inf))

    divided = stale_params_lib.map_gaps(
      divide,
      updates,
      params,
      stale_params,
      state.mean_square,
      link="gap_aware",
    )
    divided = stale_params_lib.cast_like(divided, updates)
    velocity = jax.tree.map(
      lambda u, v, m: (m * v + u.astype(v.dtype)).astype(v.dtype),
      divided,
      state.velocity,
      per_stage.broadcast(momentum, updates, "momentum"),
    )
    mean_square = jax.tree.map(
      lambda ms, v: (decay * ms + (1 - decay) * v**2).astype(ms.dtype),
      state.mean_square,
      velocity,
    )
    count = jnp.asarray(optax.safe_increment(state.count))
    return divided, GapAwareState(count, highest, velocity, mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
