"""Who computes what at which tick.

A timetable is a list of ticks. A tick maps a stage to its work: `forward` and
`backward` hold `{stage: micro-batch}`. Within a tick a stage does its forward
first, then its backward, both on the weights it holds when the tick begins.
"""

import typing


class Tick(typing.NamedTuple):
  forward: dict[int, int]
  backward: dict[int, int]


Timetable = list[Tick]


def from_times(num_stages, num_micro_batches, forward_time, backward_time):
  """The timetable in which stage s meets micro-batch i at the given ticks."""
  pairs = [(s, i) for s in range(num_stages) for i in range(num_micro_batches)]
  num_ticks = 1 + max(backward_time(s, i) for s, i in pairs)
  ticks = [Tick({}, {}) for _ in range(num_ticks)]
  for s, i in pairs:
    for work, time in (("forward", forward_time), ("backward", backward_time)):
      busy = getattr(ticks[time(s, i)], work)
      assert s not in busy, f"stage {s} has two {work}s at one tick"
      busy[s] = i
  return ticks


def pipelined_backprop(num_stages, num_micro_batches):
  """A new micro-batch enters at every tick; the last stage turns it round."""
  last = num_stages - 1
  return from_times(
    num_stages,
    num_micro_batches,
    lambda s, i: i + s,
    lambda s, i: i + last + (last - s),
  )


def fill_drain(num_stages, num_micro_batches, batch):
  """The next `batch` micro-batches enter when the pipeline is empty."""
  last = num_stages - 1
  start = lambda i: (i // batch) * (batch + 2 * last) + i % batch
  return from_times(
    num_stages,
    num_micro_batches,
    lambda s, i: start(i) + s,
    lambda s, i: start(i) + last + (last - s),
  )


def synchronous(num_stages, num_micro_batches):
  """One micro-batch at a time in the whole pipeline."""
  return fill_drain(num_stages, num_micro_batches, batch=1)


def one_f_one_b(num_stages, num_micro_batches):
  """PipeDream: stages take turns, one forward, then one backward.

  A tick holds half the work of a tick above, so that a micro-batch enters at
  every second one.
  """
  return from_times(
    num_stages,
    num_micro_batches,
    lambda s, i: 2 * i + s,
    lambda s, i: 2 * i + 2 * num_stages - 1 - s,
  )
