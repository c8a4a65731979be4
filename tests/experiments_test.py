import dataclasses
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl import flags
from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console

from experiments import config_flags, plans, reporting, results, runner, train
import pbp_jax as pbp
from pbp_jax import data

_ROOT = pathlib.Path(__file__).parents[1]
_SMALL = train.Config(
  num_stages=5,
  width=8,
  arms=("sgdm", "pb", "pb+lwpvd+scd"),
  seeds=2,
  max_samples=60,
  chunk_samples=20,
  learning_rate=3.0,
)


def _quiet(task, done, total):
  del task, done, total


class ConfigFlagsTest(parameterized.TestCase):
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Config:
    """Settings.

    Attributes:
      name: A name.
      count: A count, described
        on two lines.
      rate: A rate.
      is_on: A switch.
      words: Words.
      numbers: Numbers.

    Example:
      name: no description.
    """

    name: str = "a"
    count: int = 1
    rate: float = 0.5
    is_on: bool = False
    words: tuple[str, ...] = ("x", "y")
    numbers: tuple[float, ...] = ()

  def _parse(self, *arguments):
    values = flags.FlagValues()
    config_flags.define(self.Config, values)
    values(["program", *arguments])
    return config_flags.from_flags(self.Config, values)

  def test_no_flags_give_the_defaults(self):
    self.assertEqual(self._parse(), self.Config())

  @parameterized.named_parameters(
    ("text", "--name=b", {"name": "b"}),
    ("integer", "--count=7", {"count": 7}),
    ("number", "--rate=1e-3", {"rate": 1e-3}),
    ("switch", "--is_on", {"is_on": True}),
    ("words", "--words=p,q+r", {"words": ("p", "q+r")}),
    ("numbers", "--numbers=1,2.5", {"numbers": (1.0, 2.5)}),
  )
  def test_flag_sets_its_field(self, argument, expected):
    self.assertEqual(self._parse(argument), self.Config(**expected))

  def test_help_is_the_docstrings(self):
    values = flags.FlagValues()
    config_flags.define(self.Config, values)
    self.assertEqual(values["count"].help, "A count, described on two lines.")
    self.assertEqual(values["name"].help, "A name.")

  def test_unknown_flag_fails(self):
    with self.assertRaises(flags.UnrecognizedFlagError):
      self._parse("--colour=red")

  def test_number_that_is_none_names_its_flag(self):
    with self.assertRaisesRegex(ValueError, "--numbers must be .* got '1,b'"):
      self._parse("--numbers=1,b")

  def test_undescribed_field_is_refused(self):
    @dataclasses.dataclass
    class Config:
      """Settings.

      Attributes:
        name: A name.
      """

      name: str = ""
      other: str = ""

    with self.assertRaisesRegex(ValueError, "Config.other must be described"):
      config_flags.define(Config, flags.FlagValues())

  def test_other_type_is_refused(self):
    @dataclasses.dataclass
    class Config:
      """Settings.

      Attributes:
        table: A table.
      """

      table: dict[str, int] = dataclasses.field(default_factory=dict)

    with self.assertRaisesRegex(ValueError, "Config.table must be a str"):
      config_flags.define(Config, flags.FlagValues())

  def test_import_defines_no_flags(self):
    self.assertNotIn("dataset", flags.FLAGS)

  def test_every_setting_of_the_main_program_is_a_flag(self):
    values = flags.FlagValues()
    train.define_flags(values)
    fields = {field.name for field in dataclasses.fields(train.Config)}
    self.assertLessEqual(fields | {"list_arms"}, set(values))


class WorkdirTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    self.arm = results.ArmResult(
      final_accuracy=[0.5, None],
      final_loss=[1.0, None],
      diverged_at=[None, 3],
      curve={"samples": [1], "loss": [[1.0], [None]]},
      train_seconds=1.0,
      trained_with=["pb"],
    )

  def _claim(self, **changes):
    return results.Workdir.claim(
      self.folder, dataclasses.replace(_SMALL, **changes)
    )

  def test_claiming_writes_nothing(self):
    self._claim()
    self.assertFalse(self.folder.exists())

  def test_incomplete_run_starts_again(self):
    self._claim().write("incomplete", {})
    self.assertIsNone(self._claim().finished)

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


