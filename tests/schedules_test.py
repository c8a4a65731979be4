"""Closed-form lags against lags counted tick by tick, and what prints."""

from absl.testing import absltest, parameterized
import numpy as np

from pbp_jax import schedules
from tests.reference import timetables

_STAGES = 5
_MICRO_BATCHES = 40


def _count_lags(ticks, num_stages, interval, num_micro_batches):
  """Lags of the forwards, by a clock and a counter for every stage."""
  lags = np.full((num_stages, num_micro_batches), -1)
  backwards_done = [0] * num_stages
  for tick in ticks:
    for s, i in tick.forward.items():
      lags[s, i] = i // interval - backwards_done[s] // interval
    for s in tick.backward:
      backwards_done[s] += 1
  return lags


def _every_kind(num_stages=_STAGES):
  """Schedules with a timetable, each with the ticks that stand behind it."""
  n = _MICRO_BATCHES
  kinds = [
    (schedules.synchronous(num_stages), timetables.synchronous(num_stages, n))
  ]
  for interval in (1, 2, 3, 4, 7):
    kinds += [
      (
        schedules.pipelined_backprop(num_stages, interval),
        timetables.pipelined_backprop(num_stages, n),
      ),
      (
        schedules.one_f_one_b(num_stages, interval),
        timetables.one_f_one_b(num_stages, n),
      ),
      (
        schedules.fill_drain(num_stages, interval),
        timetables.fill_drain(num_stages, n, interval),
      ),
    ]
  return [
    (f"{schedule.name}_every_{schedule.update_interval}", schedule, ticks)
    for schedule, ticks in kinds
  ]


class LagsTest(parameterized.TestCase):
  @parameterized.named_parameters(_every_kind())
  def test_forward_lags_are_those_counted_from_the_ticks(self, schedule, ticks):
    expected = _count_lags(
      ticks, _STAGES, schedule.update_interval, _MICRO_BATCHES
    )
    forward, _ = schedule.lags(0, _MICRO_BATCHES)
    np.testing.assert_array_equal(forward, expected)

  @parameterized.named_parameters(_every_kind(num_stages=1))
  def test_one_stage_has_no_lag(self, schedule, ticks):
    del ticks
    np.testing.assert_array_equal(schedule.lags(0, _MICRO_BATCHES)[0], 0)

  @parameterized.named_parameters(_every_kind())
  def test_its_own_timetable_gives_the_same_versions(self, schedule, ticks):
    del ticks
    forward, backward = schedule.timetable(_MICRO_BATCHES).versions(
      schedule.update_interval
    )
    update = np.arange(_MICRO_BATCHES) // schedule.update_interval
    lags, _ = schedule.lags(0, _MICRO_BATCHES)
    np.testing.assert_array_equal(update - forward, lags)
    np.testing.assert_array_equal(update - backward, np.zeros_like(lags))

  @parameterized.named_parameters(_every_kind())
  def test_a_later_start_continues_the_same_lags(self, schedule, ticks):
    del ticks
    whole, _ = schedule.lags(0, _MICRO_BATCHES)
    later, _ = schedule.lags(5, 20)
    np.testing.assert_array_equal(later, whole[:, 5:25])

  @parameterized.named_parameters(_every_kind())
  def test_max_lag_is_reached_and_never_passed(self, schedule, ticks):
    del ticks
    forward, _ = schedule.lags(0, _MICRO_BATCHES)
    np.testing.assert_array_equal(forward.max(axis=1), schedule.max_lag)

  @parameterized.named_parameters(_every_kind())
  def test_delay_is_the_mean_lag_of_a_full_pipeline(self, schedule, ticks):
    del ticks
    # Twelve periods of every interval above, when the fill is over.
    forward, _ = schedule.lags(84, 84)
    np.testing.assert_allclose(
      forward.mean(axis=1), schedule.delay, rtol=0, atol=1e-12
    )

  @parameterized.named_parameters(_every_kind())
  def test_lags_repeat_with_the_period(self, schedule, ticks):
    del ticks
    early, _ = schedule.lags(42, 2 * schedule.period)
    self.assertTrue(
      (early[:, : schedule.period] == early[:, schedule.period :]).all()
    )

  def test_delay_is_fractional_where_the_interval_does_not_divide(self):
    schedule = schedules.pipelined_backprop(3, update_interval=3)
    np.testing.assert_allclose(schedule.delay, [4 / 3, 2 / 3, 0])

  @parameterized.named_parameters(
    ("pipelined_backprop", schedules.pipelined_backprop, [8, 6, 4, 2, 0]),
    ("one_f_one_b", schedules.one_f_one_b, [4, 3, 2, 1, 0]),
    ("synchronous", schedules.synchronous, [0] * 5),
  )
  def test_micro_batch_delay_is_the_published_one(self, factory, expected):
    schedule = factory(_STAGES)
    np.testing.assert_array_equal(schedule.micro_batch_delay, expected)
    self.assertTrue(np.issubdtype(schedule.micro_batch_delay.dtype, np.integer))

  def test_uniform_delay_lags_every_stage_alike(self):
    forward, _ = schedules.uniform_delay(2, 3).lags(0, 6)
    np.testing.assert_array_equal(forward, [[0, 1, 2, 3, 3, 3]] * 2)

  def test_from_delays_lags_each_stage_as_given(self):
    forward, _ = schedules.from_delays([2, 0, 1]).lags(0, 4)
    np.testing.assert_array_equal(
      forward, [[0, 1, 2, 2], [0, 0, 0, 0], [0, 1, 1, 1]]
    )


class ConsistencyTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("pipelined_backprop", schedules.pipelined_backprop(4)),
    ("from_delays", schedules.from_delays([3, 1])),
  )
  def test_inconsistent_backward_meets_the_newest(self, schedule):
    self.assertFalse(schedule.is_stashed)
    np.testing.assert_array_equal(schedule.lags(0, 10)[1], 0)

  @parameterized.named_parameters(
    (
      "pipelined_backprop",
      schedules.pipelined_backprop(4).with_weight_stashing(),
    ),
    ("one_f_one_b", schedules.one_f_one_b(4)),
  )
  def test_stashed_backward_meets_what_the_forward_met(self, schedule):
    self.assertTrue(schedule.is_stashed)
    forward, backward = schedule.lags(0, 10)
    np.testing.assert_array_equal(forward, backward)
    self.assertTrue(forward.any())

  def test_stashing_changes_nothing_else(self):
    plain = schedules.pipelined_backprop(4, update_interval=3)
    stashed = plain.with_weight_stashing()
    np.testing.assert_array_equal(plain.lags(0, 20)[0], stashed.lags(0, 20)[0])
    np.testing.assert_array_equal(plain.delay, stashed.delay)

  def test_pipedream_keeps_one_version_more_a_stage_from_the_end(self):
    np.testing.assert_array_equal(
      schedules.one_f_one_b(4).versions_kept, [4, 3, 2, 1]
    )

  def test_without_stashing_one_version_is_kept(self):
    np.testing.assert_array_equal(
      schedules.pipelined_backprop(4).versions_kept, [1, 1, 1, 1]
    )


class UtilizationTest(parameterized.TestCase):
  @parameterized.product(stages=[1, 2, 34], batch=[1, 8, 32])
  def test_fill_drain_is_n_over_n_plus_two_depths(self, stages, batch):
    expected = batch / (batch + 2 * (stages - 1))
    schedule = schedules.fill_drain(stages, batch)
    self.assertAlmostEqual(schedule.utilization(), expected, places=12)
    self.assertAlmostEqual(schedule.utilization(3 * batch), expected, places=12)

  @parameterized.product(stages=[1, 2, 34], count=[1, 8, 32])
  def test_pipelined_backprop_fills_and_drains_once(self, stages, count):
    schedule = schedules.pipelined_backprop(stages)
    self.assertAlmostEqual(
      schedule.utilization(count), count / (count + 2 * (stages - 1)), places=12
    )

  def test_one_f_one_b_fills_and_drains_once(self):
    schedule = schedules.one_f_one_b(5)
    self.assertAlmostEqual(schedule.utilization(20), 20 / 24, places=12)

  @parameterized.named_parameters(
    ("pipelined_backprop", schedules.pipelined_backprop),
    ("one_f_one_b", schedules.one_f_one_b),
  )
  def test_a_pipeline_that_never_drains_is_busy_in_the_long_run(self, factory):
    self.assertEqual(factory(5).utilization(), 1.0)


class TextTest(absltest.TestCase):
  def test_print_shows_the_lags(self):
    self.assertEqual(
      str(schedules.pipelined_backprop(3)).splitlines()[1:],
      [
        "stage  delay (micro-batches)  delay (updates)  forward lag"
        "  backward lag  versions kept",
        "    0                      4                4            4"
        "             0              1",
        "    1                      2                2            2"
        "             0              1",
        "    2                      0                0            0"
        "             0              1",
      ],
    )

  def test_print_shows_a_period_of_unequal_lags(self):
    lines = str(schedules.pipelined_backprop(2, update_interval=3)).splitlines()
    self.assertIn("an update every 3 micro-batches", lines[0])
    self.assertRegex(lines[2], r"0 +2 +0.666667 +1 1 0 +0 +1$")

  def test_print_says_what_is_stashed(self):
    self.assertIn("stashed", str(schedules.one_f_one_b(2)).splitlines()[0])


class WrongUseTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("no_stage", lambda: schedules.pipelined_backprop(0), "num_stages", "0"),
    (
      "stages_not_whole",
      lambda: schedules.one_f_one_b(2.5),
      "num_stages",
      r"2\.5",
    ),
    (
      "interval_of_zero",
      lambda: schedules.pipelined_backprop(3, update_interval=0),
      "update_interval",
      "0",
    ),
    ("batch_of_zero", lambda: schedules.fill_drain(3, 0), "micro_batches", "0"),
    (
      "negative_uniform_delay",
      lambda: schedules.uniform_delay(3, -1),
      "delay",
      "-1",
    ),
    (
      "negative_delay",
      lambda: schedules.from_delays([1, -2]),
      r"delays\[1\]",
      "-2",
    ),
    (
      "fractional_delay",
      lambda: schedules.from_delays([1.5, 0]),
      r"delays\[0\]",
      r"1\.5",
    ),
    ("no_delays", lambda: schedules.from_delays([]), "delays", r"\[\]"),
    ("one_number", lambda: schedules.from_delays(3), "delays", "3"),
    (
      "negative_start",
      lambda: schedules.synchronous(2).lags(-1, 2),
      "start",
      "-1",
    ),
    (
      "negative_count",
      lambda: schedules.synchronous(2).lags(0, -2),
      "count",
      "-2",
    ),
    (
      "unknown_consistency",
      lambda: schedules.synchronous(2).with_consistency("eventual"),
      "consistency",
      "'eventual'",
    ),
    (
      "timetable_of_mere_lags",
      lambda: schedules.uniform_delay(2, 1).timetable(3),
      "uniform_delay",
      "timetable",
    ),
  )
  def test_is_refused_by_name_and_value(self, call, argument, value):
    with self.assertRaisesRegex(ValueError, f"(?s){argument}.*{value}"):
      call()

  def test_delays_cannot_be_changed_afterwards(self):
    with self.assertRaisesRegex(ValueError, "read-only"):
      schedules.pipelined_backprop(3).delay[0] = 1


if __name__ == "__main__":
  absltest.main()
