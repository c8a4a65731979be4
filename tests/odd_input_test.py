"""Odd input: each works, or is refused by an error that names it."""

import dataclasses
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import plans, runner, train
import pbp_jax as pbp
from pbp_jax import data
from tests.reference import optimizers, pipeline, timetables
from tests.reference import stages as reference_stages

_CROSS_ENTROPY = optax.losses.softmax_cross_entropy_with_integer_labels


def _dense(size, dtype=jnp.float32):
  def init(key, x):
    w = 0.3 * jax.random.normal(key, (x.shape[-1], size))
    return {"w": w.astype(dtype), "b": jnp.zeros(size, dtype)}

  return pbp.Stage(
    init=init,
    apply=lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]).astype(jnp.float32),
  )


def _square(y, target):
  return jnp.sum((y - target) ** 2)


def _run(stages, inputs, targets, loss_fn=_square, schedule=None, **options):
  """Trains from a start, op by op, which compiles nothing."""
  schedule = schedule or pbp.schedules.pipelined_backprop(len(stages))
  simulator = pbp.Simulator(
    stages, loss_fn, optax.sgd(0.05, 0.9), schedule, **options
  )
  with jax.disable_jit():
    state = simulator.init(jax.random.key(0), inputs[0])
    return state, *simulator.run(state, inputs, targets)


def _samples(count, size=3):
  return np.random.default_rng(0).normal(size=(2, count, 1, size)).astype("f4")


