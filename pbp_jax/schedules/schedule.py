"""The class of all schedules."""

from collections.abc import Callable
import dataclasses
import numbers
from typing import Any

import numpy as np

from pbp_jax import timetables

CONSISTENCIES = ("inconsistent", "stashed")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """Who meets which version of the weights.

  Made by the functions of `pbp.schedules`; `print(schedule)` shows the lags.

  Attributes:
    name: The schedule's name.
    num_stages: Stages S.
    update_interval: Micro-batches an update, M.
    lag_function: Maps indices of micro-batches `[count]` to their forward lags
      `[S, count]`, as if the pipeline had always been full.
    period: The lags repeat after so many micro-batches; None if they do not.
    max_lag: `[S]` ints, the largest forward lag of a stage.
    delay: `[S]`, the mean forward lag in updates; ints where all are whole.
    micro_batch_delay: `[S]` ints, micro-batches between a forward pass and the
      use of its gradient there.
    consistency: "inconsistent": the backward meets the newest weights;
      "stashed": it meets those that the forward met.
    busy_share: The workers' utilization in the long run; None if unknown.
    make_timetable: Makes the timetable of so many micro-batches; None if the
      schedule prescribes lags without saying how workers come by them.
    num_micro_batches: How many micro-batches the lags are known for; None if
      there is no end.
    why_stashed: Why the weights can't be inconsistent; None if they can.
  """

  name: str
  num_stages: int
  update_interval: int
  lag_function: Callable[[np.ndarray], np.ndarray]
  period: int | None
  max_lag: np.ndarray
  delay: np.ndarray
  micro_batch_delay: np.ndarray
  consistency: str = "inconsistent"
  busy_share: float | None = None
  make_timetable: Callable[[int], timetables.Timetable] | None = None
  num_micro_batches: int | None = None
  why_stashed: str | None = None

  def __post_init__(self):
    if self.consistency not in CONSISTENCIES:
      raise ValueError(
        f"consistency must be one of {CONSISTENCIES}, got {self.consistency!r}."
      )
    if self.why_stashed and not self.is_stashed:
      raise ValueError(
        f'consistency of {self.name} must be "stashed", got'
        f" {self.consistency!r}: {self.why_stashed}."
      )
    for name in ("max_lag", "delay", "micro_batch_delay"):
      values = np.array(getattr(self, name))
      if values.shape != (self.num_stages,):
        raise ValueError(
          f"{name} must have one value for each of the {self.num_stages}"
          f" stages, got shape {values.shape}."
        )
      values.setflags(write=False)
      object.__setattr__(self, name, values)

  @property
  def is_stashed(self) -> bool:
    """Whether the backward meets the weights that the forward met."""
    return self.consistency == "stashed"

  def lags(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lags of the passes of micro-batches `start` to `start + count - 1`.

    Args:
      start: The first micro-batch, from 0.
      count: How many.

    Returns:
      Forward and backward lags, each `[S, count]` ints with
      `0 <= lag <= k(i)`: while the pipeline fills, passes meet version 0.

    Raises:
      ValueError: If `start` or `count` is no int >= 0, or the schedule ends
        before the last of them.

    Example:
      >>> import pbp_jax as pbp
      >>> schedule = pbp.schedules.pipelined_backprop(3)
      >>> forward, backward = schedule.lags(start=0, count=6)
      >>> forward
      array([[0, 1, 2, 3, 4, 4],
             [0, 1, 2, 2, 2, 2],
             [0, 0, 0, 0, 0, 0]])
      >>> backward.any()
      np.False_
    """
    start = check_count("start", start, minimum=0)
    count = check_count("count", count, minimum=0)
    end = self.num_micro_batches
    if end is not None and start + count > end:
      raise ValueError(
        f"{self.name} ends after {end} micro-batches; got start={start},"
        f" count={count}."
      )
    micro_batches = np.arange(start, start + count)
    newest = micro_batches // self.update_interval
    forward = np.minimum(self.lag_function(micro_batches), newest)
    return forward, forward if self.is_stashed else np.zeros_like(forward)

  @property
  def steady_lags(self) -> np.ndarray:
    """Forward lags of one period of a full pipeline, `[S, period]` ints.

    Raises:
      ValueError: If the schedule has no period.
    """
    if self.period is None:
      raise ValueError(f"{self.name} has no period, so no steady lags.")
    fill = int(self.max_lag.max() + 1) * self.update_interval
    return self.lags(-(-fill // self.period) * self.period, self.period)[0]

  @property
  def versions_kept(self) -> np.ndarray:
    """`[S]` ints: weight versions that a worker of real hardware keeps."""
    return self.max_lag + 1 if self.is_stashed else np.ones_like(self.max_lag)

  def with_consistency(self, consistency: str) -> "Schedule":
    """The same timetable with "inconsistent" or "stashed" weights."""
    return dataclasses.replace(self, consistency=consistency)

  def with_weight_stashing(self) -> "Schedule":
    """The same timetable; the backward meets what the forward met."""
    return self.with_consistency("stashed")

  def timetable(self, num_micro_batches: int) -> timetables.Timetable:
    """Who works on which micro-batch at which tick.

    Args:
      num_micro_batches: How many micro-batches go through.

    Returns:
      The timetable, fill and drain included; print it to see it.

    Raises:
      ValueError: If the schedule prescribes lags without a timetable, or
        `num_micro_batches` is no int >= 1.
    """
    count = check_count("num_micro_batches", num_micro_batches, minimum=1)
    if self.make_timetable is None:
      raise ValueError(
        f"{self.name} prescribes lags and no timetable of workers."
      )
    return self.make_timetable(count)

  def utilization(self, num_micro_batches: int | None = None) -> float:
    """The share of the workers' time that is spent on passes.

    Args:
      num_micro_batches: Count from the first fill to the last drain of so many
        micro-batches; None for the long run.

    Returns:
      A share in (0, 1]. Fill-and-drain with M micro-batches an update has
      `M / (M + 2 (S - 1))` in the long run; pipelines that are not drained 1.

    Raises:
      ValueError: If the schedule has no timetable.
    """
    if num_micro_batches is not None or self.busy_share is None:
      return self.timetable(num_micro_batches or 1).utilization()
    return self.busy_share

  def __str__(self) -> str:
    interval = self.update_interval
    shown = self.period or 8
    full = int(self.max_lag.max() + 1) * interval
    start = -(-full // shown) * shown  # past the fill, at a period's start
    if self.num_micro_batches is not None:
      start = max(0, min(start, self.num_micro_batches - shown))
      shown = min(shown, self.num_micro_batches)
    forward, backward = self.lags(start, shown)
    pattern = lambda row: (
      (str(row[0]) if (row == row[0]).all() else " ".join(map(str, row)))
      + ("" if self.period else " ...")
    )
    rows = [(
        "stage", "delay (micro-batches)", "delay (updates)", "forward lag",
        "backward lag", "versions kept",
    )]  # fmt: skip
    rows += [
      (
        str(s),
        str(self.micro_batch_delay[s]),
        f"{self.delay[s]:g}",
        pattern(forward[s]),
        pattern(backward[s]),
        str(self.versions_kept[s]),
      )
      for s in range(self.num_stages)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    weights = f"{self.consistency} weights"
    if not self.max_lag.any():
      weights = "the same weights in both passes"
    every = "micro-batch" if interval == 1 else f"{interval} micro-batches"
    return "\n".join(
      [
        f"{self.name}: {self.num_stages} stages, an update every {every},"
        f" {weights}"
      ]
      + ["  ".join(map(str.rjust, row, widths)) for row in rows]
    )


def check_schedule(schedule: Any, num_stages: int) -> None:
  """Raises a ValueError unless this is a schedule of a pipeline's stages.

  Args:
    schedule: What was given as one.
    num_stages: Stages of the pipeline.
  """
  if not isinstance(schedule, Schedule):
    raise ValueError(
      f"schedule must be a Schedule made by pbp.schedules, got {schedule!r}."
    )
  if schedule.num_stages != num_stages:
    raise ValueError(
      f"schedule must have as many stages as the pipeline, {num_stages};"
      f" {schedule.name} has {schedule.num_stages}."
    )


def check_count(name: str, value: Any, minimum: int) -> int:
  """Returns `value` as an int, or says what is wrong with it."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or value < minimum:
    raise ValueError(f"{name} must be an int >= {minimum}, got {value!r}.")
  return int(value)
