"""Rings: what is written is read, in every format."""

from unittest import mock

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import ring_buffers
from tests import chain
from tests.reference import known_answers

_FORMATS = [
  jnp.float32,
  jnp.float16,
  jnp.bfloat16,
  jnp.float8_e4m3fn,
  jnp.float8_e5m2,
  jnp.float4_e2m1fn,
]


def _values_of_every_kind(dtype):
  values = [0.0, -0.0, 1.5, -3.0, 1e-3, jnp.finfo(dtype).max, jnp.inf, jnp.nan]
  return jnp.asarray(values, jnp.float32)


def _samples_of(dtype):
  return tuple(jnp.asarray(samples, dtype) for samples in chain.samples(12))


def _simulator(rate, history_dtype, dtype):
  """A stashed pipeline with `dtype` weights."""
  schedule = pbp.schedules.pipelined_backprop(chain.NUM_STAGES)
  return pbp.Simulator(
    [
      chain.given(jax.tree.map(lambda leaf: leaf.astype(dtype), weights))
      for weights in known_answers.params()
    ],
    chain.squared_error,
    optax.sgd(rate),
    schedule.with_weight_stashing(),
    history_dtype=history_dtype,
  )


def _rings(tree, num_slots, dtype=None):
  """Rings that hold a tree in every slot, as floats of `dtype`."""

  def full(leaf):
    return ring_buffers.full(leaf.astype(dtype or leaf.dtype), num_slots)

  return jax.tree.map(full, tree)


class RingTest(parameterized.TestCase):
  @parameterized.product(dtype=_FORMATS)
  def test_what_is_written_is_read(self, dtype):
    samples = _values_of_every_kind(dtype)

    @jax.jit
    def write_and_read(arrays, tree):
      ring = ring_buffers.Ring.of(arrays).write(tree, 2)
      return ring.read(2), ring.read(1), ring.values

    arrays = _rings({"w": jnp.zeros(8)}, 3, dtype)
    read, other, values = write_and_read(arrays, {"w": samples})
    wanted = np.asarray(samples.astype(dtype).astype(jnp.float32))
    for found in (read["w"], values["w"][2]):
      self.assertEqual(found.dtype, dtype)
      got = np.asarray(found.astype(jnp.float32))
      np.testing.assert_array_equal(got, wanted)
      np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
    np.testing.assert_array_equal(other["w"].astype(jnp.float32), 0)
    self.assertEqual(values["w"].shape, (3, 8))

  def test_other_numbers_are_kept_as_they_are(self):
    tree = {"count": jnp.array(7), "is": jnp.array(True), "w": jnp.ones(2)}
    ring = ring_buffers.Ring.of(_rings(tree, 2)).write(tree, 1)
    jax.tree.map(np.testing.assert_array_equal, ring.read(1), tree)
    self.assertEqual(
      [leaf.dtype.name for leaf in jax.tree.leaves(ring.kept)],
      ["int32", "bool", "float32"],
    )

  def test_rings_of_several_seeds_are_one_ring(self):
    leaves = jnp.arange(6.0).reshape(3, 2)
    arrays = jax.vmap(lambda leaf: _rings(leaf, 4, jnp.bfloat16))(leaves)

    def write_and_read(array, leaf):
      ring = ring_buffers.Ring.of(array).write(leaf, 3)
      return ring.read(3), ring.values

    read, values = jax.vmap(write_and_read)(arrays, leaves + 1)
    np.testing.assert_array_equal(read, leaves + 1)
    np.testing.assert_array_equal(values[:, :3], arrays[:, :3])

  @parameterized.product(platform=["gpu", "tpu"])
  def test_only_a_cpu_keeps_bits(self, platform):
    with mock.patch.object(jax, "default_backend", lambda: platform):
      ring = ring_buffers.Ring.of(jnp.zeros((3, 2), jnp.bfloat16))
      self.assertEqual(ring.kept.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(ring.write(jnp.ones(2), 1).read(1), 1)


class StateTest(parameterized.TestCase):
  @parameterized.product(
    dtypes=[(jnp.float32, jnp.bfloat16), (jnp.bfloat16, None)], by_step=[0, 1]
  )
  def test_states_hold_numbers_and_no_bits(self, dtypes, by_step):
    dtype, history_dtype = dtypes
    simulator = _simulator(0.05, history_dtype, dtype)
    inputs, targets = _samples_of(dtype)
    state = simulator.init(jax.random.key(0), inputs[0])
    for i in range(2):
      before = state
      if by_step:
        state, _ = simulator.step(state, inputs[i], targets[i])
      else:
        state, _ = simulator.run(state, inputs[i, None], targets[i, None])
      chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
      got = jax.tree.map(lambda leaf, i=i: leaf[i], state.history[0])
      self.assertEqual(got["w"].dtype, jnp.bfloat16)
      chex.assert_trees_all_equal(
        got, optax.tree.cast(before.params[0], jnp.bfloat16)
      )

  def test_weights_may_be_numbers(self):
    scale = pbp.Stage(lambda key, x: {"s": 2.0}, lambda p, x: p["s"] * x)
    for history_dtype in (None, jnp.bfloat16):
      simulator = pbp.Simulator(
        [scale, chain.stages()[0]],
        lambda y, target: jnp.sum(y**2),
        optax.sgd(0.1),
        pbp.schedules.pipelined_backprop(2),
        history_dtype=history_dtype,
      )
      inputs, targets = chain.samples(4)
      state = simulator.init(jax.random.key(0), inputs[0])
      state, metrics = simulator.run(state, inputs, targets)
      self.assertTrue(np.isfinite(metrics["loss"]).all())
      self.assertEqual(
        state.history[0]["s"].dtype, history_dtype or jnp.float32
      )

  def test_gradients_may_be_numbers(self):
    link = pbp.delay_gradients(1)
    state = link.init({"a": jnp.zeros([])})
    for number, wanted in ((1.5, 0), (2.5, 1.5)):
      delayed, state = link.update({"a": number}, state)
      self.assertEqual(delayed["a"], wanted)


class DerivativeTest(parameterized.TestCase):
  def _loss(self, rate, history_dtype, dtype=jnp.float32):
    simulator = _simulator(rate, history_dtype, dtype)
    inputs, targets = _samples_of(dtype)
    state = simulator.init(jax.random.key(0), inputs[0])
    return simulator.run(state, inputs, targets)[1]["loss"].sum()

  @parameterized.product(history_dtype=[None, jnp.float16])
  def test_a_run_has_the_derivative_that_differences_show(self, history_dtype):
    got = jax.grad(self._loss)(0.05, history_dtype)
    up, down = (self._loss(rate, None) for rate in (0.051, 0.049))
    np.testing.assert_allclose(got, (up - down) / 0.002, rtol=0.05)

  @parameterized.parameters(
    (jnp.float32, jnp.bfloat16),
    (jnp.float32, jnp.float8_e5m2),
    (jnp.bfloat16, None),
  )
  def test_of_bits_there_is_none(self, dtype, history_dtype):
    name = jnp.dtype(history_dtype or dtype).name
    with self.assertRaisesRegex(
      ValueError, f"CPU .* kept in {name}; .*history_dtype"
    ):
      jax.grad(self._loss)(0.05, history_dtype, dtype)

  def test_bfloat16_weights_in_a_wider_history_have_one(self):
    got = jax.grad(self._loss)(0.05, jnp.float32, jnp.bfloat16)
    self.assertTrue(np.isfinite(got) and got != 0)


if __name__ == "__main__":
  absltest.main()
