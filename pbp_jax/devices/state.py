"""What a pipeline on devices is between two runs."""

from typing import Any

from flax import struct
import jax

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
