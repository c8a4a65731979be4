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

from pbp_jax.schedules.constant_delay import fill_drain as fill_drain
from pbp_jax.schedules.constant_delay import from_delays as from_delays
from pbp_jax.schedules.constant_delay import one_f_one_b as one_f_one_b
from pbp_jax.schedules.constant_delay import (
  pipelined_backprop as pipelined_backprop,
)
from pbp_jax.schedules.constant_delay import pipemare as pipemare
from pbp_jax.schedules.constant_delay import synchronous as synchronous
from pbp_jax.schedules.constant_delay import uniform_delay as uniform_delay
from pbp_jax.schedules.constant_delay import vertical_sync as vertical_sync
from pbp_jax.schedules.schedule import CONSISTENCIES as CONSISTENCIES
from pbp_jax.schedules.schedule import Schedule as Schedule
from pbp_jax.schedules.schedule import check_count as check_count
from pbp_jax.schedules.schedule import check_schedule as check_schedule
from pbp_jax.schedules.varying_delay import from_timetable as from_timetable
from pbp_jax.schedules.varying_delay import interleaved as interleaved
from pbp_jax.schedules.varying_delay import jittered_delays as jittered_delays
from pbp_jax.schedules.varying_delay import pipedream_2bw as pipedream_2bw
from pbp_jax.schedules.varying_delay import (
  with_synchronous_start as with_synchronous_start,
)
