import dataclasses
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console

from experiments import reporting, results, runner, train
import pbp_jax as pbp
from pbp_jax import data
from tests.experiments import configs


class HyperparametersTest(parameterized.TestCase):
  def _first_updates(self, count, **changes):
    config = dataclasses.replace(configs.SMALL, arms=("sgdm",), **changes)
    (arm,) = train.make_arms(
      config, num_stages=1, num_examples=2, total_samples=2
    )
    params = (jnp.ones(()),)
    state = arm.optimizer.init(params)
    updates = []
    for _ in range(count):
      update, state = arm.optimizer.update((jnp.ones(()),), state, params)
      updates.append(float(update[0]))
    return updates

  def test_rate_is_scaled_to_one_sample(self):
    (update,) = self._first_updates(1, learning_rate=0.1)
    np.testing.assert_allclose(update, -6.42805e-6, rtol=1e-5)

  def test_momentum_is_scaled_to_one_sample(self):
    first, second = self._first_updates(2, learning_rate=0.1)
    np.testing.assert_allclose(second / first, 1.99917721, rtol=1e-6)

  def test_update_of_the_references_size_keeps_the_reference(self):
    first, second = self._first_updates(
      2, learning_rate=0.1, update_interval=128
    )
    np.testing.assert_allclose([first, second], [-0.1, -0.19], rtol=1e-6)

  def test_rate_decays_after_the_epochs_given(self):
    updates = self._first_updates(
      6, momentum=0.0, decay_epochs=(1.0, 2.0), decay_factor=0.5
    )
    np.testing.assert_allclose(
      np.divide(updates, updates[0]), [1, 1, 0.5, 0.5, 0.25, 0.25], rtol=1e-6
    )

  def test_decay_counts_updates_not_samples(self):
    updates = self._first_updates(
      3, momentum=0.0, update_interval=2, decay_epochs=(1.0,)
    )
    np.testing.assert_allclose(
      np.divide(updates, updates[0]), [1, 0.1, 0.1], rtol=1e-6
    )

  def test_weight_decay_is_not_scaled(self):
    without, with_decay = (
      self._first_updates(1, weight_decay=decay)[0] for decay in (0.0, 0.5)
    )
    np.testing.assert_allclose(with_decay / without, 1.5, rtol=1e-6)


