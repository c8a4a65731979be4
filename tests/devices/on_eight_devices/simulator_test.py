"""The pipeline on devices against the simulator of the same stages."""

import dataclasses
import os
import unittest

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_RATE, _MOMENTUM = 0.02, 0.9
_LONG = "compiles for half a minute; PBP_LONG=1 runs it"


def _both(schedule):
  """Spike compensation with weight prediction."""
  return optax.chain(
    pbp.spike_compensation(_MOMENTUM, schedule.delay),
    optax.scale_by_learning_rate(_RATE),
    pbp.linear_weight_prediction(schedule.delay, "velocity", _RATE),
  )


def _wide(stages):
  """Stages whose weights are drawn in float64."""

  def wide(stage):
    return dataclasses.replace(
      stage,
      init=lambda key, x: jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64), stage.init(key, x)
      ),
    )

  made = {id(stage): wide(stage) for stage in stages}
  return tuple(made[id(stage)] for stage in stages)


def _normal(*shape):
  return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape))


def _mean_squared_error(y, target):
  return jnp.mean((y - target) ** 2)


def _cross_entropy(y, label):
  return optax.losses.softmax_cross_entropy_with_integer_labels(y, label).mean()


def _first(data):
  return jax.tree.map(lambda leaf: leaf[0], data)


def _assert_close(got, expected, atol=1e-10):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol),
    got,
    expected,
  )