class SimulatorTest(parameterized.TestCase):
  def test_one_sample_is_one_update(self):
    inputs, targets = _samples(1)
    start, state, metrics = _run([_dense(3)] * 2, inputs, targets)
    self.assertEqual(metrics["loss"].shape, (1,))
    self.assertFalse(np.array_equal(start.params[0]["w"], state.params[0]["w"]))

  @parameterized.named_parameters(
    ("fewer_samples_than_stages", 5, None, 1),
    ("delays_longer_than_the_run", 2, [40, 7], 1),
    ("update_interval_longer_than_the_run", 2, None, 9),
    ("samples_that_do_not_fill_the_last_update", 2, None, 3),
  )
  def test_short_run_is_the_twins(self, num_stages, delays, interval):
    inputs, targets = np.random.default_rng(0).normal(size=(2, 4, 1, 2))
    rng = np.random.default_rng(1)
    params = [
      {"w": rng.normal(size=(2, 2)), "b": rng.normal(size=2)}
      for _ in range(num_stages)
    ]
    make = pbp.schedules
    if delays:
      schedule = make.from_delays(delays, interval)
      ticks = timetables.synchronous(num_stages, 4)
      read = lambda s, i, now: max(0, i - delays[s])
    else:
      schedule = make.pipelined_backprop(num_stages, interval)
      table = schedule.timetable(4)
      ticks = timetables.from_times(
        num_stages,
        4,
        lambda s, i: table.forward_tick[s, i],
        lambda s, i: table.backward_tick[s, i],
      )
      read = lambda s, i, now: now
    expected = pipeline.run(
      ticks,
      [reference_stages.dense_tanh] * num_stages,
      params,
      optimizers.sgdm(0.05, 0.9),
      reference_stages.squared_error,
      inputs,
      targets,
      update_interval=interval,
      consistency="saved",
      forward_view=optimizers.raw,
      read_version=read,
    )
    with jax.enable_x64(True):
      given = [
        pbp.Stage(
          init=lambda key, x, p=p: jax.tree.map(jnp.asarray, p),
          apply=lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]),
        )
        for p in params
      ]
      loss = lambda y, t: 0.5 * jnp.sum((y - t) ** 2)
      _, state, metrics = _run(
        given, jnp.asarray(inputs), jnp.asarray(targets), loss, schedule
      )
    np.testing.assert_allclose(metrics["loss"], expected.losses, atol=1e-12)
    for ours, theirs in zip(state.params, expected.params, strict=True):
      np.testing.assert_allclose(ours["w"], theirs["w"], atol=1e-12)

  def test_pipeline_without_parameters_only_evaluates(self):
    inputs, targets = _samples(4)
    stages = pbp.as_stages([jnp.tanh, jnp.sin])
    _, state, metrics = _run(stages, inputs, targets)
    expected = ((np.sin(np.tanh(inputs)) - targets) ** 2).sum((1, 2))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    self.assertEmpty(jax.tree.leaves(state.params))

  def test_one_stage_is_plain_sgd(self):
    inputs, targets = _samples(4)
    stage = _dense(3)
    start, state, _ = _run([stage], inputs, targets)
    params, optimizer = start.params[0], optax.sgd(0.05, 0.9)
    opt_state = optimizer.init(params)
    for x, t in zip(inputs, targets, strict=True):
      gradients = jax.grad(lambda p, x=x, t=t: _square(stage.apply(p, x), t))(
        params
      )
      updates, opt_state = optimizer.update(gradients, opt_state)
      params = optax.apply_updates(params, updates)
    for name in params:
      np.testing.assert_allclose(
        state.params[0][name], params[name], rtol=1e-5, atol=1e-6
      )

  def test_five_hundred_stages_train(self):
    weight = pbp.Stage(
      init=lambda key, x: jnp.ones(()), apply=lambda p, x: p * x
    )
    stages = [weight, *pbp.as_stages([lambda x: x] * 499)]
    inputs = np.ones((3, 1), np.float32)
    _, state, metrics = _run(stages, inputs, 2 * inputs)
    # No forward meets an update yet: loss 1 and gradient -2 in each step.
    np.testing.assert_allclose(metrics["loss"], [1.0] * 3)
    np.testing.assert_allclose(
      state.params[0], 1 + 0.05 * 2 * (1 + 1.9 + 2.71), rtol=1e-6
    )

  def test_label_out_of_range_shows_as_a_loss_that_is_not_finite(self):
    inputs, _ = _samples(3)
    labels = np.array([[0], [7], [1]])
    _, _, metrics = _run(
      [_dense(3)], inputs, labels, lambda y, t: _CROSS_ENTROPY(y, t).mean()
    )
    finite = np.isfinite(metrics["loss"])
    self.assertEqual(finite.tolist(), [True, False, True])

  def test_nan_pixel_shows_from_its_sample_on(self):
    inputs, targets = _samples(4)
    inputs[2, 0, 1] = np.nan
    _, _, metrics = _run([_dense(3)], inputs, targets)
    finite = np.isfinite(metrics["loss"])
    self.assertEqual(finite.tolist(), [True, True, False, False])

  def test_input_of_another_shape_names_its_stage(self):
    stages = [_dense(3), _dense(3)]
    simulator = pbp.Simulator(
      stages, _square, optax.sgd(0.1), pbp.schedules.pipelined_backprop(2)
    )
    state = simulator.init(jax.random.key(0), jnp.zeros((1, 3)))
    with self.assertRaisesRegex(ValueError, r"Stage 0 of 2.*float32\[1,5\]"):
      simulator.run(state, jnp.zeros((2, 1, 5)), jnp.zeros((2, 1, 3)))

  def test_integer_pixels_are_taken_as_numbers(self):
    inputs, targets = _samples(3)
    whole = np.round(inputs).astype(np.int32)
    _, _, of_ints = _run([_dense(3)], whole, targets)
    _, _, of_floats = _run([_dense(3)], whole.astype(np.float32), targets)
    np.testing.assert_allclose(of_ints["loss"], of_floats["loss"], rtol=1e-6)

  def test_batches_of_different_sizes_are_refused(self):
    inputs, targets = _samples(4)
    with self.assertRaisesRegex(ValueError, "same leading axis"):
      _run([_dense(3)], inputs, targets[:3])

  def test_mixed_dtypes_stay_as_they_are(self):
    inputs, targets = _samples(5)
    stages = [_dense(3, jnp.bfloat16), _dense(3), _dense(3, jnp.bfloat16)]
    schedule = pbp.schedules.pipelined_backprop(3, update_interval=2)
    start, state, metrics = _run(stages, inputs, targets, schedule=schedule)
    types = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    self.assertEqual(types(start), types(state))
    self.assertTrue(np.isfinite(metrics["loss"]).all())
    self.assertEqual(state.params[0]["w"].dtype, jnp.bfloat16)

  def test_stage_may_return_a_scalar(self):
    inputs, _ = _samples(3)
    stages = [_dense(3), pbp.as_stages([jnp.sum])[0]]
    _, _, metrics = _run(stages, inputs, np.zeros(3, np.float32))
    self.assertEqual(metrics["loss"].shape, (3,))

  def test_seed_given_twice_gives_the_same_twice(self):
    inputs, targets = _samples(3)
    simulator = pbp.Simulator(
      [_dense(3)], _square, optax.sgd(0.1), pbp.schedules.synchronous(1)
    )
    axes = pbp.PipelineState.vmap_axes()
    keys = jnp.stack([jax.random.key(7)] * 2)
    states = jax.vmap(simulator.init, (0, None), axes)(keys, inputs[0])
    run = jax.vmap(simulator.run, (axes, None, None), (axes, 0))
    _, metrics = run(states, inputs, targets)
    np.testing.assert_array_equal(metrics["loss"][0], metrics["loss"][1])

  def test_no_stages_are_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one layer"):
      pbp.Simulator(
        [], _square, optax.sgd(0.1), pbp.schedules.pipelined_backprop(1)
      )


