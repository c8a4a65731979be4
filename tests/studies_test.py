"""The studies: their settings, and small runs of some of them."""

import dataclasses
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import rich.console

from experiments import (
  runner,
  studies,
  study_list,
  study_page,
  study_settings,
  train,
)
import pbp_jax as pbp

_GRIDS = [
  (f"{name}_{scale}", study.grids[scale])
  for name, study in study_list.STUDIES.items()
  for scale in study.grids
]
_SMALL = study_settings.Setting(
  num_stages=5,
  width=4,
  seeds=2,
  max_samples=60,
  chunk_samples=20,
  final_images=50,
  learning_rate=2.0,
)


def _arm(setting, num_stages=5):
  return study_settings.make_arm("arm", setting, num_stages, 1437, 60)


class SettingsTest(parameterized.TestCase):
  @parameterized.named_parameters(*_GRIDS)
  def test_every_setting_has_a_pipeline_and_an_arm(self, grid):
    settings = grid.settings()
    self.assertLen(settings, len(grid.lines) * len(grid.points))
    families = {}
    for place, setting in settings.items():
      stages = study_settings.make_stages(setting)
      arm = study_settings.make_arm(
        str(place), setting, len(stages), 50_000, 10**6
      )
      key = (setting.task_key, arm.family)
      families.setdefault(key, set()).add(tuple(sorted(arm.numbers)))
      schedule = arm.schedule
      lags = {"lags": schedule.max_lag.tolist(), "b": arm.backward}
      same = families.setdefault((*key, "schedule"), lags)
      self.assertEqual(same, lags, f"{place} shares a program of others")
    for key, found in families.items():
      if key[-1] != "schedule":
        self.assertLen(found, 1, f"{key} holds different numbers")

  @parameterized.named_parameters((name, name) for name in study_list.STUDIES)
  def test_claims_and_axes_are_said(self, name):
    study = study_list.STUDIES[name]
    self.assertTrue(study.claim.endswith("."))
    self.assertNotEmpty(study.x_label)
    only_large = name == "imagenet"
    self.assertEqual(
      tuple(study.grids),
      ("paper",) if only_large else ("smoke", "cpu", "paper"),
    )

  def test_uniform_delay_is_the_schedule_of_every_stage(self):
    setting = dataclasses.replace(_SMALL, arm="pb+stash", uniform_delay=7)
    schedule = _arm(setting).schedule
    self.assertTrue(schedule.is_stashed)
    np.testing.assert_array_equal(schedule.max_lag, [7] * 5)

  @parameterized.named_parameters(
    ("velocity", "pb+lwpvd", [16.0, 12.0, 8.0, 4.0, 0.0]),
    ("both", "pb+lwpvd+scd", [16.0, 12.0, 8.0, 4.0, 0.0]),
  )
  def test_mitigations_reckon_with_the_delay_they_are_told(self, arm, horizon):
    told = _arm(dataclasses.replace(_SMALL, arm=arm, told_delay=2.0))
    np.testing.assert_array_equal(told.numbers["horizon"], horizon)
    np.testing.assert_array_equal(told.schedule.max_lag, [8, 6, 4, 2, 0])

  def test_one_program_can_tell_one_delay_only_to_what_has_no_numbers(self):
    """The weight form's horizon is no number of the arm."""
    told = [
      _arm(dataclasses.replace(_SMALL, arm="pb+lwpwd", told_delay=delay))
      for delay in (1.0, 2.0)
    ]
    self.assertNotEqual(told[0].family, told[1].family)

  def test_told_twice_the_delay_is_the_word_for_it(self):
    told = _arm(dataclasses.replace(_SMALL, arm="pb+scd", told_delay=2.0))
    word = _arm(dataclasses.replace(_SMALL, arm="pb+sc2d"))
    for name, value in word.numbers.items():
      np.testing.assert_allclose(told.numbers[name], value)

  def test_momenta_keep_the_effective_rate(self):
    grid = study_list.STUDIES["momentum"].grids["cpu"]
    for m, changes in grid.points.items():
      np.testing.assert_allclose(changes["learning_rate"] / (1 - m), 1.0)

  def test_constant_delay_begins_without_one(self):
    points = study_list.STUDIES["constant_delay"].grids["cpu"].points
    self.assertEqual(list(points)[0], 0)
    self.assertEqual(points[0]["uniform_delay"], 0)

  def test_cifar_recipe_drops_the_rate_as_published(self):
    """By 10 after 82 and 123 of 164 epochs of 50,000 samples."""
    grid = study_list.STUDIES["networks"].grids["paper"]
    setting = grid.settings()[("PB", "resnet20")]
    rate = train.decaying_rate(setting, 1.0, 50_000)
    steps = [82 * 50_000 - 1, 82 * 50_000, 123 * 50_000 - 1, 123 * 50_000]
    np.testing.assert_allclose(
      [rate(step) for step in steps], [1.0, 0.1, 0.1, 0.01], rtol=1e-6
    )
    self.assertEqual(setting.epochs, 164)

  def test_vgg_recipe_halves_the_rate_every_thirty_epochs(self):
    grid = study_list.STUDIES["networks"].grids["paper"]
    setting = grid.settings()[("PB", "vgg11")]
    rate = train.decaying_rate(setting, 1.0, 50_000)
    epochs = np.array([29, 31, 61, 271, 299]) * 50_000
    np.testing.assert_allclose(
      [rate(step) for step in epochs], [1, 1 / 2, 1 / 4, 1 / 512, 1 / 512]
    )
    self.assertEqual((setting.epochs, setting.learning_rate), (300, 0.05))


