"""The stages of a pipeline as one function of inputs and weights."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
from typing import Any

import jax

from pbp_jax import stages as stages_lib
from pbp_jax.stages import PyTree


def init(
  stages: Sequence[stages_lib.Stage], key: jax.Array, example: PyTree
) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
  """Draws the parameters and states of all stages.

  Args:
    stages: The pipeline.
    key: A random key.
    example: One micro-batch of inputs.

  Returns:
    A tuple of parameters and one of states (None without one), one a stage.

  Raises:
    ValueError: If a stage can't take what the stage before it gives.
  """
  params, states = [], []
  x = example
  for s, stage in enumerate(stages):
    key_params, key_state = jax.random.split(jax.random.fold_in(key, s))
    with _explaining(stages, s, x):
      params.append(stage.init(key_params, x))
      states.append(stage.init_state and stage.init_state(key_state, x))
      x, _ = stage(params[s], states[s], x, None)
  return tuple(params), tuple(states)


def apply(
  stages: Sequence[stages_lib.Stage],
  params_fwd: Sequence[PyTree],
  params_bwd: Sequence[PyTree],
  states: Sequence[PyTree],
  x: PyTree,
  key: jax.Array | None = None,
  two_version: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> tuple[PyTree, tuple[PyTree, ...]]:
  """Runs a micro-batch through all stages.

  Args:
    stages: The pipeline.
    params_fwd: The weights that the forward passes meet.
    params_bwd: The weights that the backward passes meet, which carry the
      gradient. Where a stage's are the very object that its `params_fwd` are,
      its back-propagation is the plain one.
    states: The stages' states.
    x: The inputs.
    key: The micro-batch's key; None in evaluation mode.
    two_version: `two_version_vjp.saved` or `.recompute`.

  Returns:
    The outputs of the last stage, and the states after this micro-batch.

  Raises:
    ValueError: If a stage can't take what the stage before it gives.
  """
  next_states = []
  for s, stage in enumerate(stages):

    def one_version(params, x, state, key, stage=stage):
      return stage(params, state, x, key)

    function: Callable[..., Any] = one_version
    weights = (params_bwd[s],)
    if params_fwd[s] is not params_bwd[s] and jax.tree.leaves(params_fwd[s]):
      assert two_version is not None
      weights = (params_fwd[s], params_bwd[s])
      function = two_version(one_version)
    stage_key = None
    if key is not None and stage.stochastic:
      stage_key = jax.random.fold_in(key, s)
    with _explaining(stages, s, x):
      x, state = function(*weights, x, states[s], stage_key)
    next_states.append(state)
  return x, tuple(next_states)


@contextlib.contextmanager
def _explaining(
  stages: Sequence[stages_lib.Stage], s: int, x: PyTree
) -> Iterator[None]:
  """Says which stage could not be applied to what."""
  try:
    yield
  except Exception as error:
    shapes = jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), x)
    raise ValueError(
      f"Stage {s} of {len(stages)} ({stages[s].name}) can't be applied to its"
      f" input {shapes}: {error}"
    ) from error