class PlanTest(parameterized.TestCase):
  def _plan(self, **changes):
    config = dataclasses.replace(train.Config(), **changes)
    return train.make_plan(config, num_examples=1437)

  def test_default_job_is_equal_chunks_of_all_samples(self):
    chunks = self._plan().chunks()
    self.assertEqual(chunks[-1][1], 10 * 1437)
    self.assertLen({end - start for start, end in chunks}, 1)

  def test_chunks_join_up(self):
    chunks = self._plan(max_samples=1001).chunks()
    ends = [end for _, end in chunks]
    self.assertEqual([start for start, _ in chunks], [0, *ends[:-1]])
    self.assertEqual(ends[-1], 1001)

  def test_max_samples_does_not_lengthen_a_run(self):
    self.assertEqual(self._plan(max_samples=10**9).total_samples, 14370)

  @parameterized.named_parameters(
    ("all_chunks", 100, 100), ("every_second", 50, 50), ("uneven", 7, 7)
  )
  def test_accuracy_is_measured_evenly_and_at_the_end(self, points, count):
    plan = self._plan(
      max_samples=1000, chunk_samples=10, accuracy_points=points
    )
    looks = plan.looks()
    self.assertLen(looks, count)
    self.assertEqual(looks[-1], 1000)
    self.assertLen(set(np.diff(looks)), 1)


class SampleOrderTest(parameterized.TestCase):
  def test_every_epoch_has_every_example_once(self):
    order = plans.SampleOrder([0, 1], 10)(0, 30)
    epochs = np.sort(order.reshape(2, 3, 10), axis=-1)
    np.testing.assert_array_equal(epochs, np.tile(np.arange(10), (2, 3, 1)))

  def test_epochs_and_seeds_differ(self):
    order = plans.SampleOrder([0, 1], 50)(0, 100).reshape(4, 50)
    self.assertLen({tuple(row) for row in order.tolist()}, 4)

  def test_order_does_not_depend_on_the_chunks(self):
    whole = plans.SampleOrder([3], 10)(0, 30)
    in_parts = plans.SampleOrder([3], 10)
    parts = [in_parts(s, e) for s, e in ((0, 4), (4, 13), (13, 30))]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)

  def test_later_part_needs_no_earlier_one(self):
    whole = plans.SampleOrder([3], 10)(0, 30)
    np.testing.assert_array_equal(
      plans.SampleOrder([3], 10)(15, 25), whole[:, 15:25]
    )


class HyperparametersTest(parameterized.TestCase):
  def _first_updates(self, count, **changes):
    config = dataclasses.replace(_SMALL, arms=("sgdm",), **changes)
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
    config = dataclasses.replace(_SMALL, workdir=str(cls.folder))
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
    stages = train.make_stages(_SMALL)
    dataset = data.load("digits")
    arm = train.make_arms(_SMALL, len(stages), 1437, 60)[index]
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
    self.assertEqual(list(found["arms"]), list(_SMALL.arms))
    for arm in found["arms"].values():
      for name in ("final_accuracy", "final_loss", "diverged_at"):
        self.assertLen(arm[name], 2)
      accuracy = arm["final_accuracy"]
      np.testing.assert_allclose(arm["accuracy_mean"], np.mean(accuracy))
      np.testing.assert_allclose(arm["accuracy_std"], np.std(accuracy, ddof=1))
      self.assertEqual(arm["diverged_at"], [None, None])

  def test_file_says_what_made_it(self):
    self.assertEqual(self.found["config"]["arms"], list(_SMALL.arms))
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
    self.assertGreater((self.folder / "curves.png").stat().st_size, 10_000)

  def test_finished_run_is_not_run_again(self):
    config = dataclasses.replace(_SMALL, workdir=str(self.folder))
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


class DivergenceTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    stages = train.make_stages(_SMALL)
    arms = train.make_arms(_SMALL, len(stages), 1437, 60)[1:]
    # The first update of this arm makes all weights NaN; of the stages with
    # weights the output is the last, with a delay of 2, so sample 3 meets them.
    nan = {**arms[1].numbers, "a": np.full(len(stages), np.nan)}
    arms[1] = dataclasses.replace(arms[1], numbers=nan)
    plan = train.make_plan(_SMALL, 1437)
    task = runner.Task(stages, data.load("digits"), plan, augment=False)
    cls.found = runner.train_family(task, arms, _quiet)

  def test_diverged_seeds_say_at_which_sample(self):
    self.assertEqual(self.found["pb+lwpvd+scd"].diverged_at, [3, 3])

  def test_diverged_seeds_have_no_numbers(self):
    arm = self.found["pb+lwpvd+scd"]
    self.assertEqual(arm.final_loss, [None, None])
    self.assertEqual(arm.final_accuracy, [None, None])
    self.assertEqual(arm.curve["loss"], [[None] * 3] * 2)
    self.assertEqual(arm.curve["accuracy"], [[None] * 3] * 2)

  def test_the_other_arm_goes_on(self):
    arm = self.found["pb"]
    self.assertEqual(arm.diverged_at, [None, None])
    self.assertTrue(np.isfinite(arm.final_loss).all())

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
    self.assertIn("from sample 3", text.getvalue())

  def test_weights_that_end_non_finite_are_found_by_their_last_sample(self):
    progress = runner.Progress(
      state=None, samples=0, losses=[], accuracies=[],
      diverged_at=np.array([-1, -1]),
    )  # fmt: skip
    replicas = mock.Mock(fetch=np.asarray)
    chunk = mock.Mock(loss=np.ones((2, 10)), is_finite=np.array([True, False]))
    progress.record(replicas, 40, chunk, None)
    self.assertEqual(progress.diverged_at.tolist(), [-1, 49])


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
      _SMALL, workdir=str(self.folder), data_dir=tempfile.mkdtemp(), **changes
    )
    with self.assertRaisesRegex(ValueError, message):
      train.run(config)
    self.assertFalse(self.folder.exists())

  @parameterized.named_parameters(
    ("no_seeds", {"seeds": 0}, "seeds must be at least 1, got 0"),
    ("no_arms", {"arms": ()}, "at least one arm"),
    ("an_arm_twice", {"arms": ("pb", "pb")}, "none twice"),
    ("negative", {"max_samples": -1}, "max_samples must be at least 0"),
  )
  def test_impossible_setting_is_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_SMALL, **changes)


class ProgramTest(parameterized.TestCase):
  """The program as a person calls it."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "run"

  def _call(self, *arguments):
    environment = {
      **os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "80",
    }  # fmt: skip
    return subprocess.run(
      [sys.executable, "-m", "experiments.train", *arguments],
      cwd=_ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip

  def test_smoke_run_spread_over_the_cores_gives_what_one_device_gives(self):
    arguments = (
      "--smoke", "--arms=pb", "--seeds=3", f"--workdir={self.folder}",
    )  # fmt: skip
    called = self._call(*arguments)
    self.assertEqual(called.returncode, 0, called.stderr)
    self.assertIn("│ pb ", called.stdout)
    written = (self.folder / "results.json").read_bytes()
    again = self._call(*arguments)
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertEqual(again.stdout, called.stdout)
    self.assertEqual((self.folder / "results.json").read_bytes(), written)

    config = train.Config(
      smoke=True, arms=("pb",), seeds=3,
      workdir=str(self.folder.with_name("here")),
    )  # fmt: skip
    here = train.run(config)
    there = json.loads(written)
    self.assertStartsWith(there["versions"]["device"], f"{os.cpu_count()} x")
    for name in ("final_loss", "final_accuracy"):
      np.testing.assert_allclose(
        there["arms"]["pb"][name], here["arms"]["pb"][name], rtol=1e-3
      )

  def test_mistake_is_one_message_without_a_traceback(self):
    called = self._call("--arms=pd", f"--workdir={self.folder}")
    self.assertNotEqual(called.returncode, 0)
    self.assertIn("unknown word 'pd'", called.stderr + called.stdout)
    self.assertNotIn("Traceback", called.stderr)
    self.assertFalse(self.folder.exists())

  def test_list_arms_lists_them(self):
    text = io.StringIO()
    console = rich.console.Console(file=text, width=500)
    console.print(reporting.arms_table())
    for name in pbp.presets.list_arms():
      self.assertIn(name, text.getvalue())


if __name__ == "__main__":
  absltest.main()
