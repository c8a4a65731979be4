"""Schedules beyond one constant delay, against counting and definitions."""

from absl.testing import absltest, parameterized
import numpy as np

from pbp_jax import schedules, timetables

_COUNT = 60


def _counted_lags(timetable, interval):
  """Lags of the forwards, by walking through the ticks."""
  forward, backward = timetable.forward_tick, timetable.backward_tick
  lags = np.zeros(forward.shape, int)
  for s, i in np.ndindex(*forward.shape):
    done = sum(tick < forward[s, i] for tick in backward[s])
    lags[s, i] = i // interval - done // interval
  return lags


class VaryingSchedulesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("interleaved_2x2", schedules.interleaved(2, 2)),
    ("interleaved_3x2_every_2", schedules.interleaved(3, 2, 2)),
    ("interleaved_2x3_every_3", schedules.interleaved(2, 3, 3)),
    ("pipemare", schedules.pipemare(4)),
    ("pipemare_every_3", schedules.pipemare(4, 3)),
  )
  def test_lags_are_those_counted_from_the_ticks(self, schedule):
    counted = _counted_lags(
      schedule.timetable(_COUNT), schedule.update_interval
    )
    np.testing.assert_array_equal(schedule.lags(0, _COUNT)[0], counted)
    np.testing.assert_array_equal(schedule.max_lag, counted.max(axis=1))
    period = schedule.period
    np.testing.assert_allclose(
      schedule.delay, schedule.lags(10 * period, period)[0].mean(axis=1)
    )

  def test_one_chunk_a_worker_is_pipelined_backprop(self):
    np.testing.assert_array_equal(
      schedules.interleaved(4, 1).lags(0, _COUNT)[0],
      schedules.pipelined_backprop(4).lags(0, _COUNT)[0],
    )

  def test_vertical_sync_uses_one_version_of_the_whole_network(self):
    schedule = schedules.vertical_sync(4, update_interval=2)
    forward, backward = schedule.lags(0, _COUNT)
    self.assertTrue((forward == forward[0]).all())
    np.testing.assert_array_equal(forward, backward)
    np.testing.assert_array_equal(
      forward[0], schedules.one_f_one_b(4, 2).lags(0, _COUNT)[0][0]
    )

  def test_2bw_meets_the_version_before_and_keeps_two(self):
    schedule = schedules.pipedream_2bw(3, update_interval=4)
    forward, _ = schedule.lags(0, _COUNT)
    np.testing.assert_array_equal(forward[:, :4], 0)
    np.testing.assert_array_equal(forward[:, 4:], 1)
    np.testing.assert_array_equal(schedule.versions_kept, 2)
    np.testing.assert_array_equal(schedule.delay, 1)

  def test_two_versions_are_enough_for_2bw_from_s_micro_batches_on(self):
    # At M = S no forward of update k + 1 precedes version k at its stage.
    for num_stages in (1, 2, 5):
      schedule = schedules.pipedream_2bw(num_stages)
      table = schedule.timetable(_COUNT)
      newest, _ = table.versions(schedule.update_interval)
      wanted = np.arange(_COUNT) // schedule.update_interval - 1
      self.assertTrue((newest >= wanted).all())
      self.assertTrue((newest <= wanted + 1).all())

  def test_pipemare_delays_are_as_published(self):
    schedule = schedules.pipemare(num_stages=4, update_interval=3)
    i = np.arange(1, 5)
    np.testing.assert_allclose(schedule.delay, (2 * (4 - i) + 1) / 3)

  def test_jitter_stays_within_bounds_and_reaches_them(self):
    schedule = schedules.jittered_delays([6, 2, 0], jitter=2, seed=1)
    lags, _ = schedule.lags(100, 2000)
    np.testing.assert_array_equal(lags.min(axis=1), [4, 0, 0])
    np.testing.assert_array_equal(lags.max(axis=1), [8, 4, 2])
    np.testing.assert_array_equal(lags.max(axis=1), schedule.max_lag)
    np.testing.assert_allclose(lags.mean(axis=1), schedule.delay, atol=0.15)

  def test_jitter_depends_on_the_seed_and_the_index_alone(self):
    schedule = schedules.jittered_delays([6, 2], jitter=2, seed=1)
    whole, _ = schedule.lags(0, 2500)
    again = schedules.jittered_delays([6, 2], jitter=2, seed=1)
    np.testing.assert_array_equal(again.lags(1000, 700)[0], whole[:, 1000:1700])
    other = schedules.jittered_delays([6, 2], jitter=2, seed=2)
    self.assertFalse((other.lags(0, 2500)[0] == whole).all())

  def test_no_jitter_is_the_plain_delays(self):
    np.testing.assert_array_equal(
      schedules.jittered_delays([5, 3, 0], 0, update_interval=2).lags(0, 50)[0],
      schedules.from_delays([5, 3, 0], update_interval=2).lags(0, 50)[0],
    )

  @parameterized.named_parameters(("every", 1), ("every_third", 3))
  def test_own_timetable_of_a_known_schedule_is_that_schedule(self, interval):
    known = schedules.one_f_one_b(4, interval)
    own = schedules.from_timetable(known.timetable(_COUNT), interval, "stashed")
    np.testing.assert_array_equal(own.lags(0, _COUNT), known.lags(0, _COUNT))

  def test_own_timetable_ends_with_an_error(self):
    own = schedules.from_timetable(schedules.one_f_one_b(2).timetable(9))
    with self.assertRaisesRegex(ValueError, "ends after 9 .*start=5, count=5"):
      own.lags(5, 5)

  def test_own_timetable_out_of_order_is_refused(self):
    table = timetables.Timetable(
      np.array([[0, 1]]), np.array([[4, 3]]), slots_per_tick=2
    )
    with self.assertRaisesRegex(ValueError, "in the order.*stage 0"):
      schedules.from_timetable(table)

  def test_a_pass_before_its_cause_is_refused(self):
    with self.assertRaisesRegex(ValueError, "forward of micro-batch 1"):
      timetables.Timetable(
        np.array([[0, 1], [1, 1]]), np.array([[5, 6], [4, 5]])
      )

  def test_a_synchronous_start_has_no_lag_and_then_fills_anew(self):
    late = schedules.pipelined_backprop(3)
    schedule = schedules.with_synchronous_start(late, 7)
    lags, _ = schedule.lags(0, 40)
    np.testing.assert_array_equal(lags[:, :7], 0)
    np.testing.assert_array_equal(lags[:, 7:], late.lags(0, 33)[0])

  def test_what_a_schedule_is_not_is_refused_with_the_reason(self):
    with self.assertRaisesRegex(ValueError, "one version for both passes"):
      schedules.vertical_sync(3).with_consistency("inconsistent")
    with self.assertRaisesRegex(ValueError, "second buffer"):
      schedules.pipedream_2bw(3).with_consistency("inconsistent")
    with self.assertRaisesRegex(ValueError, "update_interval .*>= 4, got 3"):
      schedules.pipedream_2bw(4, 3)
    with self.assertRaisesRegex(ValueError, "multiple of .* interval 2"):
      schedules.with_synchronous_start(schedules.fill_drain(2, 2), 3)
    with self.assertRaisesRegex(ValueError, "no period"):
      _ = schedules.jittered_delays([1], 1).steady_lags

  @parameterized.named_parameters(
    ("interleaved", schedules.interleaved(3, 2)),
    ("pipelined_backprop", schedules.pipelined_backprop(3)),
  )
  def test_busy_share_is_reached_by_a_long_timetable(self, schedule):
    self.assertAlmostEqual(schedule.utilization(600), 1.0, delta=0.03)
    self.assertEqual(schedule.utilization(), 1.0)


if __name__ == "__main__":
  absltest.main()
