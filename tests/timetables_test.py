"""Timetables: the ticks of the twin, and refusal of impossible ones."""

from absl.testing import absltest, parameterized
import numpy as np

from pbp_jax import timetables
from tests.reference import timetables as reference

_STAGES, _MICRO_BATCHES = 4, 11


def _ticks(timetable):
  """The twin's list of ticks as two tables [stage, micro-batch]."""
  tables = np.full((2, _STAGES, _MICRO_BATCHES), -1)
  for time, tick in enumerate(timetable):
    for table, work in zip(tables, tick, strict=True):
      for s, i in work.items():
        table[s, i] = time
  return tables


class TimetablesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      "fine_grained",
      timetables.fine_grained(_STAGES, _MICRO_BATCHES),
      reference.pipelined_backprop(_STAGES, _MICRO_BATCHES),
    ),
    (
      "fill_and_drain",
      timetables.fill_and_drain(_STAGES, _MICRO_BATCHES, 3),
      reference.fill_drain(_STAGES, _MICRO_BATCHES, 3),
    ),
  )
  def test_ticks_are_the_twins(self, timetable, expected):
    forward, backward = _ticks(expected)
    np.testing.assert_array_equal(timetable.forward_tick, forward)
    np.testing.assert_array_equal(timetable.backward_tick, backward)

  def test_one_f_one_b_meets_the_twins_ticks_when_full(self):
    """The twin lets micro-batches in evenly from the start."""
    timetable = timetables.one_forward_one_backward(_STAGES, _MICRO_BATCHES)
    forward, backward = _ticks(reference.one_f_one_b(_STAGES, _MICRO_BATCHES))
    np.testing.assert_array_equal(
      timetable.forward_tick[:, _STAGES:], forward[:, _STAGES:]
    )
    np.testing.assert_array_equal(timetable.backward_tick, backward)

  def test_one_f_one_b_fills_with_one_forward_more_a_stage_from_the_end(self):
    timetable = timetables.one_forward_one_backward(_STAGES, _MICRO_BATCHES)
    first_backward = timetable.backward_tick[:, :1]
    np.testing.assert_array_equal(
      (timetable.forward_tick < first_backward).sum(axis=1), [4, 3, 2, 1]
    )

  def test_utilization_is_busy_slots_over_slots(self):
    # Two stages, one micro-batch, three ticks: 4 of 2 x 3 x 2 slots.
    self.assertAlmostEqual(timetables.fine_grained(2, 1).utilization(), 4 / 12)

  def test_print_shows_who_does_what(self):
    text = str(timetables.one_forward_one_backward(2, 2))
    self.assertEqual(
      text.splitlines(),
      [
        "tick       0  1  2  3  4  5",
        "stage 0 F  0  1  .  .  .  .",
        "        B  .  .  .  0  .  1",
        "stage 1 F  .  0  .  1  .  .",
        "        B  .  .  0  .  1  .",
      ],
    )


class WrongUseTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("unequal_shapes", [[0, 1]], [[0, 1, 2]], 2, r"\(1, 2\) and \(1, 3\)"),
    ("one_axis", [0, 1], [0, 1], 2, "forward_tick"),
    ("negative_tick", [[-1, 0]], [[0, 1]], 2, "forward_tick"),
    ("ticks_not_whole", [[0.0, 1.0]], [[0, 1]], 2, "forward_tick"),
    ("three_slots", [[0]], [[0]], 3, "slots_per_tick must be 1 or 2, got 3"),
    (
      "forward_before_that_of_the_stage_before",
      [[1], [1]],
      [[2], [1]],
      2,
      "forward of micro-batch 0 at stage 1 is at tick 1.*after that of stage 0",
    ),
    (
      "backward_before_that_of_the_stage_after",
      [[0], [1]],
      [[1], [1]],
      2,
      "backward of micro-batch 0 at stage 0 is at .*after that of stage 1",
    ),
    (
      "backward_before_its_forward",
      [[3]],
      [[2]],
      2,
      "backward of micro-batch 0 at stage 0 is at tick 2.*its forward",
    ),
    (
      "turned_round_within_a_tick_of_one_slot",
      [[0]],
      [[0]],
      1,
      "tick 1 or later",
    ),
    (
      "two_forwards_at_once",
      [[0, 0]],
      [[1, 2]],
      2,
      "Worker 0 is given 2 passes of one slot at tick 0",
    ),
    (
      "both_passes_in_one_slot",
      [[0, 1]],
      [[1, 2]],
      1,
      "Worker 0 is given 2 passes of one slot at tick 1",
    ),
  )
  def test_is_refused_with_a_reason(self, forward, backward, slots, reason):
    with self.assertRaisesRegex(ValueError, reason):
      timetables.Timetable(np.array(forward), np.array(backward), slots)


if __name__ == "__main__":
  absltest.main()
