"""What `Simulator` asks of the arguments of its functions.

All of it is known while tracing; only values of lags are looked at, if they are
known.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

from pbp_jax import tree_forms
from pbp_jax.pipeline_state import PipelineState
from pbp_jax.stages import PyTree, Stage


def check_dtype(history_dtype: Any) -> None:
  """Raises a ValueError if weights can't be kept in it."""
  if history_dtype is None:
    return
  try:
    is_floating = jnp.issubdtype(history_dtype, jnp.floating)
  except TypeError:  # no dtype at all
    is_floating = False
  if not is_floating:
    raise ValueError(
      "history_dtype must be a floating-point dtype or None, got"
      f" {history_dtype!r}."
    )


def check_optimizer(optimizer: Any) -> None:
  """Raises a ValueError if that is no optimizer."""
  if not isinstance(optimizer, optax.GradientTransformation):
    hint = (
      "; its method gradient_transformation() makes one"
      if isinstance(optimizer, optax.MultiSteps)
      else ""
    )
    raise ValueError(
      "optimizer must be an optax.GradientTransformation, got"
      f" {optimizer!r}{hint}."
    )


def as_pair(batch: Any) -> tuple[PyTree, PyTree]:
  """What a batch_fn returned, or a ValueError."""
  if not isinstance(batch, tuple | list) or len(batch) != 2:
    raise ValueError(
      f"batch_fn must return a pair (inputs, targets), got {batch!r}."
    )
  return batch[0], batch[1]


def check_key(key: Any) -> None:
  """Raises a ValueError if that is no random key."""
  dtype, shape = getattr(key, "dtype", None), jnp.shape(key)
  is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  is_raw = dtype == jnp.uint32 and len(shape) == 1
  if not (is_typed and not shape) and not is_raw:
    raise ValueError(
      f"key must be one random key, such as jax.random.key(0), got {key!r}."
    )


def count_micro_batches(inputs: PyTree, targets: PyTree) -> int:
  """The length of the common leading axis, or a ValueError."""
  leaves = jax.tree.leaves((inputs, targets))
  sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
  if len(sizes) != 1 or sizes == {()}:
    hint = (
      " (a list is a tree of its items: give an array)"
      if any(
        isinstance(x, list | int | float) for x in (inputs, targets, *leaves)
      )
      else ""
    )
    raise ValueError(
      "inputs and targets must be stacked micro-batches: all leaves need one"
      f" and the same leading axis, got leading axes {sorted(sizes)}{hint}."
    )
  ((count,),) = sizes
  return count


def check_lags(lags: Any, max_lag: np.ndarray, count: int) -> None:
  """Raises a ValueError if a schedule can't have these lags, `[S, count]`."""
  if not isinstance(lags, jax.Array | np.ndarray):
    raise ValueError(f"lags must be an array, got {type(lags).__name__}.")
  shape = (len(max_lag), count)
  if jnp.shape(lags) != shape:
    raise ValueError(
      "lags must have one value for each stage and micro-batch, shape"
      f" {shape}; got shape {jnp.shape(lags)}."
    )
  if not jnp.issubdtype(lags.dtype, jnp.integer):
    raise ValueError(f"lags must be ints, got {lags.dtype}.")
  if isinstance(lags, jax_core.Tracer):
    return
  known = np.asarray(lags)
  wrong = (known < 0) | (known > max_lag[:, None])
  if wrong.any():
    s, i = np.argwhere(wrong)[0]
    raise ValueError(
      f"lags must be >= 0 and at most the schedule's max_lag, {max_lag[s]} for"
      f" stage {s}; got {known[s, i]} for its micro-batch {i}."
    )


def check_weights(params: Any, stages: Sequence[Stage]) -> None:
  """Raises a ValueError if these aren't weights of so many stages."""
  if not isinstance(params, tuple | list) or len(params) != len(stages):
    got = (
      f"{len(params)} of them"
      if isinstance(params, tuple | list)
      else type(params).__name__
    )
    raise ValueError(
      f"params must be a tuple of the weights of {len(stages)} stages, such as"
      f" state.params; got {got}."
    )


def check_trainable(params: Sequence[PyTree], stages: Sequence[Stage]) -> None:
  """Raises a ValueError if a stage has weights without a gradient."""
  for s, weights in enumerate(params):
    for leaf in jax.tree.leaves(weights):
      dtype = jnp.result_type(leaf)
      if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
          f"Parameters must be real numbers in floating point; stage {s}"
          f" ({stages[s].name}) has some of {dtype}. What isn't trained goes"
          " into a stage's state."
        )


def check_is_state(state: Any) -> None:
  """Raises a ValueError if that is no state of a run."""
  if not isinstance(state, PipelineState):
    raise ValueError(
      "state must be a PipelineState, from init or an earlier run, got"
      f" {type(state).__name__}."
    )


def check_state(state: PipelineState, like: PipelineState) -> None:
  """Raises a ValueError if the state is another simulator's.

  Args:
    state: The state given.
    like: Shapes of the state that the simulator starts in from its weights.
  """
  if other := tree_forms.first_difference(state, like):
    raise ValueError(
      "state must be one of this simulator, whose schedule, optimizer,"
      f" history_dtype and diagnostics ask for {other.wanted} in"
      f" state{other.path}; got {other.found}."
    )
