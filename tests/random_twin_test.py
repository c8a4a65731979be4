"""Random schedules, intervals, consistencies and views against the twin.

`PBP_EXAMPLES=200 pytest tests/random_twin_test.py` tries more of them than the
suite does.
"""

import functools
import os

from absl.testing import absltest
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import timetables
from tests import chain
from tests.reference import optimizers, pipeline
from tests.reference import stages as reference_stages
from tests.reference import timetables as reference_timetables

_WIDTH, _COUNT = 2, 13
_RATE, _MOMENTUM = 0.05, 0.7
_TOLERANCE = {
  "float64": {"rtol": 1e-7, "atol": 1e-10},
  "float32": {"rtol": 1e-4, "atol": 1e-4},  # of numbers of order 1 to 10
}
_DECAYING = lambda count: 0.05 / (1 + 0.1 * count)


def _ticks(table):
  """The twin's form of a timetable."""
  shape = table.forward_tick.shape
  return reference_timetables.from_times(
    *shape,
    lambda s, i: table.forward_tick[s, i],
    lambda s, i: table.backward_tick[s, i],
  )


@st.composite
def _own_timetables(draw, num_stages):
  """Ticks at random that keep the order of cause and effect."""
  wait = st.integers(0, 2)
  forward = np.zeros((num_stages, _COUNT), int)
  backward = np.zeros((num_stages, _COUNT), int)
  for s in range(num_stages):
    for i in range(_COUNT):
      earliest = max(
        forward[s - 1, i] + 1 if s else 0, forward[s, i - 1] + 1 if i else 0
      )
      forward[s, i] = earliest + draw(wait)
  for s in reversed(range(num_stages)):
    for i in range(_COUNT):
      earliest = max(
        backward[s + 1, i] + 1 if s + 1 < num_stages else forward[s, i],
        backward[s, i - 1] + 1 if i else 0,
      )
      backward[s, i] = earliest + draw(wait)
  return timetables.Timetable(forward, backward)


