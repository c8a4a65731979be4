"""What can be a stage, and what is refused."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import chex
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import pbp_jax as pbp

_KEY = jax.random.key(0)
_X = jnp.ones((1, 4))


def _one(layer):
  (stage,) = pbp.as_stages([layer])
  return stage


class _Switched(nn.Module):
  """Adds one in training; `argument` is what its `__call__` is told by."""

  @nn.compact
  def __call__(self, x, train):
    return x + 1.0 if train else x


class _Training(nn.Module):
  @nn.compact
  def __call__(self, x, training=False):
    return x + 1.0 if training else x


class _NoisyLinear(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(4, 3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.linear(x))


class _Counter(nnx.Module):
  def __init__(self, rngs):
    del rngs
    self.count = nnx.Variable(jnp.zeros([]))

  def __call__(self, x):
    return x


class LinenTest(parameterized.TestCase):
  def test_a_module_is_its_init_and_apply(self):
    stage = _one(nn.Dense(3))
    params = stage.init(_KEY, _X)
    expected = nn.Dense(3).apply({"params": params}, _X)
    np.testing.assert_array_equal(stage.apply(params, _X), expected)
    self.assertEqual(stage.name, "Dense")
    self.assertFalse(stage.stochastic)

  def test_a_module_without_parameters_has_none(self):
    self.assertEqual(_one(nn.Dropout(0.5)).init(_KEY, _X), {})

  def test_every_key_draws_other_weights(self):
    stage = _one(nn.Dense(3))
    one, other = (
      stage.init(jax.random.key(seed), _X)["kernel"] for seed in (0, 1)
    )
    self.assertTrue((one != other).all())

  @parameterized.named_parameters(
    ("train", _Switched()), ("training", _Training())
  )
  def test_a_key_means_training_and_none_evaluation(self, module):
    stage = _one(module)
    self.assertTrue(stage.stochastic)
    np.testing.assert_array_equal(stage.apply({}, _X, _KEY), _X + 1)
    np.testing.assert_array_equal(stage.apply({}, _X, None), _X)

  def test_dropout_draws_by_its_key_and_rests_in_evaluation(self):
    stage = _one(nn.Dropout(0.5))
    x = jnp.ones((1, 200))
    one, again = (stage.apply({}, x, _KEY) for _ in range(2))
    other = stage.apply({}, x, jax.random.key(1))
    np.testing.assert_array_equal(one, again)
    self.assertTrue((one != other).any())
    np.testing.assert_array_equal(stage.apply({}, x, None), x)

  def test_a_mode_that_the_module_fixes_is_kept(self):
    stage = _one(nn.Dropout(0.5, deterministic=True))
    self.assertFalse(stage.stochastic)
    np.testing.assert_array_equal(stage.apply({}, _X), _X)


class NnxTest(parameterized.TestCase):
  def test_a_factory_is_called_anew_for_every_key(self):
    stage = _one(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    one, again, other = (
      stage.apply(stage.init(jax.random.key(seed), _X), _X)
      for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    self.assertTrue((one != other).all())
    self.assertEqual(stage.name, "Linear")

  def test_a_partial_of_a_class_is_a_factory(self):
    stage = _one(functools.partial(nnx.Linear, 4, 3))
    self.assertEqual(stage.apply(stage.init(_KEY, _X), _X).shape, (1, 3))

  def test_an_instance_has_given_weights_and_says_so(self):
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(7))
    stage = _one(module)
    for seed in (0, 1):
      params = stage.init(jax.random.key(seed), _X)
      np.testing.assert_array_equal(stage.apply(params, _X), module(_X))
    self.assertIn("given weights", stage.name)

  def test_a_module_with_streams_draws_by_its_key(self):
    stage = _one(lambda rngs: _NoisyLinear(rngs))
    self.assertTrue(stage.stochastic)
    params = stage.init(_KEY, _X)
    x = jnp.ones((50, 4))
    one, again = (stage.apply(params, x, _KEY) for _ in range(2))
    other = stage.apply(params, x, jax.random.key(1))
    rest, rest_again = (stage.apply(params, x, None) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(rest, rest_again)
    self.assertTrue((one != other).any())
    self.assertTrue((rest != 0).all())

  def test_gradients_go_to_the_parameters(self):
    stage = _one(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    params = stage.init(_KEY, _X)
    grads = jax.grad(lambda params: stage.apply(params, 2 * _X).sum())(params)
    np.testing.assert_array_equal(
      grads["kernel"].get_value(), np.full((4, 3), 2)
    )


class FunctionTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("lambda", lambda x: 2 * x, "<lambda>"),
    ("jitted", jax.jit(lambda x: 2 * x), "<lambda>"),
    ("partial", functools.partial(jnp.multiply, 2), "multiply"),
    ("with_defaults", lambda x, factor=2: factor * x, "<lambda>"),
  )
  def test_is_a_stage_without_parameters(self, function, name):
    stage = _one(function)
    self.assertEqual(stage.init(_KEY, _X), {})
    np.testing.assert_array_equal(stage.apply({}, _X), 2 * _X)
    self.assertEqual(stage.name, name)


class StageTest(parameterized.TestCase):
  def test_a_stage_is_taken_as_it_is(self):
    stage = pbp.Stage(lambda key, x: {}, lambda params, x: x)
    self.assertIs(_one(stage), stage)

  @parameterized.product(stochastic=[False, True], stateful=[False, True])
  def test_one_form_covers_all_kinds(self, stochastic, stateful):
    """Whatever `apply` takes: params 100, state 10, x 1, key last."""

    def apply(params, *rest):
      state, x, *key = rest if stateful else (0, *rest)
      y = params + state + x + (jax.random.key_data(key[0])[1] if key else 0)
      return (y, state + 1) if stateful else y

    stage = pbp.Stage(
      lambda key, x: 100,
      apply,
      stochastic=stochastic,
      init_state=(lambda key, x: 10) if stateful else None,
    )
    y, state = stage(100, 10, 1, jax.random.key(7))
    self.assertEqual(y, 101 + 10 * stateful + 7 * stochastic)
    self.assertEqual(state, 11 if stateful else None)


class WrongUseTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("none_at_all", lambda: pbp.as_stages([]), "at least one layer"),
    ("a_number", lambda: pbp.as_stages([nn.Dense(2), 3]), r"layers\[1\].*3"),
    ("one_module", lambda: pbp.as_stages(nn.Dense(2)), "sequence.*Dense"),
    ("linen_class", lambda: pbp.as_stages([nn.Dense]), r"layers\[0\].*Dense"),
    ("nnx_class", lambda: pbp.as_stages([nnx.Linear]), r"layers\[0\].*Linear"),
    (
      "two_arguments",
      lambda: pbp.as_stages([lambda a, b: a]),
      r"layers\[0\].*one argument",
    ),
    (
      "factory_of_something_else",
      lambda: pbp.as_stages([lambda rngs: 3]),
      r"layers\[0\].*nnx module.*3",
    ),
    (
      "other_variables_of_nnx",
      lambda: pbp.as_stages([lambda rngs: _Counter(rngs)]),
      "_Counter.*Variable.*init_state",
    ),
    (
      "running_statistics_of_linen",
      lambda: _one(nn.BatchNorm(use_running_average=False)).init(_KEY, _X),
      "BatchNorm.*batch_stats.*GroupNorm",
    ),
    (
      "running_statistics_of_nnx",
      lambda: pbp.as_stages([lambda rngs: nnx.BatchNorm(4, rngs=rngs)]),
      "BatchNorm.*BatchStat.*GroupNorm",
    ),
    ("init", lambda: pbp.Stage(3, lambda p, x: x), "Stage.init.*3"),
    ("apply", lambda: pbp.Stage(lambda k, x: {}, None), "Stage.apply.*None"),
    (
      "init_state",
      lambda: pbp.Stage(lambda k, x: {}, lambda p, x: x, init_state=0.0),
      "init_state.*0.0",
    ),
  )
  def test_is_refused_by_name_and_value(self, call, says):
    with self.assertRaisesRegex(ValueError, f"(?s){says}"):
      call()


class WithParamsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.stages = pbp.as_stages([nn.Dense(3), nn.relu])
    self.given = [self.stages[0].init(jax.random.key(7), _X), {}]

  def test_every_key_starts_from_them(self):
    stages = pbp.with_params(self.stages, self.given)
    for key in jax.random.split(_KEY, 2):
      params = [stage.init(key, _X) for stage in stages]
      chex.assert_trees_all_equal(params, self.given)

  def test_stages_are_otherwise_the_same(self):
    stages = pbp.with_params(self.stages, self.given)
    for stage, given in zip(stages, self.stages, strict=True):
      self.assertEqual(dataclasses.replace(stage, init=given.init), given)

  @parameterized.named_parameters(
    ("count", lambda given: given[:1], "one entry a stage, 2, got 1"),
    ("structure", lambda given: [{}, {}], r"Dense.*kernel.*got \{\}"),
    ("shape", lambda given: [jax.tree.map(jnp.ravel, given[0]), {}],
     r"Dense.*\(4, 3\).*\(12,\)"),
  )  # fmt: skip
  def test_weights_that_do_not_fit_are_refused(self, change, says):
    with self.assertRaisesRegex(ValueError, f"(?s){says}"):
      stages = pbp.with_params(self.stages, change(self.given))
      stages[0].init(_KEY, _X)


if __name__ == "__main__":
  absltest.main()