def _dataset(train_count=4, test_count=2, **changes):
  rng = np.random.default_rng(0)
  arrays = {
    "train_images": rng.normal(size=(train_count, 2, 2, 1)).astype("f4"),
    "train_labels": np.arange(train_count, dtype=np.int32) % 3,
    "test_images": rng.normal(size=(test_count, 2, 2, 1)).astype("f4"),
    "test_labels": np.arange(test_count, dtype=np.int32) % 3,
  }
  for name, change in changes.items():
    arrays[name] = change(arrays[name])
  return data.Dataset(name="odd", num_classes=3, **arrays)


def _set(index, value):
  def change(array):
    array = array.copy()
    array[index] = value
    return array

  return change


class DatasetTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("label_too_large", "train_labels", _set(2, 3), "from 0 to 2, got 3.*2"),
    ("label_below_zero", "test_labels", _set(1, -1), "from 0 to 2, got -1"),
    (
      "labels_that_are_no_ints",
      "train_labels",
      lambda x: x.astype(np.float32),
      "int32.*float32",
    ),
    ("too_few_labels", "train_labels", lambda x: x[:-1], r"shape \(4,\)"),
    ("nan_pixel", "train_images", _set((3, 0, 0, 0), np.nan), "image 3 is not"),
    ("infinite_pixel", "test_images", _set((0, 0, 0, 0), np.inf), "image 0"),
    (
      "images_of_bytes",
      "train_images",
      lambda x: x.astype(np.uint8),
      "float32, got uint8",
    ),
    ("flat_images", "train_images", lambda x: x[:, 0, 0], "height, width"),
    (
      "test_images_of_another_shape",
      "test_images",
      lambda x: np.concatenate([x, x], axis=1),
      "alike",
    ),
    ("no_images", "train_images", lambda x: x[:0], "at least one"),
  )
  def test_odd_set_is_refused_by_what_is_odd(self, name, change, message):
    with self.assertRaisesRegex(ValueError, f"{name} must be .*{message}"):
      _dataset(**{name: change})


class ProgramTest(parameterized.TestCase):
  def _train(self, dataset, plan=None, arms=("pb",), **changes):
    config = dataclasses.replace(
      train.Config(), num_stages=3, width=4, arms=arms, **changes
    )
    plan = dataclasses.replace(
      train.make_plan(config, len(dataset.train_images)), **(plan or {})
    )
    flatten = lambda x: x.reshape(len(x), -1)
    stages = pbp.as_stages([flatten, _dense(3), jnp.negative])
    made = train.make_arms(
      config, len(stages), len(dataset.train_images), plan.total_samples
    )
    task = runner.Task(stages, dataset, plan, augment=False)
    (family,) = runner.families(made)
    return runner.train_family(task, family, lambda *unused: None)

  def test_one_image_and_fewer_samples_than_stages(self):
    found = self._train(_dataset(1, 1), seeds=1, epochs=2, update_interval=9)[
      "pb"
    ]
    self.assertEqual(found.curve["samples"], [1, 2])
    self.assertEqual(found.diverged_at, [None])
    self.assertTrue(np.isfinite(found.final_loss).all())

  @parameterized.named_parameters(
    ("no_seeds", {"seeds": 0}, "seeds must be at least 1, got 0"),
    ("no_arms", {"arms": ()}, "at least one arm"),
    ("an_arm_twice", {"arms": ("pb", "pb")}, "none twice"),
    ("no_samples_an_update", {"update_interval": 0}, "update_interval must"),
    ("no_epochs", {"epochs": 0}, "epochs must be at least 1"),
  )
  def test_impossible_setting_is_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(train.Config(), **changes)

  def test_seeds_are_a_first_one_and_those_after_it_so_none_comes_twice(self):
    plan = plans.Plan(
      num_seeds=3, first_seed=4, total_samples=1, chunk_samples=1,
      accuracy_points=1, accuracy_images=1,
    )  # fmt: skip
    self.assertEqual(list(plan.seeds), [4, 5, 6])

  def test_pipeline_of_one_stage_is_refused_by_its_name(self):
    config = dataclasses.replace(
      train.Config(),
      num_stages=1,
      workdir=str(pathlib.Path(tempfile.mkdtemp()) / "run"),
    )
    with self.assertRaisesRegex(ValueError, "num_stages must be"):
      train.run(config)


if __name__ == "__main__":
  absltest.main()
