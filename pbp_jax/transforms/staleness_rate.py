"""Learning rates divided by the staleness of their gradients."""

from typing import NamedTuple

import jax
from jax import core as jax_core
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import arithmetic, per_stage


class ScaleByStalenessState(NamedTuple):
  """State of `scale_by_staleness`.

  Attributes:
    count: Updates done, int32.
  """

  count: jax.Array


def scale_by_staleness(
  delay: per_stage.PerStage, annealing_steps: ArrayLike | None = None
) -> optax.GradientTransformation:
  """Divides the update of every stage by its staleness, for good or at first.

  `u / τ^p` with τ = max(D, 1) the staleness and D the delay, both in updates.

  - Staleness-aware rate: p = 1 always (no `annealing_steps`).
  - PipeMare's T1: `p = 1 - min(k / K, 1)` in update k (from 0), with K the
    `annealing_steps`, so that the rate of a stale stage rises from its share
    to the full rate within K updates.

  Before or after `optax.scale_by_learning_rate` it scales the rate of every
  stage. Coupled weight decay is scaled with the rest. Stages with D <= 1 are
  left alone; PipeMare's own formula has no `max`, and would raise the rate of
  stages with a delay of less than one update.

  Args:
    delay: D, any real >= 0, in updates (`schedule.delay`). A scalar, one value
      a stage, or a pytree prefix of the parameters; may be traced.
    annealing_steps: K > 0, in updates; may be traced.

  Returns:
    A transformation with a `ScaleByStalenessState`.

  Raises:
    ValueError: If a number is out of range or, in use, does not fit the
      parameters.

  References:
    T1: Yang et al., PipeMare, arXiv 1910.05124: as read in the authors' code.
    Staleness-aware rate: Zhang et al., Staleness-aware Async-SGD, arXiv
    1511.05950: as published; not re-read at the source.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.scale_by_staleness(delay=4, annealing_steps=2)
    >>> state = link.init(jnp.zeros(()))
    >>> for _ in range(3):
    ...   update, state = link.update(jnp.ones(()), state)
    ...   print(update)
    0.25
    0.5
    1.0
  """
  per_stage.check_numbers(delay, "delay")
  if annealing_steps is not None:
    per_stage.check_number(annealing_steps, "annealing_steps", above=0.0)

  def init_fn(params):
    del params
    return ScaleByStalenessState(count=jnp.zeros([], jnp.int32))

  def factor_of(delay, count):
    is_traced = isinstance(delay, jax_core.Tracer)
    tau = (jnp if is_traced else np).maximum(delay, 1.0)
    if annealing_steps is None:
      return 1 / tau
    share = count / jnp.asarray(annealing_steps, float)
    return tau ** -(1 - jnp.minimum(share, 1))

  def update_fn(updates, state, params=None):
    del params
    scaled = jax.tree.map(
      lambda u, d: arithmetic.linear_combination(
        (factor_of(d, state.count), u)
      ),
      updates,
      per_stage.broadcast(delay, updates, "delay"),
    )
    count = jnp.asarray(optax.safe_increment(state.count))
    return scaled, ScaleByStalenessState(count)

  return optax.GradientTransformation(init_fn, update_fn)
