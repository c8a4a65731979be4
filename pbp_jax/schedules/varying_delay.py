"""Schedules whose lags vary from micro-batch to micro-batch, or by rule."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from pbp_jax import timetables
from pbp_jax.schedules import constant_delay
from pbp_jax.schedules.schedule import Schedule, check_count


def pipedream_2bw(
  num_stages: int, update_interval: int | None = None
) -> Schedule:
  """PipeDream-2BW: two buffers of weights (Narayanan et al. 2021).

  The micro-batches of update k meet version k - 1 at every stage and in both
  passes: `w_{k+1} = w_k - lr mean g(w_{k-1})`.

  Args:
    num_stages: Stages S.
    update_interval: Micro-batches M an update, at least S, since otherwise two
      versions are not enough; S if None.

  Returns:
    The schedule, with stashed weights and a delay of one update.

  Raises:
    ValueError: If `update_interval` is no int >= S.
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  interval = num_stages if update_interval is None else update_interval
  interval = check_count("update_interval", interval, minimum=num_stages)
  ones = np.ones(num_stages, int)
  return Schedule(
    name="pipedream_2bw",
    num_stages=num_stages,
    update_interval=interval,
    lag_function=lambda i: np.ones((num_stages, len(i)), int),
    period=1,
    max_lag=ones,
    delay=ones,
    micro_batch_delay=np.arange(num_stages)[::-1],
    consistency="stashed",
    busy_share=1.0,
    make_timetable=lambda count: timetables.one_forward_one_backward(
      num_stages, count
    ),
    why_stashed="the second buffer holds the weights that the forward met",
  )


