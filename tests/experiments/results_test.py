import dataclasses
import math
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from experiments import results
from tests.experiments import configs


class WorkdirTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    self.arm = results.ArmResult(
      final_accuracy=[0.5, None],
      final_loss=[1.0, None],
      diverged_at=[None, 3],
      diverged_stage=[None, 1],
      curve={"samples": [1], "loss": [[1.0], [None]]},
      train_seconds=1.0,
      trained_with=["pb"],
    )

  def _claim(self, **changes):
    return results.Workdir.claim(
      self.folder, dataclasses.replace(configs.SMALL, **changes)
    )

  def test_claiming_writes_nothing(self):
    self._claim()
    self.assertFalse(self.folder.exists())

  def test_unfinished_run_gives_back_what_has_ended(self):
    self._claim().write("incomplete", {"pb": self.arm})
    found = self._claim()
    self.assertIsNone(found.finished)
    self.assertEqual(found.resumed().ended, {"pb": self.arm})

  def test_run_killed_before_its_first_results_starts_again(self):
    self.folder.mkdir()
    (self.folder / "results.json.part").write_text('{"sta')
    self.assertIsNone(self._claim().unfinished)
    self._claim().write("incomplete", {})
    self.assertIsNotNone(self._claim().unfinished)

  def test_how_safely_a_run_works_may_change(self):
    self._claim().write("incomplete", {"pb": self.arm})
    changes = {"checkpoint_minutes": 1.0, "checkpoints_kept": 9}
    self.assertIsNotNone(self._claim(**changes).unfinished)

  def _begun_elsewhere(self, **versions):
    begun = self._claim()
    begun = dataclasses.replace(begun, versions={**begun.versions, **versions})
    begun.write("incomplete", {"pb": self.arm})
    return begun.versions

  @parameterized.named_parameters(
    ("library", {"jax": "0.1"}, "jax='0.1' there"),
    ("device", {"device": "9 x cpu"}, "device='9 x cpu' there"),
    ("precision", {"x64": True}, "x64=True there, False here"),
    ("code", {"code": "0123"}, "code='0123' there"),
  )
  def test_other_versions_are_refused_by_what_differs(self, versions, message):
    self._begun_elsewhere(**versions)
    before = (self.folder / "results.json").read_bytes()
    with self.assertRaisesRegex(ValueError, message):
      self._claim().resumed()
    self.assertEqual((self.folder / "results.json").read_bytes(), before)

  def test_another_commit_of_the_same_code_goes_on(self):
    versions = self._begun_elsewhere(commit="0123+", python="3.99")
    self.assertEqual(self._claim().resumed().versions, versions)

  def test_other_versions_are_named_by_who_goes_on_anyway(self):
    earlier = self._begun_elsewhere(jax="0.1")
    resumed = self._claim().resumed(anyway=True)
    self.assertEqual(resumed.versions["jax"], self._claim().versions["jax"])
    self.assertEqual(resumed.versions["earlier"], [earlier])
    resumed.write("incomplete", {"pb": self.arm})
    self.assertEqual(self._claim().resumed().versions["earlier"], [earlier])

  def test_other_versions_may_start_again_what_has_computed_nothing(self):
    begun = dataclasses.replace(self._claim(), versions={"jax": "0.1"})
    begun.write("incomplete", {})
    self.assertNotIn("earlier", self._claim().resumed().versions)

  def test_damaged_entry_of_an_arm_is_an_error(self):
    self._claim().write("incomplete", {"pb": self.arm})
    path = self.folder / "results.json"
    path.write_text(path.read_text().replace('"diverged_at"', '"diverged"'))
    with self.assertRaisesRegex(ValueError, "damaged.*diverged_at"):
      _ = self._claim().ended

  @parameterized.named_parameters(
    ("unwritable", "access"), ("below_a_file", None)
  )
  def test_folder_that_cannot_be_made_is_refused(self, patched):
    if patched:
      with (
        mock.patch.object(os, patched, return_value=False),
        self.assertRaisesRegex(ValueError, "workdir must be writable"),
      ):
        self._claim()
    else:
      self.folder.write_text("mine")
      with self.assertRaisesRegex(ValueError, "workdir must be a folder"):
        results.Workdir.claim(self.folder / "below", configs.SMALL)

  def test_full_disk_is_named_and_leaves_the_old_results(self):
    written = self._claim().write("incomplete", {})
    with (
      mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left")),
      self.assertRaisesRegex(results.WorkdirError, "No space left"),
    ):
      self._claim().write("done", {"pb": self.arm})
    self.assertEqual(self._claim().unfinished, written)

  def test_finished_run_is_given_back(self):
    written = self._claim().write("done", {"pb": self.arm})
    self.assertEqual(self._claim().finished, written)

  def test_finished_run_may_have_moved(self):
    self._claim(workdir="here").write("done", {"pb": self.arm})
    self.assertIsNotNone(self._claim(workdir="there").finished)

  @parameterized.named_parameters(
    ("another_file", "notes.txt", "mine"),
    ("results_of_something_else", "results.json", '{"score": 1}'),
    ("results_that_are_no_json", "results.json", "{"),
  )
  def test_anything_else_is_refused_and_left_alone(self, name, text):
    self.folder.mkdir()
    (self.folder / name).write_text(text)
    with self.assertRaisesRegex(ValueError, "workdir=.*something that isn't"):
      self._claim()
    self.assertEqual([f.name for f in self.folder.iterdir()], [name])
    self.assertEqual((self.folder / name).read_text(), text)

  def test_another_run_is_refused_by_what_differs(self):
    self._claim().write("done", {"pb": self.arm})
    with self.assertRaisesRegex(ValueError, "epochs=10 there, 11 here"):
      self._claim(epochs=11)

  def test_file_in_its_place_is_refused(self):
    self.folder.write_text("mine")
    with self.assertRaisesRegex(ValueError, "must be a folder, got the file"):
      self._claim()

  def test_nan_is_never_written(self):
    nan = dataclasses.replace(self.arm, final_loss=[math.nan, None])
    with self.assertRaisesRegex(ValueError, "not JSON compliant"):
      self._claim().write("done", {"pb": nan})

  def test_diverged_seed_makes_the_means_null(self):
    entry = self._claim().write("done", {"pb": self.arm})["arms"]["pb"]
    self.assertIsNone(entry["accuracy_mean"])
    self.assertIsNone(entry["accuracy_std"])
    self.assertEqual(entry["final_accuracy"], [0.5, None])

  def test_deviation_is_the_samples(self):
    self.assertEqual(results.mean_and_std([1.0, 2.0, 3.0]), (2.0, 1.0))

  def test_single_seed_has_no_deviation(self):
    self.assertEqual(results.mean_and_std([2.0]), (2.0, 0.0))


if __name__ == "__main__":
  absltest.main()