@st.composite
def _schedules(draw):
  """A schedule, the twin's ticks, and the versions its forwards read."""
  kind = draw(
    st.sampled_from([
      "pipelined_backprop", "one_f_one_b", "fill_drain", "pipemare",
      "interleaved", "own", "vertical_sync", "pipedream_2bw", "delays",
      "jitter", "late",
    ])
  )  # fmt: skip
  num_stages = draw(st.integers(1, 4))
  interval = draw(st.integers(1, 4))
  make = pbp.schedules
  newest = lambda s, i, now: now
  if kind == "own":
    table = draw(_own_timetables(num_stages))
    return make.from_timetable(table, interval), _ticks(table), newest
  if kind in ("pipelined_backprop", "one_f_one_b", "pipemare", "fill_drain"):
    schedule = getattr(make, kind)(num_stages, interval)
    return schedule, _ticks(schedule.timetable(_COUNT)), newest
  if kind == "interleaved":
    schedule = make.interleaved(
      *draw(st.sampled_from([(2, 2), (1, 3), (3, 1)])), interval
    )
    return schedule, _ticks(schedule.timetable(_COUNT)), newest

  # Lags that no worker's clock gives: the twin is told what to read.
  delays = draw(
    st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages)
  )
  if kind == "vertical_sync":
    schedule = make.vertical_sync(num_stages, interval)
    read = lambda s, i, now: max(0, (i - (num_stages - 1)) // interval)
  elif kind == "pipedream_2bw":
    interval = max(interval, num_stages)
    schedule = make.pipedream_2bw(num_stages, interval)
    read = lambda s, i, now: max(0, i // interval - 1)
  elif kind == "delays":
    schedule = make.from_delays(delays, interval)
    read = lambda s, i, now: max(0, (i - delays[s]) // interval)
  elif kind == "jitter":
    schedule = make.jittered_delays(
      delays, 2, draw(st.integers(0, 9)), interval
    )
    lags = schedule.lags(0, _COUNT)[0]
    read = lambda s, i, now: i // interval - lags[s, i]
  else:
    first = interval * draw(st.integers(0, 2))
    schedule = make.with_synchronous_start(
      make.from_delays(delays, interval), first
    )
    read = lambda s, i, now: (
      i // interval if i < first else max(first, i - delays[s]) // interval
    )
  ticks = reference_timetables.synchronous(num_stages, _COUNT)
  return schedule, ticks, read


def _optimizers(name, schedule, multiple):
  """Ours, the twin's, and the twin's forward view."""
  num_stages = schedule.num_stages
  horizons = [multiple * (num_stages - s) for s in range(num_stages)]
  if name == "arm":
    horizons = [float(delay) for delay in schedule.delay]
    arm = pbp.presets.make_arm(
      "pb+lwpvd+scd",
      num_stages,
      learning_rate=_RATE,
      momentum=_MOMENTUM,
      update_interval=schedule.update_interval,
      schedule=schedule,
    )
    compensation = optimizers.spike_compensation(_MOMENTUM, horizons)
    return (
      arm.optimizer,
      optimizers.sgdm(_RATE, _MOMENTUM, compensation=compensation),
      optimizers.velocity_prediction(horizons, _RATE),
    )
  if name == "lwpv_scd":
    ours = optax.chain(
      pbp.spike_compensation(_MOMENTUM, horizons),
      optax.scale_by_learning_rate(_DECAYING),
      pbp.linear_weight_prediction(horizons, learning_rate=_DECAYING),
    )
    compensation = optimizers.spike_compensation(_MOMENTUM, horizons)
    return (
      ours,
      optimizers.sgdm(_DECAYING, _MOMENTUM, compensation=compensation),
      optimizers.velocity_prediction(horizons, _DECAYING),
    )
  if name == "adam_lwpw":
    ours = optax.chain(
      optax.adam(_RATE), pbp.linear_weight_prediction(horizons, "weight")
    )
    theirs = optimizers.adam(_RATE)
    return ours, theirs, optimizers.weight_prediction(horizons)
  decayed = optax.chain(
    optax.add_decayed_weights(0.1), optax.sgd(_RATE, _MOMENTUM)
  )
  theirs = optimizers.sgdm(_RATE, _MOMENTUM, weight_decay=0.1)
  return decayed, theirs, optimizers.raw


class RandomTwinTest(absltest.TestCase):
  @hypothesis.settings(
    max_examples=int(os.environ.get("PBP_EXAMPLES", "15")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(
    made=_schedules(),
    consistency=st.sampled_from(["saved", "recompute", "stashed"]),
    optimizer=st.sampled_from(["sgdm_decay", "lwpv_scd", "adam_lwpw", "arm"]),
    multiple=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 3),
    dtype=st.sampled_from(["float64", "float32"]),
  )
  def test_scan_computes_what_the_ticks_compute(
    self, made, consistency, optimizer, multiple, seed, dtype
  ):
    schedule, ticks, read_version = made
    if consistency == "stashed":
      schedule = schedule.with_weight_stashing()
    elif schedule.why_stashed:
      consistency = "stashed"
    else:
      schedule = schedule.with_consistency("inconsistent")
    num_stages = schedule.num_stages
    rng = np.random.default_rng(seed)
    params = [
      {"w": rng.normal(size=(_WIDTH, _WIDTH)), "b": rng.normal(size=_WIDTH)}
      for _ in range(num_stages)
    ]
    inputs, targets = rng.normal(size=(2, _COUNT, 1, _WIDTH))
    ours, theirs, view = _optimizers(optimizer, schedule, multiple)
    expected = pipeline.run(
      ticks,
      [reference_stages.dense_tanh] * num_stages,
      params,
      theirs,
      reference_stages.squared_error,
      inputs,
      targets,
      update_interval=schedule.update_interval,
      consistency=consistency,
      forward_view=view,
      read_version=read_version,
    )
    # Op by op, which compiles nothing anew for each example.
    with jax.enable_x64(dtype == "float64"), jax.disable_jit():
      simulator = pbp.Simulator(
        [chain.given(p) for p in params],
        chain.squared_error,
        ours,
        schedule,
        backward="saved" if consistency == "stashed" else consistency,
      )
      inputs, targets = jnp.asarray(inputs), jnp.asarray(targets)
      state = simulator.init(jax.random.key(0), inputs[0])
      state, metrics = simulator.run(state, inputs, targets)
    self.assertEqual(metrics["loss"].dtype, dtype)
    close = functools.partial(np.testing.assert_allclose, **_TOLERANCE[dtype])
    close(metrics["loss"], expected.losses)
    for ours_s, theirs_s in zip(state.params, expected.params, strict=True):
      for name in ("w", "b"):
        self.assertEqual(ours_s[name].dtype, dtype)
        close(ours_s[name], theirs_s[name])


if __name__ == "__main__":
  absltest.main()
