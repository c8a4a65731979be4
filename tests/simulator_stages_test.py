"""Stages of every kind in the simulator: noise, states, batches, outputs."""

import dataclasses

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_FROZEN = optax.set_to_zero()


def _value(y, target):
  """A loss that is the output itself."""
  del target
  return jnp.sum(y)


def _simulate(stages, inputs, optimizer=_FROZEN, loss=_value, **options):
  schedule = options.pop(
    "schedule", pbp.schedules.pipelined_backprop(len(stages))
  )
  seed = options.pop("seed", 0)
  example = options.pop("example", jax.tree.map(lambda leaf: leaf[0], inputs))
  simulator = pbp.Simulator(stages, loss, optimizer, schedule, **options)
  state = simulator.init(jax.random.key(seed), example)
  targets = jnp.zeros(len(jax.tree.leaves(inputs)[0]))
  return simulator, *simulator.run(state, inputs, targets)


def _noise(params, x, key):
  del params
  return x if key is None else x + jax.random.uniform(key, x.shape)


_NOISE = pbp.Stage(lambda key, x: {}, _noise, stochastic=True)


class StochasticTest(parameterized.TestCase):
  def test_every_micro_batch_stage_and_seed_has_noise_of_its_own(self):
    split = lambda params, x, key: (x[0], _noise(params, x[1], key))
    second = dataclasses.replace(_NOISE, apply=split)
    first = dataclasses.replace(
      _NOISE, apply=lambda params, x, key: (_noise(params, x, key), x)
    )
    inputs = jnp.zeros((6, 1))
    drawn = []
    for seed in (0, 1):
      _, _, metrics = _simulate(
        [first, second],
        inputs,
        loss=lambda y, t: (_value(y[0] + y[1], t), y),
        has_aux=True,
        seed=seed,
      )
      drawn += np.concatenate(metrics["aux"]).ravel().tolist()
    self.assertLen(set(drawn), 2 * 2 * 6)

  def test_the_same_seed_draws_the_same_noise(self):
    losses = [
      np.asarray(_simulate([_NOISE], jnp.zeros((6, 1)))[2]["loss"])
      for _ in range(2)
    ]
    np.testing.assert_array_equal(*losses)
    self.assertGreater(losses[0].min(), 0)

  @parameterized.named_parameters(("every_micro_batch", 1), ("every_other", 2))
  def test_recomputation_meets_the_mask_of_the_forward(self, interval):
    """Linear stages: saved and recomputed backwards agree if masks do."""

    def masked(params, x, key):
      y = x @ params["w"]
      if key is None:
        return y
      return jnp.where(jax.random.bernoulli(key, 0.5, (1, 3)), y, 0.0)

    rng = np.random.default_rng(0)
    stages = [
      dataclasses.replace(
        chain.given({"w": rng.normal(size=(3, 3))}, masked), stochastic=True
      )
      for _ in range(3)
    ]
    inputs = jnp.asarray(rng.normal(size=(16, 1, 3)), jnp.float32)
    schedule = pbp.schedules.pipelined_backprop(3, interval)
    params = [
      _simulate(
        stages,
        inputs,
        optax.sgd(0.05),
        lambda y, t: jnp.sum((y - 1) ** 2),
        schedule=schedule,
        backward=backward,
      )[1].params
      for backward in ("saved", "recompute")
    ]
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      *params,
    )

  def test_prediction_is_without_noise(self):
    simulator, state, _ = _simulate([_NOISE], jnp.zeros((2, 1)))
    x = jnp.full((1,), 3.0)
    np.testing.assert_array_equal(simulator.predict(state.params, x), x)


def _counting(params, state, x):
  """Adds how many micro-batches came before, and the weight."""
  return x + state + params["w"], state + 1


_COUNTER = pbp.Stage(
  lambda key, x: {"w": jnp.zeros([])},
  _counting,
  init_state=lambda key, x: jnp.zeros([]),
  name="counter",
)


class StatefulTest(parameterized.TestCase):
  @parameterized.product(backward=["saved", "recompute"], stashed=[False, True])
  def test_a_state_advances_once_a_micro_batch_in_their_order(
    self, backward, stashed
  ):
    schedule = pbp.schedules.pipelined_backprop(2)
    if stashed:
      schedule = schedule.with_weight_stashing()
    _, state, metrics = _simulate(
      [_COUNTER, _COUNTER],
      jnp.zeros(5),
      schedule=schedule,
      backward=backward,
    )
    np.testing.assert_array_equal(metrics["loss"], 2 * np.arange(5))
    np.testing.assert_array_equal(state.stage_state, [5, 5])

  def test_a_state_carries_no_gradient_to_earlier_micro_batches(self):
    """The weight gets a gradient of one from each micro-batch."""
    _, state, _ = _simulate([_COUNTER], jnp.zeros(5), optax.sgd(1.0))
    np.testing.assert_allclose(state.params[0]["w"], -5.0)

  def test_a_stage_may_have_both_noise_and_state(self):
    stage = dataclasses.replace(
      _COUNTER,
      apply=lambda p, s, x, key: _counting(p, s, _noise(p, x, key)),
      stochastic=True,
    )
    _, state, metrics = _simulate([stage], jnp.zeros(5))
    extra = metrics["loss"] - np.arange(5)
    self.assertTrue(((extra > 0) & (extra < 1)).all())
    np.testing.assert_array_equal(state.stage_state, [5])

  def test_prediction_uses_the_state_it_is_given(self):
    simulator, state, _ = _simulate([_COUNTER], jnp.zeros(5))
    y = simulator.predict(state.params, jnp.zeros([]), state.stage_state)
    np.testing.assert_array_equal(y, 5.0)

  def test_prediction_without_the_state_is_refused(self):
    simulator, state, _ = _simulate([_COUNTER], jnp.zeros(5))
    with self.assertRaisesRegex(ValueError, "stage_state.*counter.*None"):
      simulator.predict(state.params, jnp.zeros([]))