class RunTest(parameterized.TestCase):
  """A small study, of numbers and another schedule."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    cls.grid = study_list.Grid(
      base=_SMALL,
      lines={"PB": {}, "PB + SC": {"arm": "pb+scd"}},
      points={
        "plain": {},
        "faster": {"learning_rate": 4.0, "momentum": 0.5},
        "shrunk": {"shrinking": 0.0},
        "uniform": {"uniform_delay": 3},
      },
    )
    study = study_list.Study(
      claim="A claim.",
      x_label="kind",
      grids={"smoke": cls.grid},
    )
    cls.config = studies.Config(
      study="small", scale="smoke", workdir=str(cls.folder)
    )
    cls.studies = mock.patch.object(study_list, "STUDIES", {"small": study})
    with (
      cls.studies,
      mock.patch.object(
        runner, "train_family", side_effect=runner.train_family
      ) as train_family,
    ):
      cls.found = studies.run(cls.config)
    cls.num_programs = train_family.call_count

  def test_one_program_trains_all_of_a_schedule(self):
    self.assertEqual(self.num_programs, 2)

  def test_settings_are_the_runs_of_train(self):
    """Here beside others, and with rate and momentum as numbers."""
    fields = {field.name for field in dataclasses.fields(train.Config)}
    shared = {
      name: value
      for name, value in dataclasses.asdict(_SMALL).items()
      if name in fields
    }
    config = train.Config(
      **shared
      | self.grid.points["faster"]
      | {"arms": ("pb", "pb+scd"), "workdir": str(self.folder.parent / "train")}
    )
    alone = train.run(config)["arms"]
    for line, arm in (("PB", "pb"), ("PB + SC", "pb+scd")):
      here = self.found["arms"][f"{line} @ faster"]
      for name in ("final_loss", "final_accuracy"):
        np.testing.assert_allclose(here[name], alone[arm][name], rtol=1e-3)

  def test_gradient_shrunk_to_nothing_trains_the_last_stages_only(self):
    arms = self.found["arms"]
    self.assertNotAlmostEqual(
      arms["PB @ shrunk"]["final_loss"][0],
      arms["PB @ plain"]["final_loss"][0],
      places=2,
    )

  def test_file_has_the_form_of_every_programs(self):
    found = json.loads((self.folder / "results.json").read_text())
    self.assertEqual(set(found), {"status", "config", "versions", "arms"})
    self.assertEqual(found["status"], "done")
    self.assertEqual(found["config"]["claim"], "A claim.")
    self.assertLen(found["arms"], 8)
    self.assertEqual(
      list(found["arms"]),
      [f"{line} @ {x}" for line, x in self.grid.settings()],
    )

  def test_picture_and_page_are_there(self):
    self.assertGreater((self.folder / "small.png").stat().st_size, 10_000)
    page = (self.folder / "README.md").read_text()
    self.assertEqual(page, study_page.page(self.found))
    self.assertIn("| PB + SC |", page)

  def test_finished_study_is_only_read(self):
    with (
      self.studies,
      mock.patch.object(runner, "train_family") as train_family,
    ):
      self.assertEqual(studies.run(self.config), self.found)
    train_family.assert_not_called()


class SmokeTest(absltest.TestCase):
  def test_smoke_run_of_a_network_with_a_state_ends(self):
    folder = self.create_tempdir().full_path
    found = studies.run(
      studies.Config(study="normalization", smoke=True, workdir=folder)
    )
    self.assertEqual(found["status"], "done")
    self.assertIn("online", str(found["config"]["grid"]["points"]))
    for arm in found["arms"].values():
      self.assertTrue(np.isfinite(arm["final_loss"]).all())
    self.assertTrue((pathlib.Path(folder) / "normalization.png").exists())


class MistakesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("study", {"study": "delays"}, "study must be one of constant_delay.*'del"),
    ("scale", {"scale": "huge"}, "scale must be one of smoke, cpu.*'huge'"),
    ("workdir", {"workdir": ""}, "workdir must name a folder, got ''"),
  )
  def test_mistake_is_named(self, changes, message):
    config = dataclasses.replace(studies.Config(workdir="unused"), **changes)
    with self.assertRaisesRegex(ValueError, message):
      studies.prepare(config)
    self.assertFalse(pathlib.Path("unused").exists())

  def test_schedule_of_other_stages_is_refused(self):
    with self.assertRaisesRegex(ValueError, "schedule.*3 stages.*got 4 and 1"):
      pbp.presets.make_arm(
        "pb",
        3,
        learning_rate=0.1,
        momentum=0.9,
        schedule=pbp.schedules.uniform_delay(4, 2),
      )

  def test_seeds_may_be_fewer(self):
    folder = self.create_tempdir().full_path
    job = studies.prepare(
      studies.Config(study="momentum", seeds=1, workdir=folder)
    )
    for point in job.points.values():
      self.assertEqual(point.setting.seeds, 1)

  def test_list_names_every_study(self):
    text = io.StringIO()
    rich.console.Console(file=text, width=200).print(studies.studies_table())
    for name in study_list.STUDIES:
      self.assertIn(name, text.getvalue())


if __name__ == "__main__":
  absltest.main()
