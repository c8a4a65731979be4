"""What a pipeline on devices is between two runs."""

import operator
from typing import Any

from flax import struct
import jax

from pbp_jax import tree_forms
from pbp_jax.devices import passes, tick_tables
from pbp_jax.devices import tick as tick_lib


@struct.dataclass
class State:
  """A pipeline between two runs.

  Attributes:
    first: The micro-batch that entered first since the pipeline was empty.
    fed: How many micro-batches have entered, ever.
    tick: Ticks since the pipeline was empty.
    key: The run's random key.
    held: What the devices hold.
  """

  first: int
  fed: int
  tick: int
  key: jax.Array
  held: tick_lib.Held


def check_is_state(state: Any) -> None:
  """Raises a ValueError if that is no state of a pipeline on devices."""
  if not isinstance(state, State):
    raise ValueError(
      "state must be a pbp.devices.State, from init, restore or an earlier run,"
      f" got {type(state).__name__}."
    )


def held_shapes(
  work: passes.Passes, slots: tick_tables.Slots, grid: tuple[int, ...]
) -> tick_lib.Held:
  """The shapes and dtypes of what devices hold.

  Args:
    work: The passes.
    slots: The entries of the rings.
    grid: Replicas and devices.

  Returns:
    Shapes with the grid in front.
  """
  empty = jax.eval_shape(lambda: tick_lib.empty(work, slots))
  held = empty.replace(
    params=work.layout.params.form,
    opt_state=work.layout.opt_state.form,
    stage_state=work.layout.stage_state.form,
  )
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((*grid, *leaf.shape), leaf.dtype), held
  )


def check_held(state: State, like: tick_lib.Held) -> None:
  """Raises a ValueError if the state is another pipeline's.

  Args:
    state: The state.
    like: The shapes and dtypes of what the devices of the pipeline hold.

  Raises:
    ValueError: If those of the state hold something else.
  """
  other = tree_forms.first_difference(
    state.held, like, operator.attrgetter("dtype")
  )
  if other:
    raise ValueError(
      "state must be one of this pipeline, whose stages, example, optimizer"
      f" and schedule ask for {other.wanted} in state.held{other.path}; got"
      f" {other.found}."
    )
