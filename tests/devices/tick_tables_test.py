"""What each device does at each tick, against its timetable."""

from absl.testing import absltest, parameterized
import numpy as np

import pbp_jax as pbp
from pbp_jax.devices import tick_tables

_SCHEDULES = (
  ("pb", pbp.schedules.pipelined_backprop(3)),
  ("pb_by_four", pbp.schedules.pipelined_backprop(3, 4)),
  ("one_f_one_b", pbp.schedules.one_f_one_b(4, 3)),
  ("pipemare", pbp.schedules.pipemare(3)),
  ("fill_drain", pbp.schedules.fill_drain(3, 4)),
)


def _filling(schedule, count, first=0):
  return tick_tables.Filling(
    schedule.timetable(count), schedule.update_interval, first
  )


class TablesTest(parameterized.TestCase):
  def test_two_devices_by_hand(self):
    tables = _filling(pbp.schedules.pipelined_backprop(2), 2, first=5).tables
    expected = tick_tables.TickTables(
      forward=[[5, -1], [6, 5], [-1, 6], [-1, -1]],
      backward=[[-1, -1], [-1, 5], [5, 6], [6, -1]],
      arriving_input=[[5, -1], [6, 5], [-1, 6], [-1, -1]],
      arriving_error=[[-1, -1], [-1, 5], [5, 6], [6, -1]],
      version=[[5, 5], [5, 5], [5, 6], [6, 7]],
      met_version=[[5, 5], [5, 5], [5, 6], [5, 7]],
    )
    for name, got, wanted in zip(tables._fields, tables, expected, strict=True):
      np.testing.assert_array_equal(got, wanted, name)

  @parameterized.named_parameters(*_SCHEDULES)
  def test_a_device_meets_the_versions_of_the_schedule(self, schedule):
    count = 30
    filling = _filling(schedule, count)
    lags, _ = schedule.lags(0, count)
    newest = np.arange(count) // schedule.update_interval
    tables = filling.tables
    for device in range(schedule.num_stages):
      ticks = filling.timetable.backward_tick[device]
      np.testing.assert_array_equal(tables.version[ticks, device], newest)
      np.testing.assert_array_equal(
        tables.met_version[ticks, device], newest - lags[device]
      )

  @parameterized.named_parameters(*_SCHEDULES)
  def test_slots_are_just_enough(self, schedule):
    """Rings of so many slots, and of one fewer, played through."""
    filling = _filling(schedule, 30)
    tables, slots = filling.tables, filling.slots
    plays = {
      "inputs": (tables.arriving_input, tables.backward),
      "errors": (tables.arriving_error, tables.backward),
      "versions": (tables.version, tables.met_version),
      "targets": (tables.forward[:, :1], tables.forward[:, -1:]),
    }
    for name, (written, read) in plays.items():
      enough = getattr(slots, name)
      self.assertTrue(_survives(written, read, enough), name)
      if enough > 1:
        self.assertFalse(_survives(written, read, enough - 1), name)


def _survives(written, read, slots):
  """Whether what is read is still in its slot, on every device."""
  for device in range(written.shape[1]):
    ring = {}
    for new, old in zip(written[:, device], read[:, device], strict=True):
      if new >= 0:
        ring[new % slots] = new
      if old >= 0 and ring[old % slots] != old:
        return False
  return True


if __name__ == "__main__":
  absltest.main()