class TrainingTest(parameterized.TestCase):
  """One small run, looked at from all sides."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    config = dataclasses.replace(configs.SMALL, workdir=str(cls.folder))
    with mock.patch.object(
      results.Workdir, "write", autospec=True, side_effect=results.Workdir.write
    ) as write:
      cls.found = train.run(config)
    cls.statuses = [
      (call.args[1], list(call.args[2])) for call in write.call_args_list
    ]

  @parameterized.named_parameters(("sgdm", 0, 1), ("beside_another_arm", 2, 0))
  def test_arm_and_seed_is_a_plain_simulator_run(self, index, seed):
    """Here alone, and with the arm's own optimizer."""
    stages = train.make_stages(configs.SMALL)
    dataset = data.load("digits")
    arm = train.make_arms(configs.SMALL, len(stages), 1437, 60)[index]
    simulator = pbp.Simulator(
      stages,
      lambda y, t: optax.softmax_cross_entropy_with_integer_labels(y, t).mean(),
      arm.optimizer,
      arm.schedule,
    )
    key = jax.random.key(seed)
    key_epoch = jax.random.fold_in(jax.random.fold_in(key, 1), 0)
    order = np.asarray(data.epoch_order(key_epoch, 1437))[:60, None]
    state = simulator.init(jax.random.fold_in(key, 0), dataset.example)
    state, metrics = simulator.run(
      state, dataset.train_images[order], dataset.train_labels[order]
    )
    entry = self.found["arms"][arm.name]
    np.testing.assert_allclose(
      entry["curve"]["loss"][seed],
      metrics["loss"].reshape(3, 20).mean(1),
      rtol=1e-4,
    )
    outputs = simulator.predict(state.params, dataset.train_images)
    loss = optax.softmax_cross_entropy_with_integer_labels(
      outputs, dataset.train_labels
    )
    np.testing.assert_allclose(
      entry["final_loss"][seed], loss.mean(), rtol=1e-4
    )
    guess = simulator.predict(state.params, dataset.test_images).argmax(-1)
    np.testing.assert_allclose(
      entry["final_accuracy"][seed], (guess == dataset.test_labels).mean()
    )

  def test_loss_falls(self):
    loss = np.array(self.found["arms"]["sgdm"]["curve"]["loss"])
    self.assertLess(loss[:, -1].mean(), loss[:, 0].mean())

  def test_file_has_the_contracts_form(self):
    found = json.loads((self.folder / "results.json").read_text())
    self.assertEqual(found["status"], "done")
    self.assertEqual(list(found["arms"]), list(configs.SMALL.arms))
    for arm in found["arms"].values():
      for name in ("final_accuracy", "final_loss", "diverged_at"):
        self.assertLen(arm[name], 2)
      accuracy = arm["final_accuracy"]
      np.testing.assert_allclose(arm["accuracy_mean"], np.mean(accuracy))
      np.testing.assert_allclose(arm["accuracy_std"], np.std(accuracy, ddof=1))
      self.assertEqual(arm["diverged_at"], [None, None])

  def test_file_says_what_made_it(self):
    self.assertEqual(self.found["config"]["arms"], list(configs.SMALL.arms))
    self.assertEqual(self.found["versions"]["jax"], jax.__version__)

  def test_file_was_there_from_the_start_and_grew_by_families(self):
    self.assertEqual(
      self.statuses,
      [
        ("incomplete", []),
        ("incomplete", ["sgdm"]),
        ("incomplete", ["sgdm", "pb", "pb+lwpvd+scd"]),
        ("done", ["sgdm", "pb", "pb+lwpvd+scd"]),
      ],
    )

  def test_curve_has_a_point_for_each_chunk(self):
    curve = self.found["arms"]["pb"]["curve"]
    self.assertEqual(curve["samples"], [20, 40, 60])
    self.assertEqual(np.shape(curve["loss"]), (2, 3))
    self.assertEqual(curve["accuracy_samples"], [20, 40, 60])

  def test_curve_ends_at_the_final_accuracy(self):
    for arm in self.found["arms"].values():
      np.testing.assert_allclose(
        [seed[-1] for seed in arm["curve"]["accuracy"]], arm["final_accuracy"]
      )

  def test_picture_is_there(self):
    for name in ("curves.png", "arms.png"):
      self.assertGreater((self.folder / name).stat().st_size, 10_000)

  def test_finished_run_is_not_run_again(self):
    config = dataclasses.replace(configs.SMALL, workdir=str(self.folder))
    with mock.patch.object(runner, "train_family") as train_family:
      again = train.run(config)
    train_family.assert_not_called()
    self.assertEqual(again, self.found)

  def test_table_has_a_line_for_each_arm(self):
    text = io.StringIO()
    console = rich.console.Console(file=text, width=80)
    console.print(reporting.results_table(self.found))
    for name, arm in self.found["arms"].items():
      accuracy = f"{arm['accuracy_mean'] * 100:.1f} ± "
      self.assertRegex(
        text.getvalue(), rf"│ {name.replace('+', '.')} .*{accuracy}"
      )


class MistakesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "run"

  @parameterized.named_parameters(
    ("arm", {"arms": ("pb+scdd",)}, "scdd.*'scd'"),
    ("model", {"model": "resnet21", "num_stages": 0}, "one of residual_mlp.*"),
    ("dataset", {"dataset": "digit"}, "one of digits.*got 'digit'"),
    ("missing_data", {"dataset": "mnist"}, "download_and_prepare"),
    ("depth", {"model": "resnet20"}, "num_stages must be 0.*got 5"),
  )
  def test_mistake_is_named_and_nothing_written(self, changes, message):
    config = dataclasses.replace(
      configs.SMALL,
      workdir=str(self.folder),
      data_dir=tempfile.mkdtemp(),
      **changes,
    )
    with self.assertRaisesRegex(ValueError, message):
      train.run(config)
    self.assertFalse(self.folder.exists())

  def test_unfinished_run_is_refused_with_resume_off(self):
    config = dataclasses.replace(configs.SMALL, workdir=str(self.folder))
    results.Workdir.claim(self.folder, config).write("incomplete", {})
    before = (self.folder / "results.json").read_bytes()
    with self.assertRaisesRegex(ValueError, "unfinished run.*resume is off"):
      train.prepare(dataclasses.replace(config, resume=False))
    self.assertEqual((self.folder / "results.json").read_bytes(), before)

  @parameterized.named_parameters(
    ("no_seeds", {"seeds": 0}, "seeds must be at least 1, got 0"),
    ("no_arms", {"arms": ()}, "at least one arm"),
    ("an_arm_twice", {"arms": ("pb", "pb")}, "none twice"),
    ("negative", {"max_samples": -1}, "max_samples must be at least 0"),
  )
  def test_impossible_setting_is_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(configs.SMALL, **changes)


if __name__ == "__main__":
  absltest.main()
