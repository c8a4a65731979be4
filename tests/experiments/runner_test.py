import dataclasses
import io
import json
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import rich.console

from experiments import plans, reporting, runner, train
from experiments import replicas as replicas_lib
from pbp_jax import data
from tests.experiments import configs


class DivergenceTest(parameterized.TestCase):
  """Two arms, of which one is broken, and one image that breaks a seed."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    stages = train.make_stages(configs.SMALL)
    arms = train.make_arms(configs.SMALL, len(stages), 1437, 60)[1:]
    # The first update of this arm makes the weights of stage 1 NaN, which
    # its forward passes meet six samples later.
    nan = {**arms[1].numbers, "a": np.array([1.0, np.nan, 1.0, 1.0, 1.0])}
    arms[1] = dataclasses.replace(arms[1], numbers=nan)
    plan = train.make_plan(configs.SMALL, 1437)
    dataset = data.load("digits")
    images = dataset.train_images.copy()
    order = plans.SampleOrder(plan.seeds, 1437)(0, 60)
    assert order[0, 33] not in order[1]
    images[order[0, 33]] *= 1e38
    dataset = dataclasses.replace(dataset, train_images=images)
    task = runner.Task(stages, dataset, plan, augment=False)
    cls.found = runner.train_family(task, arms, configs.quiet)

  def test_broken_arm_says_at_which_sample_and_stage(self):
    arm = self.found["pb+lwpvd+scd"]
    self.assertEqual(arm.diverged_at, [0, 0])
    self.assertEqual(arm.diverged_stage, [1, 1])

  def test_broken_loss_says_at_which_sample_and_the_last_stage(self):
    self.assertEqual(self.found["pb"].diverged_at[0], 33)
    self.assertEqual(self.found["pb"].diverged_stage[0], 4)

  def test_diverged_seeds_have_no_numbers(self):
    arm = self.found["pb+lwpvd+scd"]
    self.assertEqual(arm.final_loss, [None, None])
    self.assertEqual(arm.final_accuracy, [None, None])
    self.assertEqual(arm.curve["loss"], [[None] * 3] * 2)
    self.assertEqual(arm.curve["accuracy"], [[None] * 3] * 2)

  def test_curve_ends_where_the_seed_diverges(self):
    curve = self.found["pb"].curve
    self.assertEqual([x is None for x in curve["loss"][0]], [False, True, True])

  def test_the_other_seed_goes_on(self):
    arm = self.found["pb"]
    self.assertIsNone(arm.diverged_at[1])
    self.assertIsNone(arm.diverged_stage[1])
    self.assertTrue(np.isfinite(arm.curve["loss"][1]).all())
    self.assertIsNotNone(arm.final_accuracy[1])

  def test_results_say_diverged_and_take_no_mean_over_survivors(self):
    entry = self.found["pb"].as_json()
    self.assertEqual(entry["status"], "diverged")
    for name in ("accuracy_mean", "accuracy_std", "loss_mean", "loss_std"):
      self.assertIsNone(entry[name])

  def test_table_says_so(self):
    entry = self.found["pb+lwpvd+scd"].as_json()
    text = io.StringIO()
    table = reporting.results_table(
      {
        "config": {"dataset": "digits", "model": "m", "seeds": 2},
        "arms": {"pb+lwpvd+scd": entry},
      }
    )
    rich.console.Console(file=text, width=80).print(table)
    self.assertIn("2 of 2 seeds diverged", text.getvalue())
    self.assertRegex(text.getvalue(), "from sample 0 .*stage 1")


class RecordTest(parameterized.TestCase):
  def _progress(self):
    progress = runner.Progress.start(None, 2)
    replicas = mock.Mock(fetch=lambda tree: tree)
    where = np.full((2, 10), -1)
    where[1, 7:] = 3
    chunk = replicas_lib.Chunk(np.ones((2, 10)), where)
    progress.record(replicas, 40, chunk, None)
    return progress, replicas

  def test_first_sample_is_kept_when_later_ones_are_not_finite_either(self):
    progress, replicas = self._progress()
    later = replicas_lib.Chunk(np.ones((2, 10)), np.full((2, 10), 4))
    progress.record(replicas, 50, later, None)
    self.assertEqual(progress.diverged_at.tolist(), [50, 47])
    self.assertEqual(progress.diverged_stage.tolist(), [4, 3])
    self.assertTrue(progress.has_diverged)

  def test_progress_goes_through_json(self):
    progress, _ = self._progress()
    progress.losses[0][1][:] = [np.nan, 0.1]
    again = runner.Progress.from_json(
      None, json.loads(json.dumps(progress.as_json()))
    )
    self.assertEqual(again.samples, 50)
    np.testing.assert_array_equal(again.losses[0][1], [np.nan, 0.1])
    np.testing.assert_array_equal(again.diverged_at, [-1, 47])


if __name__ == "__main__":
  absltest.main()
