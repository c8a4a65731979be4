"""Measurements of staleness, taken while a pipeline trains.

`Simulator(..., diagnostics=("weight_distance", "lag"))` adds them, one number a
stage and micro-batch, to the metrics of a run. What is not asked for costs
nothing.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pbp_jax import schedules
from pbp_jax.stages import PyTree

# Name -> what it is, for stage s and micro-batch i.
NAMES = {
  "lag": "forward lag in updates",
  "is_finite": (
    "whether the newest weights, before this micro-batch's update, are finite;"
    " one pass over the weights"
  ),
  "weight_distance": (
    "|| forward view - newest weights ||: the prediction error with the view;"
    " one pass over the weights"
  ),
  "stale_weight_distance": (
    "|| stale raw weights - newest weights ||: the error without the view; a"
    " second ring of weights where there is a view"
  ),
  "gradient_cosine": (
    "cosine between the gradient used and that of the same micro-batch on the"
    " newest weights in both passes; one more forward and backward pass"
  ),
  "gradient_norm_ratio": (
    "norm of the gradient used over that of the fresh one; costs as the cosine"
  ),
}


def check_names(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the names as a tuple; raises a ValueError on an unknown one."""
  if isinstance(names, str) or any(name not in NAMES for name in names):
    raise ValueError(
      f"diagnostics must be a sequence of {', '.join(NAMES)}; got {names!r}."
    )
  return tuple(names)


def measure(
  names: Sequence[str],
  *,
  lags: jax.Array,
  params: Sequence[PyTree],
  params_fwd: Sequence[PyTree],
  params_stale: Sequence[PyTree],
  gradients: Sequence[PyTree],
  make_fresh_gradients: Callable[[], Sequence[PyTree]],
) -> dict[str, jax.Array]:
  """Measures what is asked for, at one micro-batch.

  Args:
    names: Keys of `NAMES`.
    lags: Forward lags, `[S]`.
    params: The newest weights of each stage.
    params_fwd: The weights that the forward passes met.
    params_stale: The raw weights of the same versions.
    gradients: The gradients that the optimizer gets.
    make_fresh_gradients: Computes those on the newest weights in both passes.

  Returns:
    For each name `[S]`. Where a stage has no parameters or one of the gradients
    is zero, the cosine and the ratio are 1.
  """
  metrics = {}
  if "lag" in names:
    metrics["lag"] = jnp.asarray(lags, jnp.int32)
  if "is_finite" in names:
    metrics["is_finite"] = are_finite(params)
  if "weight_distance" in names:
    metrics["weight_distance"] = _distances(params_fwd, params)
  if "stale_weight_distance" in names:
    metrics["stale_weight_distance"] = _distances(params_stale, params)
  if "gradient_cosine" in names or "gradient_norm_ratio" in names:
    fresh = make_fresh_gradients()
    norms, fresh_norms = _norms(gradients), _norms(fresh)
    comparable = (norms > 0) & (fresh_norms > 0)
    safe = lambda x: jnp.where(comparable, x, 1)
    if "gradient_cosine" in names:
      products = jnp.stack(
        [
          jnp.asarray(optax.tree.vdot(g, f) if jax.tree.leaves(g) else 0.0)
          for g, f in zip(gradients, fresh, strict=True)
        ]
      )
      metrics["gradient_cosine"] = safe(
        products / (safe(norms) * safe(fresh_norms))
      )
    if "gradient_norm_ratio" in names:
      metrics["gradient_norm_ratio"] = safe(norms / safe(fresh_norms))
  return metrics


def are_finite(params: Sequence[PyTree]) -> jax.Array:
  """Whether all weights of each stage are finite, bools `[S]`.

  Args:
    params: The weights of each stage.

  Returns:
    The bools, true for a stage without weights.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> params = ({"w": jnp.ones(2)}, {"w": jnp.array([0.0, jnp.nan])}, {})
    >>> pbp.diagnostics.are_finite(params).tolist()
    [True, False, True]
  """
  return jnp.stack(
    [
      jnp.all(jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))
      for tree in params
    ]
  )


def delay_histogram(
  schedule: schedules.Schedule, start: int, count: int
) -> np.ndarray:
  """How often each forward lag occurs at each stage.

  Args:
    schedule: The schedule.
    start: The first micro-batch.
    count: How many micro-batches.

  Returns:
    `[S, max_lag + 1]` ints; column l counts the micro-batches with lag l. Rows
    sum to `count`.

  Example:
    >>> import pbp_jax as pbp
    >>> pbp.diagnostics.delay_histogram(
    ...   pbp.schedules.pipelined_backprop(2), start=0, count=10)
    array([[ 1,  1,  8],
           [10,  0,  0]])
  """
  lags, _ = schedule.lags(start, count)
  length = int(schedule.max_lag.max()) + 1
  return np.stack([np.bincount(row, minlength=length) for row in lags])


def _norms(trees: Sequence[PyTree]) -> jax.Array:
  """The Euclidean norm of each stage's tree, `[S]`."""
  return jnp.stack(
    [
      jnp.asarray(optax.tree.norm(tree) if jax.tree.leaves(tree) else 0.0)
      for tree in trees
    ]
  )


def _distances(a: Sequence[PyTree], b: Sequence[PyTree]) -> jax.Array:
  return _norms([optax.tree.sub(x, y) for x, y in zip(a, b, strict=True)])