class EqualityTest(parameterized.TestCase):
  def _check(
    self,
    stages,
    inputs,
    targets,
    loss_fn=_mean_squared_error,
    schedule=None,
    optimizer=None,
    backward="saved",
    num_replicas=1,
  ):
    """Trains both; returns the pipeline."""
    schedule = schedule or pbp.schedules.pipelined_backprop(len(stages))
    optimizer = optimizer or _both(schedule)
    simulator = pbp.Simulator(
      stages, loss_fn, optimizer, schedule, backward=backward
    )
    expected = chain.started(simulator, _first(inputs))
    pipeline = pbp.devices.Pipeline(
      stages,
      loss_fn,
      optimizer,
      schedule,
      example=(_first(inputs), _first(targets)),
      backward=backward,
      mesh=pbp.devices.make_mesh(len(stages), num_replicas),
    )
    # Drawing anew could round float32 draws in another way.
    state = pipeline.restore(
      expected.key,
      pbp.devices.Gathered(
        expected.params, expected.opt_state, expected.stage_state
      ),
      fed=0,
    )
    start = expected.params
    state, found = pipeline.run(state, inputs, targets, drain=True)
    expected, metrics = simulator.run(expected, inputs, targets)
    _assert_close(np.asarray(found["loss"]), np.asarray(metrics["loss"]))
    gathered = pipeline.gather(state)
    _assert_close(gathered.params, expected.params)
    _assert_close(gathered.opt_state, expected.opt_state)
    _assert_close(gathered.stage_state, expected.stage_state)
    moved = [
      np.abs(np.asarray(a) - np.asarray(b)).max()
      for a, b in zip(
        jax.tree.leaves(start), jax.tree.leaves(expected.params), strict=True
      )
    ]
    self.assertGreater(max(moved), 1e-3)
    return pipeline

  @parameterized.named_parameters(
    ("one_f_one_b", pbp.schedules.one_f_one_b(4, 3)),
    ("pipemare", pbp.schedules.pipemare(4)),
    ("fill_drain", pbp.schedules.fill_drain(4, 3)),
  )
  def test_other_timetables(self, schedule):
    stages = chain.stages()[:3] + chain.stages()[-1:]
    inputs, targets = chain.samples(30)
    self._check(stages, inputs, targets, schedule=schedule)

  def test_an_optimizer_that_reads_the_weights_of_the_forwards(self):
    """Under recomputation no other pass needs them."""
    schedule = pbp.schedules.pipelined_backprop(3, 3)
    optimizer = optax.chain(pbp.delay_compensation(0.5), _both(schedule))
    self._check(
      chain.stages()[:2] + chain.stages()[-1:],
      *chain.samples(30),
      schedule=schedule,
      optimizer=optimizer,
      backward="recompute",
    )

  def test_tuples_tokens_and_stages_without_weights(self):
    """Integers travel beside activations, through stages of any shapes."""
    table = chain.given(
      {"w": np.sin(np.arange(21.0).reshape(7, 3))},
      lambda params, x: (params["w"][x], x),
    )
    gate = chain.given(
      {"b": np.ones(3)},
      lambda params, x: (jnp.tanh(x[0] * params["b"][None]), x[1] % 2),
    )
    merge = pbp.as_stages([lambda x: x[0] + x[1][..., None]])
    dense = chain.given(
      {"w": np.cos(np.arange(6.0).reshape(3, 2)), "b": np.zeros(2)}
    )
    tokens = jnp.arange(60).reshape(30, 2) % 7
    self._check((table, gate, *merge, dense), tokens, _normal(30, 2, 2))

  @parameterized.parameters("saved", "recompute")
  def test_stages_with_noise_and_states(self, backward):
    def noisy(params, state, x, key):
      x = x * params["w"][None] + state["mean"][None]
      if key is not None:
        x = x + jax.random.normal(key, x.shape)
      return jnp.tanh(x), {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}

    stage = pbp.Stage(
      lambda key, x: {"w": jnp.ones(3)},
      noisy,
      stochastic=True,
      init_state=lambda key, x: {"mean": jnp.zeros(3)},
    )
    pipeline = self._check(
      (stage,) * 3, _normal(30, 2, 3), _normal(30, 2, 3), backward=backward
    )
    self.assertEqual(pipeline.num_programs, 1)

  def test_states_that_backward_passes_advance(self):
    @jax.custom_vjp
    def subtract_mean_error(x, mean):
      return x

    subtract_mean_error.defvjp(
      lambda x, mean: (x, mean),
      lambda mean, error: (
        error - mean[None],
        0.9 * mean + 0.1 * error.mean(0),
      ),
    )
    stage = pbp.Stage(
      lambda key, x: {"w": jnp.ones(3)},
      lambda params, state, x: (
        jnp.tanh(
          subtract_mean_error(x * params["w"][None], state["mean"].value)
        ),
        {**state, "seen": state["seen"] + 1},
      ),
      init_state=lambda key, x: {
        "mean": pbp.BackwardState(jnp.zeros(3)),
        "seen": jnp.zeros([], int),
      },
    )
    self._check((stage,) * 3, _normal(30, 2, 3), _normal(30, 2, 3))

  def test_replicas_share_each_micro_batch(self):
    inputs, targets = _normal(30, 4, 3), _normal(30, 4, 2)
    self._check(
      chain.stages()[:1] + chain.stages()[-1:], inputs, targets, num_replicas=4
    )

  @unittest.skipUnless("PBP_LONG" in os.environ, _LONG)
  def test_a_transformer_of_equal_blocks(self):
    (block,) = _wide(pbp.as_stages([_Block()]))
    embed, head = _wide(pbp.as_stages([nn.Embed(5, 8), nn.Dense(5)]))
    stages = (embed, *(block,) * 2, head)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5, (24, 1, 5)))
    pipeline = self._check(
      stages,
      tokens[..., :-1],
      tokens[..., 1:],
      _cross_entropy,
    )
    self.assertEqual(pipeline.num_programs, 3)

  @unittest.skipUnless("PBP_LONG" in os.environ, _LONG)
  def test_a_resnet_in_groups_of_equal_cost(self):
    stages = _wide(pbp.models.resnet(depth=8, width=2, normalization="none"))
    inputs = _normal(12, 1, 8, 8, 3)
    costs = pbp.devices.count_costs(stages, inputs[0])
    partition = pbp.devices.partition(costs, 4)
    self.assertGreater(partition.balance, 0.5)
    labels = jnp.arange(12)[:, None] % 10
    self._check(
      partition.merge(stages),
      inputs,
      labels,
      _cross_entropy,
      backward="recompute",
    )


class _Block(nn.Module):
  """A pre-normalised transformer block with causal attention."""

  @nn.compact
  def __call__(self, x):
    y = nn.LayerNorm()(x)
    mask = nn.make_causal_mask(y[..., 0])
    x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask)
    y = nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))
    return x + nn.Dense(x.shape[-1])(nn.gelu(y))


if __name__ == "__main__":
  absltest.main()
