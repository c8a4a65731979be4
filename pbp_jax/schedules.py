"""Schedules: the timetable of a pipeline as the lags that it causes.

Index convention of the whole package: micro-batch `i` belongs to update
`k(i) = i // M`; stage `s` is 0 at the input and `S - 1` at the loss; version
`k` of a stage's weights is what `k` updates have made of them. A *delay* counts
micro-batches or updates, as its name says; the *lag* of a pass of micro-batch
`i` is how many versions older than `k(i)` the weights are that it meets.

A pipeline that works in ticks, with many micro-batches in flight, computes the
same numbers as one forward and one backward a micro-batch whose weights lag by
what the schedule says. NumPy only: time is data, arrays on a device begin after
it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import numbers
from typing import Any

import numpy as np

from pbp_jax import timetables

CONSISTENCIES = ("inconsistent", "stashed")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """Who meets which version of the weights.

  Made by this module's functions; `print(schedule)` shows the lags.

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

  def __post_init__(self):
    if self.consistency not in CONSISTENCIES:
      raise ValueError(
        f"consistency must be one of {CONSISTENCIES}, got {self.consistency!r}."
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
      ValueError: If `start` or `count` is no int >= 0.

    Example:
      >>> forward, backward = pipelined_backprop(3).lags(start=0, count=6)
      >>> forward
      array([[0, 1, 2, 3, 4, 4],
             [0, 1, 2, 2, 2, 2],
             [0, 0, 0, 0, 0, 0]])
      >>> backward.any()
      np.False_
    """
    start = check_count("start", start, minimum=0)
    count = check_count("count", count, minimum=0)
    micro_batches = np.arange(start, start + count)
    newest = micro_batches // self.update_interval
    forward = np.minimum(self.lag_function(micro_batches), newest)
    return forward, forward if self.is_stashed else np.zeros_like(forward)

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
        f"{self.name} prescribes lags and no timetable of workers. Schedules"
        " with one: synchronous, fill_drain, pipelined_backprop, one_f_one_b."
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
    every = "micro-batch" if interval == 1 else f"{interval} micro-batches"
    return "\n".join(
      [
        f"{self.name}: {self.num_stages} stages, an update every {every},"
        f" {self.consistency} weights"
      ]
      + ["  ".join(map(str.rjust, row, widths)) for row in rows]
    )


def synchronous(num_stages: int) -> Schedule:
  """Ordinary training: the pipeline is drained after every micro-batch.

  Args:
    num_stages: Stages S.

  Returns:
    A schedule of zero lags, utilization `1 / (1 + 2 (S - 1))`.
  """
  return dataclasses.replace(fill_drain(num_stages, 1), name="synchronous")


def fill_drain(num_stages: int, num_micro_batches: int) -> Schedule:
  """Fill-and-drain (GPipe): M micro-batches, drain, one update.

  Args:
    num_stages: Stages S.
    num_micro_batches: Micro-batches M an update.

  Returns:
    A schedule of zero lags, utilization `M / (M + 2 (S - 1))`.

  Example:
    >>> fill_drain(num_stages=34, num_micro_batches=32).utilization()
    0.32653061224489793
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  interval = check_count("num_micro_batches", num_micro_batches, minimum=1)
  return dataclasses.replace(
    _constant_delay("fill_drain", np.zeros(num_stages, int), interval),
    busy_share=interval / (interval + 2 * (num_stages - 1)),
    make_timetable=lambda count: timetables.fill_and_drain(
      num_stages, count, interval
    ),
  )


def pipelined_backprop(num_stages: int, update_interval: int = 1) -> Schedule:
  """Fine-grained Pipelined Backpropagation (Kosson et al., 2003.11666).

  Every tick each stage does one forward and one backward, and the pipeline is
  never drained: stage s meets its micro-batch's gradient `2 (S - 1 - s)`
  micro-batches after its forward. Forward lag in updates:
  `i // M - (i - 2 (S - 1 - s)) // M`.

  Args:
    num_stages: Stages S.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with inconsistent weights; see `with_weight_stashing`.

  Example:
    >>> schedule = pipelined_backprop(num_stages=4, update_interval=4)
    >>> schedule.delay
    array([1.5, 1. , 0.5, 0. ])
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  return dataclasses.replace(
    _constant_delay(
      "pipelined_backprop",
      2 * np.arange(num_stages)[::-1],
      check_count("update_interval", update_interval, minimum=1),
    ),
    busy_share=1.0,
    make_timetable=lambda count: timetables.fine_grained(num_stages, count),
  )


def one_f_one_b(num_stages: int, update_interval: int = 1) -> Schedule:
  """PipeDream's 1F1B with weight stashing (Narayanan et al., SOSP 2019).

  A worker does a forward and a backward in turn, so the delay of stage s is
  `S - 1 - s` micro-batches, and it keeps `S - s` versions of its weights.

  Args:
    num_stages: Stages S.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with stashed weights.
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  return dataclasses.replace(
    _constant_delay(
      "one_f_one_b",
      np.arange(num_stages)[::-1],
      check_count("update_interval", update_interval, minimum=1),
    ),
    consistency="stashed",
    busy_share=1.0,
    make_timetable=lambda count: timetables.one_forward_one_backward(
      num_stages, count
    ),
  )


def uniform_delay(
  num_stages: int, delay: int, update_interval: int = 1
) -> Schedule:
  """Every stage has one and the same delay; no pipeline prescribes it.

  With `with_weight_stashing` it is delayed SGD: gradients taken at one old
  version of the whole network (see `delay_gradients`).

  Args:
    num_stages: Stages S.
    delay: Micro-batches D between a forward and the use of its gradient.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with inconsistent weights.
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  delay = check_count("delay", delay, minimum=0)
  return dataclasses.replace(
    from_delays([delay] * num_stages, update_interval), name="uniform_delay"
  )


def from_delays(delays: Sequence[int], update_interval: int = 1) -> Schedule:
  """A delay for each stage, as given.

  Args:
    delays: `[S]` ints >= 0: micro-batches between a stage's forward and the
      use of its gradient.
    update_interval: Micro-batches M an update. The forward of micro-batch i
      meets version `(i - delays[s]) // M`.

  Returns:
    The schedule, with inconsistent weights.

  Raises:
    ValueError: If `delays` is empty or holds anything but ints >= 0.
  """
  if np.ndim(delays) != 1 or not len(delays):
    raise ValueError(
      f"delays must be a sequence of ints >= 0, one a stage, got {delays!r}."
    )
  return _constant_delay(
    "from_delays",
    np.array(
      [
        check_count(f"delays[{s}]", delay, minimum=0)
        for s, delay in enumerate(delays)
      ]
    ),
    check_count("update_interval", update_interval, minimum=1),
  )


def _constant_delay(
  name: str, micro_batch_delay: np.ndarray, update_interval: int
) -> Schedule:
  """Forward of micro-batch i at the version of micro-batch i - delay."""
  column = micro_batch_delay[:, None]
  mean = micro_batch_delay / update_interval
  return Schedule(
    name=name,
    num_stages=len(micro_batch_delay),
    update_interval=update_interval,
    lag_function=lambda i: (
      i // update_interval - (i - column) // update_interval
    ),
    period=update_interval,
    max_lag=-(-micro_batch_delay // update_interval),
    delay=mean.astype(int) if (mean == mean.astype(int)).all() else mean,
    micro_batch_delay=micro_batch_delay,
  )


def check_count(name: str, value: Any, minimum: int) -> int:
  """Returns `value` as an int, or says what is wrong with it."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole or value < minimum:
    raise ValueError(f"{name} must be an int >= {minimum}, got {value!r}.")
  return int(value)
