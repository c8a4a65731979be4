"""A schedule's timetable as what each device does at each tick.

NumPy only. A device does a forward of one micro-batch and a backward of
another in a tick, or either, or neither. What it sends arrives at its
neighbour at the next tick.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from pbp_jax import schedules, timetables

# No micro-batch.
NONE = -1


class TickTables(NamedTuple):
  """What the devices do, `[ticks, devices]` ints each.

  Micro-batches count from the start of the run, `NONE` is none.

  Attributes:
    forward: The micro-batch whose forward is done.
    backward: The micro-batch whose backward is done.
    arriving_input: The micro-batch whose input arrives at the tick's start.
    arriving_error: The micro-batch whose error arrives before the backward;
      on the last device that of its own forward.
    version: The weight version held at the tick.
    met_version: The version that the forward of `backward` met.
  """

  forward: np.ndarray
  backward: np.ndarray
  arriving_input: np.ndarray
  arriving_error: np.ndarray
  version: np.ndarray
  met_version: np.ndarray

  def between(self, start: int, stop: int) -> "TickTables":
    """The ticks from `start` to `stop - 1`."""
    return TickTables(*(table[start:stop] for table in self))


class Slots(NamedTuple):
  """How many entries each kind of ring needs, on the device that needs most.

  Attributes:
    inputs: Inputs, from their arrival until their backward.
    errors: Errors, from their arrival until their backward.
    versions: Weight versions, from a forward until its backward.
    targets: Targets, from the entry until the loss.
  """

  inputs: int
  errors: int
  versions: int
  targets: int


@dataclasses.dataclass(frozen=True)
class Filling:
  """A pipeline from its first micro-batch until it is drained.

  Attributes:
    timetable: The timetable of its micro-batches.
    update_interval: Micro-batches an update, M.
    first: The number of its first micro-batch.
  """

  timetable: timetables.Timetable
  update_interval: int
  first: int = 0

  @functools.cached_property
  def tables(self) -> TickTables:
    """What the devices do, from the first tick to the last."""
    forward, backward = map(
      self._by_tick,
      (self.timetable.forward_tick, self.timetable.backward_tick),
    )
    arriving_input, arriving_error = np.full((2, *forward.shape), NONE)
    arriving_input[:, 0] = forward[:, 0]
    arriving_input[1:, 1:] = forward[:-1, :-1]
    arriving_error[1:, :-1] = backward[:-1, 1:]
    arriving_error[:, -1] = forward[:, -1]
    is_done = np.cumsum(backward != NONE, axis=0)
    done_before = np.concatenate([np.zeros_like(is_done[:1]), is_done[:-1]])
    version = (self.first + done_before) // self.update_interval
    met_version = version.copy()
    tick, device = np.nonzero(backward != NONE)
    micro_batch = backward[tick, device] - self.first
    met_tick = self.timetable.forward_tick[device, micro_batch]
    met_version[tick, device] = version[met_tick, device]
    made = (
      forward, backward, arriving_input, arriving_error, version, met_version,
    )  # fmt: skip
    return TickTables(*(table.astype(np.int32) for table in made))

  @functools.cached_property
  def slots(self) -> Slots:
    """The entries that rings need."""
    forward, backward = (
      self.timetable.forward_tick,
      self.timetable.backward_tick,
    )
    arrival = np.concatenate([forward[:1], forward[:-1] + 1])
    error_arrival = np.concatenate([backward[1:] + 1, forward[-1:]])
    tables = self.tables
    return Slots(
      inputs=_most_held(arrival, backward),
      errors=_most_held(error_arrival, backward),
      versions=1 + int((tables.version - tables.met_version).max()),
      targets=_most_held(forward[:1], forward[-1:]),
    )

  def _by_tick(self, ticks: np.ndarray) -> np.ndarray:
    """Turns ticks by device and micro-batch into micro-batches by tick."""
    device, micro_batch = np.indices(ticks.shape)
    table = np.full((self.timetable.num_ticks, len(ticks)), NONE)
    table[ticks, device] = self.first + micro_batch
    return table


def check_runs_on_devices(schedule: schedules.Schedule) -> None:
  """Raises a ValueError unless devices that hold one version can follow it.

  Args:
    schedule: The schedule.

  Raises:
    ValueError: If the schedule has no timetable, a worker has several stages,
      micro-batches overtake each other, or a forward is to meet weights older
      than those that its device holds.
  """
  name = schedule.name
  if schedule.make_timetable is None:
    raise ValueError(
      f"schedule must say at which tick who works; {name} prescribes lags"
      " without a timetable."
    )
  count = num_sample_micro_batches(schedule)
  timetable = schedule.timetable(count)
  if (timetable.worker != np.arange(schedule.num_stages)).any():
    raise ValueError(
      f"schedule must give each stage a device of its own; {name} has workers"
      f" with several stages: {timetable.worker}."
    )
  for ticks in (timetable.forward_tick, timetable.backward_tick):
    if (np.diff(ticks, axis=1) <= 0).any():
      raise ValueError(
        "schedule must bring the micro-batches through each device in their"
        f" order; {name} does not."
      )
  newest = np.arange(count) // schedule.update_interval
  held = timetable.versions(schedule.update_interval)[0]
  wanted = newest - schedule.lags(0, count)[0]
  if (held != wanted).any():
    s, i = np.argwhere(held != wanted)[0]
    raise ValueError(
      "schedule must let each forward meet the weights that its device holds;"
      f" in {name} the forward of micro-batch {i} at stage {s} meets version"
      f" {wanted[s, i]} while the device holds version {held[s, i]}."
    )


def num_sample_micro_batches(schedule: schedules.Schedule) -> int:
  """How many micro-batches show all that a schedule ever does."""
  end = schedule.num_micro_batches
  count = 4 * (schedule.num_stages + schedule.update_interval)
  return count if end is None else end


def _most_held(arrival: np.ndarray, use: np.ndarray) -> int:
  """The most micro-batches that a device holds at a time.

  Args:
    arrival: Ticks `[devices, micro-batches]` at which they arrive, in order.
    use: The ticks at which they are used last.

  Returns:
    The number.
  """
  return max(
    int((np.searchsorted(a, u, side="right") - np.arange(len(a))).max())
    for a, u in zip(arrival, use, strict=True)
  )