def jittered_delays(
  delays: Sequence[int], jitter: int, seed: int = 0, update_interval: int = 1
) -> Schedule:
  """Delays that vary at random within bounds, as on a busy network.

  The forward of micro-batch i at stage s meets the version of micro-batch
  `i - max(0, delays[s] + j)` with j uniform on `-jitter, ..., jitter`, drawn
  for each micro-batch and stage from the seed alone.

  Args:
    delays: `[S]` ints >= 0, in micro-batches; `schedule.micro_batch_delay` of
      another schedule, say.
    jitter: The bound, an int >= 0.
    seed: An int >= 0.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, aperiodic, with inconsistent weights.
  """
  steady = constant_delay.from_delays(delays, update_interval)
  jitter = check_count("jitter", jitter, minimum=0)
  seed = check_count("seed", seed, minimum=0)
  column = steady.micro_batch_delay[:, None]
  interval = steady.update_interval
  block = 1024  # micro-batches drawn at a time, so that any can be looked up

  def draw(index):
    generator = np.random.default_rng([seed, index])
    shape = (steady.num_stages, block)
    return generator.integers(-jitter, jitter, shape, endpoint=True)

  def lag_function(i):
    blocks, which = np.unique(i // block, return_inverse=True)
    draws = np.stack([draw(b) for b in blocks] or [draw(0)])
    drawn = draws[which, :, i % block].T
    return i // interval - (i - np.maximum(0, column + drawn)) // interval

  possible = np.maximum(0, column + np.arange(-jitter, jitter + 1))
  mean = possible.mean(axis=1)
  return dataclasses.replace(
    steady,
    name="jittered_delays",
    lag_function=lag_function,
    period=None,
    max_lag=-(-possible.max(axis=1) // interval),
    delay=mean / interval,
    micro_batch_delay=np.rint(mean).astype(int),
  )


def interleaved(
  num_workers: int, num_chunks: int, update_interval: int = 1
) -> Schedule:
  """Interleaved (virtual) stages, pipelined without draining.

  Worker p holds the stages `p, p + P, p + 2 P, ...`, one a chunk, and does one
  forward and one backward of one of them in each tick, P micro-batches after
  each other through a chunk. Delays follow from the ticks and repeat after P
  micro-batches.

  Args:
    num_workers: Workers P.
    num_chunks: Stages a worker, V; the pipeline has `S = P V` stages.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with inconsistent weights.
  """
  workers = check_count("num_workers", num_workers, minimum=1)
  chunks = check_count("num_chunks", num_chunks, minimum=1)
  interval = check_count("update_interval", update_interval, minimum=1)
  period = math.lcm(workers, interval)
  # Long enough to be past the fill: nothing stays longer than 2 P V ticks.
  fill = period * (2 + 4 * workers * chunks // period)
  table = timetables.interleaved(workers, chunks, fill + 2 * period)
  steady = np.arange(fill, fill + period)
  by_micro_batch = steady - table.versions()[0][:, steady]
  lags = steady // interval - table.versions(interval)[0][:, steady]
  mean = lags.mean(axis=1)
  return Schedule(
    name="interleaved",
    num_stages=workers * chunks,
    update_interval=interval,
    lag_function=lambda i: lags[:, i % period],
    period=period,
    max_lag=lags.max(axis=1),
    delay=mean.astype(int) if (mean == mean.astype(int)).all() else mean,
    micro_batch_delay=np.rint(by_micro_batch.mean(axis=1)).astype(int),
    busy_share=1.0,
    make_timetable=lambda count: timetables.interleaved(workers, chunks, count),
  )


def from_timetable(
  timetable: timetables.Timetable,
  update_interval: int = 1,
  consistency: str = "inconsistent",
) -> Schedule:
  """The schedule of a timetable of your own.

  Args:
    timetable: When each stage does the forward and the backward of each
      micro-batch. That no pass comes before one it depends on was checked when
      it was made.
    update_interval: Micro-batches M an update: a stage makes an update when it
      has done M further backward passes.
    consistency: "inconsistent" or "stashed".

  Returns:
    The schedule, which ends with the timetable.

  Raises:
    ValueError: If a stage's backward passes are not in the order of the
      micro-batches: their gradients would be used in another order than the
      one that all versions are counted in.
  """
  interval = check_count("update_interval", update_interval, minimum=1)
  backward = timetable.backward_tick
  for s, i in np.argwhere(np.diff(backward, axis=1) <= 0)[:1]:
    raise ValueError(
      "timetable must have each stage's backward passes in the order of the"
      f" micro-batches; stage {s} does that of {i} at tick {backward[s, i]} and"
      f" that of {i + 1} at tick {backward[s, i + 1]}."
    )
  micro_batches = np.arange(timetable.num_micro_batches)
  lags = micro_batches // interval - timetable.versions(interval)[0]
  by_micro_batch = micro_batches - timetable.versions()[0]
  return Schedule(
    name="from_timetable",
    num_stages=timetable.num_stages,
    update_interval=interval,
    lag_function=lambda i: lags[:, i],
    period=None,
    max_lag=lags.max(axis=1),
    delay=lags.mean(axis=1),
    micro_batch_delay=by_micro_batch.max(axis=1),
    consistency=consistency,
    busy_share=timetable.utilization(),
    make_timetable=lambda count: timetable.first(count),
    num_micro_batches=timetable.num_micro_batches,
  )


def with_synchronous_start(
  schedule: Schedule, num_micro_batches: int
) -> Schedule:
  """Trains synchronously at first, then by the schedule (PipeMare's T3).

  The first micro-batches have no lag; then the pipeline fills as it would from
  the start, its passes meeting no version older than that of the switch.

  Args:
    schedule: What comes after.
    num_micro_batches: How many micro-batches come before, a multiple of the
      update interval.

  Returns:
    The schedule, without a period. Its delay is the later one.

  Raises:
    ValueError: If `num_micro_batches` is no such int >= 0.
  """
  first = check_count("num_micro_batches", num_micro_batches, minimum=0)
  interval = schedule.update_interval
  if first % interval:
    raise ValueError(
      "num_micro_batches must be a multiple of the update interval"
      f" {interval}, got {first}."
    )

  def lag_function(i):
    later = np.maximum(i - first, 0)
    return np.minimum(schedule.lag_function(later), later // interval)

  return dataclasses.replace(
    schedule,
    name=f"{schedule.name} after {first} synchronous micro-batches",
    lag_function=lag_function,
    period=None,
    make_timetable=None,
    num_micro_batches=None
    if schedule.num_micro_batches is None
    else schedule.num_micro_batches + first,
  )
