"""Schedules whose stages have one delay each, in micro-batches."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from pbp_jax import timetables
from pbp_jax.schedules.schedule import Schedule, check_count


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
    constant_delay("fill_drain", np.zeros(num_stages, int), interval),
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
    constant_delay(
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
    constant_delay(
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
  return constant_delay(
    "from_delays",
    np.array(
      [
        check_count(f"delays[{s}]", delay, minimum=0)
        for s, delay in enumerate(delays)
      ]
    ),
    check_count("update_interval", update_interval, minimum=1),
  )


def vertical_sync(num_stages: int, update_interval: int = 1) -> Schedule:
  """PipeDream's vertical sync: one version for the whole network.

  A micro-batch is forwarded and comes back on the version that stage 0 held
  when it entered, so the lag is that of stage 0 under 1F1B, `S - 1`, for all.

  Args:
    num_stages: Stages S.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with stashed weights.
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  return dataclasses.replace(
    constant_delay(
      "vertical_sync",
      np.full(num_stages, num_stages - 1),
      check_count("update_interval", update_interval, minimum=1),
    ),
    consistency="stashed",
    busy_share=1.0,
    make_timetable=lambda count: timetables.one_forward_one_backward(
      num_stages, count
    ),
    why_stashed="vertical sync is the use of one version for both passes",
  )


def pipemare(num_stages: int, update_interval: int = 1) -> Schedule:
  """PipeMare's schedule (Yang et al. 2019), without its corrections.

  With stages counted from 1, `τ_fwd = (2 (P - i) + 1) / N` updates and
  `τ_bkwd = 0`: as in fine-grained pipelined backpropagation, but the last stage
  does the backward of a micro-batch one tick after its forward, which adds one
  micro-batch to every delay. As published; not re-read at the source.

  Args:
    num_stages: Stages P.
    update_interval: Micro-batches N an update.

  Returns:
    The schedule, with inconsistent weights.
  """
  num_stages = check_count("num_stages", num_stages, minimum=1)
  return dataclasses.replace(
    constant_delay(
      "pipemare",
      2 * np.arange(num_stages)[::-1] + 1,
      check_count("update_interval", update_interval, minimum=1),
    ),
    busy_share=1.0,
    make_timetable=lambda count: timetables.fine_grained(
      num_stages, count, turnaround=1
    ),
  )


def constant_delay(
  name: str, micro_batch_delay: np.ndarray, update_interval: int
) -> Schedule:
  """A schedule of one delay a stage.

  The forward of micro-batch i meets the version of micro-batch `i - delay`,
  which lags by `i // M - (i - delay) // M` updates.

  Args:
    name: The schedule's name.
    micro_batch_delay: `[S]` ints >= 0.
    update_interval: Micro-batches M an update.

  Returns:
    The schedule, with inconsistent weights.
  """
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
