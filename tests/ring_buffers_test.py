"""Rings: what is written is read, in every format."""

from absl.testing import absltest, parameterized
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


def _samples(dtype):
  """Values of every kind that the format has."""
  values = [0.0, -0.0, 1.5, -3.0, 1e-3, jnp.finfo(dtype).max, jnp.inf, jnp.nan]
  return jnp.asarray(values, jnp.float32)


class RingTest(parameterized.TestCase):
  @parameterized.product(dtype=_FORMATS)
  def test_what_is_written_is_read(self, dtype):
    samples = _samples(dtype)
    ring = ring_buffers.full({"w": 0 * jnp.ones(8)}, 3, dtype)
    ring = jax.jit(ring_buffers.Ring.write)(ring, {"w": samples}, 2)
    wanted = np.asarray(samples.astype(dtype).astype(jnp.float32))
    read = jax.jit(ring_buffers.Ring.read)(ring, 2)["w"]
    self.assertEqual(read.dtype, dtype)
    got = np.asarray(read.astype(jnp.float32))
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
    values = ring.values["w"].astype(jnp.float32)
    np.testing.assert_array_equal(values[2], wanted)
    np.testing.assert_array_equal(ring.read(1)["w"].astype(jnp.float32), 0)
    self.assertEqual(
      ring.forms, {"w": jax.ShapeDtypeStruct((3, 8), jnp.dtype(dtype))}
    )

  def test_other_numbers_are_kept_as_they_are(self):
    tree = {"count": jnp.array(7), "is": jnp.array(True), "w": jnp.ones(2)}
    ring = ring_buffers.full(tree, 2, jnp.bfloat16)
    read = ring.read(1)
    self.assertEqual(
      [leaf.dtype.name for leaf in jax.tree.leaves(read)],
      ["int32", "bool", "bfloat16"],
    )
    jax.tree.map(np.testing.assert_array_equal, read, tree)

  def test_a_ring_of_nothing_holds_nothing(self):
    ring = ring_buffers.full({}, 4)
    self.assertEqual(ring.write({}, 1).read(0), {})
    self.assertEqual(ring.num_slots, 4)

  def test_rings_of_several_seeds_are_one_ring(self):
    leaves = jnp.arange(6.0).reshape(3, 2)
    full = jax.vmap(lambda leaf: ring_buffers.full(leaf, 4, jnp.bfloat16))
    rings = full(leaves)
    self.assertEqual((rings.num_slots, rings.values.shape), (4, (3, 4, 2)))
    write = jax.vmap(lambda ring, leaf: ring.write(leaf, 3))
    read = jax.vmap(lambda ring: ring.read(3))
    np.testing.assert_array_equal(read(write(rings, leaves + 1)), leaves + 1)


class DerivativeTest(parameterized.TestCase):
  def _loss(self, rate, history_dtype, dtype=jnp.float32):
    schedule = pbp.schedules.pipelined_backprop(chain.NUM_STAGES)
    simulator = pbp.Simulator(
      [
        chain.given(jax.tree.map(lambda leaf: leaf.astype(dtype), weights))
        for weights in known_answers.params()
      ],
      chain.squared_error,
      optax.sgd(rate),
      schedule.with_weight_stashing(),
      history_dtype=history_dtype,
    )
    inputs, targets = (
      jnp.asarray(samples, dtype) for samples in chain.samples(12)
    )
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
    with self.assertRaisesRegex(ValueError, f"ring in {name}.*history_dtype"):
      jax.grad(self._loss)(0.05, history_dtype, dtype)

  def test_bfloat16_weights_in_a_wider_history_have_one(self):
    got = jax.grad(self._loss)(0.05, jnp.float32, jnp.bfloat16)
    self.assertTrue(np.isfinite(got) and got != 0)


if __name__ == "__main__":
  absltest.main()
