"""Timetables: which worker does what at which tick of real hardware.

A timetable is two tables of ticks, one for the forward and one for the
backward passes. From it follow the utilization of the workers and the weight
version that each pass meets; `schedules` states the latter in closed form, and
the tests hold the two against each other.

Within a tick a worker computes with the weights it holds at the tick's start
and updates them at its end.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
  """The ticks at which the stages of a pipeline work on each micro-batch.

  Attributes:
    forward_tick: `[S, N]` ints: when stage s does the forward of micro-batch i.
    backward_tick: `[S, N]` ints: the same for the backward.
    slots_per_tick: 2 if a tick has room for one forward and one backward of a
      worker (fine-grained pipelines), 1 if for one of the two.
    worker: `[S]` ints, the worker that holds each stage; by default each stage
      has its own.

  Raises:
    ValueError: If the tables are not two `[S, N]` tables of non-negative ints
      of one shape, a worker would have to do two things in one slot, or a
      pass comes before the pass it depends on.

  Example:
    >>> print(fine_grained(num_stages=2, num_micro_batches=3))
    tick       0  1  2  3  4
    stage 0 F  0  1  2  .  .
            B  .  .  0  1  2
    stage 1 F  .  0  1  2  .
            B  .  0  1  2  .
  """

  forward_tick: np.ndarray
  backward_tick: np.ndarray
  slots_per_tick: int = 2
  worker: np.ndarray | None = None

  def __post_init__(self):
    if self.slots_per_tick not in (1, 2):
      raise ValueError(
        f"slots_per_tick must be 1 or 2, got {self.slots_per_tick!r}."
      )
    for name in ("forward_tick", "backward_tick"):
      table = np.array(getattr(self, name))
      if (
        table.ndim != 2
        or not table.size
        or not np.issubdtype(table.dtype, np.integer)
        or table.min() < 0
      ):
        raise ValueError(
          f"{name} must be a non-empty [stages, micro-batches] table of"
          f" ticks >= 0, got {getattr(self, name)!r}."
        )
      table.setflags(write=False)
      object.__setattr__(self, name, table)
    if self.forward_tick.shape != self.backward_tick.shape:
      raise ValueError(
        "forward_tick and backward_tick must have one shape, got"
        f" {self.forward_tick.shape} and {self.backward_tick.shape}."
      )
    worker = np.arange(self.num_stages) if self.worker is None else self.worker
    worker = np.array(worker)
    if worker.shape != (self.num_stages,):
      raise ValueError(
        f"worker must name a worker for each of the {self.num_stages} stages,"
        f" got {self.worker!r}."
      )
    object.__setattr__(self, "worker", worker)
    self._check_order()
    self._check_slots()

  def _check_order(self):
    """Raises where a pass comes before one it depends on."""
    forward, backward = self.forward_tick, self.backward_tick
    # The last stage turns round within a tick that has room for both passes.
    turn = int(self.slots_per_tick == 1)
    for kind, stage, ticks, earliest, reason in (
      ("forward", 1, forward[1:], forward[:-1] + 1, "that of stage {}"),
      ("backward", 0, backward[:-1], backward[1:] + 1, "that of stage {}"),
      ("backward", 0, backward, forward + turn, "its forward at stage {}"),
    ):
      for s, i in np.argwhere(ticks < earliest)[:1]:
        before = {1: s, 0: s + (backward is not ticks)}[stage]
        raise ValueError(
          f"The {kind} of micro-batch {i} at stage {s + stage} is at tick"
          f" {ticks[s, i]}; it must come after {reason.format(before)}, so"
          f" at tick {earliest[s, i]} or later."
        )

  def _check_slots(self):
    """Raises where a worker would do two things in one slot."""
    for worker in np.unique(self._workers):
      own = self._workers == worker
      slots = [self.forward_tick[own].ravel(), self.backward_tick[own].ravel()]
      if self.slots_per_tick == 1:
        slots = [np.concatenate(slots)]
      for ticks in slots:
        values, counts = np.unique(ticks, return_counts=True)
        if counts.max() > 1:
          raise ValueError(
            f"Worker {worker} is given {counts.max()} passes of one slot at"
            f" tick {values[counts.argmax()]}."
          )

  @property
  def _workers(self) -> np.ndarray:
    assert self.worker is not None
    return self.worker

  @property
  def num_stages(self) -> int:
    """The number of stages S."""
    return self.forward_tick.shape[0]

  @property
  def num_micro_batches(self) -> int:
    """The number of micro-batches N."""
    return self.forward_tick.shape[1]

  @property
  def num_ticks(self) -> int:
    """How many ticks it takes until the pipeline has drained."""
    return int(max(self.forward_tick.max(), self.backward_tick.max())) + 1

  def utilization(self) -> float:
    """The share of the workers' slots that are busy, fill and drain included.

    Returns:
      Passes done over slots there are, in (0, 1], which for `fine_grained` is
      `N / (N + 2 (S - 1))`.
    """
    num_workers = len(np.unique(self._workers))
    slots = self.num_ticks * num_workers * self.slots_per_tick
    return 2 * self.forward_tick.size / slots

  def first(self, num_micro_batches: int) -> "Timetable":
    """The timetable of the first so many micro-batches.

    Args:
      num_micro_batches: How many, at most as many as there are.

    Returns:
      Their part of this timetable.

    Raises:
      ValueError: If there are fewer.
    """
    if num_micro_batches > self.num_micro_batches:
      raise ValueError(
        f"num_micro_batches must be at most {self.num_micro_batches}, got"
        f" {num_micro_batches}."
      )
    return dataclasses.replace(
      self,
      forward_tick=self.forward_tick[:, :num_micro_batches],
      backward_tick=self.backward_tick[:, :num_micro_batches],
    )

  def versions(self, update_interval: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The weight version that each pass meets.

    A stage makes an update when it has done `update_interval` further backward
    passes, so a pass at tick t meets version
    `#(backward passes of the stage before t) // update_interval`.

    Args:
      update_interval: Micro-batches an update M.

    Returns:
      Versions of the forward and of the backward passes, each `[S, N]`.
    """
    done = np.stack(
      [
        np.searchsorted(np.sort(backward), np.stack([forward, backward]))
        for forward, backward in zip(
          self.forward_tick, self.backward_tick, strict=True
        )
      ]
    )
    return done[:, 0] // update_interval, done[:, 1] // update_interval

  def __str__(self) -> str:
    num_ticks = self.num_ticks
    width = max(3, len(str(max(num_ticks, self.num_micro_batches))) + 2)
    margin = len(f"stage {self.num_stages - 1} F")
    lines = [
      "tick".ljust(margin)
      + "".join(str(tick).rjust(width) for tick in range(num_ticks))
    ]
    for s in range(self.num_stages):
      for letter, table in (
        ("F", self.forward_tick),
        ("B", self.backward_tick),
      ):
        at_tick = {int(tick): i for i, tick in enumerate(table[s])}
        label = f"stage {s}" if letter == "F" else ""
        lines.append(
          label.ljust(margin - 1)
          + letter
          + "".join(
            str(at_tick.get(tick, ".")).rjust(width)
            for tick in range(num_ticks)
          )
        )
    return "\n".join(lines)