_IDENTITY = pbp.Stage(lambda key, x: {}, lambda params, x: x)


class BatchFunctionTest(absltest.TestCase):
  def test_indices_may_stand_for_data_on_the_device(self):
    data = jnp.arange(10.0) ** 2
    simulator = pbp.Simulator(
      [_IDENTITY],
      lambda y, t: y + 100 * t,
      _FROZEN,
      pbp.schedules.synchronous(1),
      batch_fn=lambda key, i, t: (data[i], t + 1),
    )
    state = simulator.init(jax.random.key(0), data[0])
    _, metrics = simulator.run(state, jnp.array([3, 0, 7]), jnp.arange(3))
    np.testing.assert_array_equal(metrics["loss"], [109.0, 200.0, 349.0])

  def test_the_key_is_another_for_each_micro_batch_and_no_stages_own(self):
    _, _, metrics = _simulate(
      [dataclasses.replace(_NOISE, apply=lambda p, x, key: (x, key))],
      jnp.zeros(6),
      batch_fn=lambda key, x, t: (jax.random.key_data(key), t),
      loss=lambda y, t: (jnp.zeros([]), (y[0], jax.random.key_data(y[1]))),
      has_aux=True,
      example=jnp.zeros(2, jnp.uint32),
    )
    keys = np.concatenate(metrics["aux"])
    self.assertLen({tuple(key) for key in keys.tolist()}, 12)


class MetricsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("by_name", lambda y: {"double": 2 * y}, "double"),
    ("without_a_name", lambda y: 2 * y, "aux"),
  )
  def test_aux_joins_the_metrics(self, aux, name):
    _, _, metrics = _simulate(
      [_IDENTITY],
      jnp.arange(4.0),
      loss=lambda y, t: (y, aux(y)),
      has_aux=True,
    )
    np.testing.assert_array_equal(metrics["loss"], np.arange(4.0))
    np.testing.assert_array_equal(metrics[name], 2 * np.arange(4.0))

  def test_aux_called_loss_is_refused(self):
    with self.assertRaisesRegex(ValueError, "aux.*'loss'"):
      _simulate(
        [_IDENTITY],
        jnp.arange(4.0),
        loss=lambda y, t: (y, {"loss": y}),
        has_aux=True,
      )


class PredictionTest(absltest.TestCase):
  def test_is_the_newest_raw_weights_under_weight_prediction(self):
    simulator = chain.simulator({"lwp": 2.0})
    inputs, targets = chain.samples(20)
    state = simulator.init(jax.random.key(0), inputs[0])
    state, _ = simulator.run(state, inputs, targets)
    expected = inputs[3]
    for params in state.params:
      expected = chain.dense_tanh(params, expected)
    got = simulator.predict(state.params, inputs[3])
    np.testing.assert_allclose(got, expected, rtol=1e-6)

  def test_is_unlike_what_the_forward_of_training_met(self):
    simulator = chain.simulator()
    inputs, targets = chain.samples(20)
    state = simulator.init(jax.random.key(0), inputs[0])
    before, _ = simulator.run(state, inputs[:19], targets[:19])
    _, metrics = simulator.run(before, inputs[19:], targets[19:])
    newest = chain.squared_error(
      simulator.predict(before.params, inputs[19]), targets[19]
    )
    self.assertGreater(abs(float(newest - metrics["loss"][0])), 1e-5)


class FlaxTest(absltest.TestCase):
  def test_linen_nnx_and_functions_train_together(self):
    stages = pbp.as_stages(
      [
        nn.Dense(8),
        nn.tanh,
        nn.Dropout(0.1),
        lambda rngs: nnx.Linear(8, 1, rngs=rngs),
        lambda x: x,
      ]
    )
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(400, 1, 4)), jnp.float32)
    simulator = pbp.Simulator(
      stages,
      lambda y, t: jnp.mean((y - t) ** 2),
      optax.sgd(0.05),
      pbp.schedules.pipelined_backprop(len(stages)),
    )
    targets = inputs.sum(-1, keepdims=True)
    start = simulator.init(jax.random.key(0), inputs[0])
    end, _ = simulator.run(start, inputs, targets)
    error = lambda params: jnp.mean(
      (simulator.predict(params, inputs[:, 0]) - targets[:, 0]) ** 2
    )
    self.assertLess(error(end.params), 0.5 * error(start.params))


if __name__ == "__main__":
  absltest.main()
