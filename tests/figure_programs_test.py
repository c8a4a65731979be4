"""Tests of the programs that draw without training."""

import dataclasses
import json
import pathlib
import types

from absl.testing import absltest, parameterized
import numpy as np

from experiments import figure_program, quadratic_figures, schedule_figures
from pbp_jax import schedules, timetables


class FigureProgramTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      "quadratic_figures",
      quadratic_figures,
      {
        "heat_maps",
        "half_life_by_condition_number",
        "half_life_by_delay",
        "half_life_by_horizon",
        "impulse_response",
      },
    ),
    ("schedule_figures", schedule_figures, {"timetables", "utilization",
                                            "memory"}),
  )  # fmt: skip
  def test_smoke_run_writes_results_and_pictures(
    self, program: types.ModuleType, pictures: set[str]
  ):
    folder = pathlib.Path(self.create_tempdir().full_path)
    flags = figure_program.Flags(workdir=str(folder), smoke=True)
    figure_program.run_in_workdir(flags, program.SCALES, program.run)
    found = json.loads((folder / "results.json").read_text())
    self.assertEqual(found["status"], "done")
    self.assertSetEqual(set(found), {"status", "config", "versions", "arms"})
    self.assertEqual(
      found["config"]["sizes"],
      json.loads(json.dumps(dataclasses.asdict(program.SCALES["smoke"]))),
    )
    self.assertNotEmpty(found["arms"])
    self.assertSetEqual({p.stem for p in folder.glob("*.png")}, pictures)

  def test_finished_run_is_only_read(self):
    folder = self.create_tempdir().full_path
    flags = figure_program.Flags(workdir=folder)
    scales = {"cpu": schedule_figures.SCALES["smoke"]}
    first = figure_program.run_in_workdir(
      flags, scales, lambda sizes: ({"row": {"number": 1}}, {})
    )
    again = figure_program.run_in_workdir(flags, scales, lambda sizes: 1 / 0)
    self.assertEqual(first, again)
    self.assertEqual(first["arms"], {"row": {"number": 1}})

  def test_refuses_an_unknown_scale(self):
    flags = figure_program.Flags(workdir="x", scale="huge")
    with self.assertRaisesRegex(ValueError, "scale must be one of cpu.*huge"):
      figure_program.run_in_workdir(flags, {"cpu": None}, lambda sizes: None)

  def test_refuses_to_run_nowhere(self):
    with self.assertRaisesRegex(ValueError, "workdir must name a folder"):
      figure_program.run_in_workdir(
        figure_program.Flags(), {"cpu": None}, lambda sizes: None
      )


class ScheduleFiguresTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("pipelined", schedules.pipelined_backprop(5), lambda s: 2 * (4 - s) + 1),
    ("one_f_one_b", schedules.one_f_one_b(5), lambda s: 5 - s),
    (
      "fill_drain",
      schedules.fill_drain(5, 6),
      lambda s: np.minimum(6, 2 * (4 - s) + 1),
    ),
  )
  def test_stage_holds_activations_while_they_travel(self, schedule, expected):
    np.testing.assert_array_equal(
      schedule_figures.activations_in_flight(schedule.timetable(24)),
      expected(np.arange(5)),
    )

  @parameterized.named_parameters(
    ("no_pipeline", "data_parallel", 49, 49),
    ("fill_drain", "fill_drain", 7, 3 * 8 + 7 + 5 + 3 + 1),
    ("pb", "pb", 7, 49),
    ("pb_stashed", "pb_stashed", 49, 49),
    ("one_f_one_b", "1f1b", 28, 28),
  )
  def test_memory_is_counted_over_all_workers(self, name, weights, activations):
    kept = schedule_figures.memory_by_stages([7], interval=8)[name]
    self.assertEqual(kept, {"weights": [weights], "activations": [activations]})

  @parameterized.named_parameters(
    ("fine_grained", timetables.fine_grained(4, 6)),
    ("one_f_one_b", timetables.one_forward_one_backward(4, 6)),
  )
  def test_worker_is_drawn_doing_one_thing_at_a_time(self, table):
    cells = schedule_figures.cells(table)
    self.assertLen(cells, 2 * 4 * 6)
    self.assertLen({(stage, time) for stage, time, _, _ in cells}, len(cells))

  def test_pass_is_drawn_after_those_it_waits_for(self):
    time = {
      (stage, kind, i): time
      for stage, time, kind, i in schedule_figures.cells(
        timetables.fine_grained(3, 4)
      )
    }
    for i in range(4):
      order = [(s, "forward", i) for s in range(3)]
      order += [(s, "backward", i) for s in reversed(range(3))]
      self.assertSequenceEqual(sorted(order, key=lambda key: time[key]), order)


class QuadraticFiguresTest(absltest.TestCase):
  def test_heat_map_is_over_momentum_and_rate(self):
    rate, momentum, radius = quadratic_figures.heat_map(
      quadratic_figures.quadratic.Method(), delay=0, resolution=5
    )
    # Without momentum |1 - L|; with it, and complex roots, sqrt(m).
    np.testing.assert_allclose(radius[0], np.abs(1 - rate), atol=1e-3)
    np.testing.assert_allclose(radius[3, 3], momentum[3] ** 0.5, rtol=1e-3)


if __name__ == "__main__":
  absltest.main()