def fine_grained(
  num_stages: int, num_micro_batches: int, turnaround: int = 0
) -> Timetable:
  """Every stage does one forward and one backward in every tick.

  Micro-batch i is forwarded by stage s at tick `i + s` and comes back at tick
  `i + 2 (S - 1) - s`; the last stage turns it round within a tick.

  Args:
    num_stages: Stages S.
    num_micro_batches: Micro-batches N.
    turnaround: Ticks between the last stage's forward and its backward.

  Returns:
    The timetable of `N + 2 (S - 1) + turnaround` ticks.
  """
  s, i = np.ogrid[:num_stages, :num_micro_batches]
  return Timetable(i + s, i + 2 * (num_stages - 1) - s + turnaround)


def interleaved(
  num_workers: int, num_chunks: int, num_micro_batches: int
) -> Timetable:
  """Fine-grained work on interleaved stages.

  Stage `s = v P + p` is chunk v of worker p. Micro-batches go in groups of P:
  each worker forwards a group through chunk 0, then through chunk 1, and so on,
  and brings groups back through the chunks in reverse; one forward and one
  backward a tick.

  Args:
    num_workers: Workers P.
    num_chunks: Chunks V a worker.
    num_micro_batches: Micro-batches N.

  Returns:
    The timetable of `P V` stages.
  """
  s, i = np.ogrid[: num_workers * num_chunks, :num_micro_batches]
  chunk, worker = s // num_workers, s % num_workers
  group, place = i // num_workers, i % num_workers
  start = group * num_workers * num_chunks + place
  last = num_workers * num_chunks - 1
  forward = start + chunk * num_workers + worker
  backward = start + last + (last - s)
  return Timetable(forward, backward, worker=worker[:, 0])


def fill_and_drain(
  num_stages: int, num_micro_batches: int, update_interval: int
) -> Timetable:
  """`fine_grained`, drained after every `update_interval` micro-batches.

  Args:
    num_stages: Stages S.
    num_micro_batches: Micro-batches N in all.
    update_interval: Micro-batches M between two drains.

  Returns:
    The timetable; each filling takes `M + 2 (S - 1)` ticks.
  """
  s, i = np.ogrid[:num_stages, :num_micro_batches]
  depth = 2 * (num_stages - 1)
  start = i // update_interval * (update_interval + depth)
  i = i % update_interval + start
  return Timetable(i + s, i + depth - s)


def one_forward_one_backward(
  num_stages: int, num_micro_batches: int
) -> Timetable:
  """PipeDream's 1F1B: a tick has room for one pass of a stage.

  Stage s fills with `S - s` forwards, then does one backward and one forward
  in turn: the forward of micro-batch i at tick `2 i + s` (`i + s` while it
  fills) and the backward at tick `2 (i + S) - 1 - s`.

  Args:
    num_stages: Stages S.
    num_micro_batches: Micro-batches N.

  Returns:
    The timetable of `2 (N + S - 1)` ticks.
  """
  s, i = np.ogrid[:num_stages, :num_micro_batches]
  forward = np.where(i < num_stages - s, i + s, 2 * i + s)
  return Timetable(forward, 2 * (i + num_stages) - 1 - s, slots_per_tick=1)
