"""The same run by other means gives the same numbers.

`PBP_LONG=1 pytest tests/numbers_test.py` trains 100,000 steps for the memory.
"""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_ROOT = pathlib.Path(__file__).parents[1]
_CHUNKS = 100 if "PBP_LONG" in os.environ else 4
_COUNT = 15

# Prints the bytes of a trained pipeline's weights and losses.
_SCRIPT = """
from tests import numbers_test
state, losses = numbers_test.train(width=300, batch_size=200)
print(numbers_test.digest(state, losses))
"""


def _simulator(dtype=jnp.float32, width=16):
  def dense(size):
    def init(key, x):
      # Drawn in float32: in both precisions the same weights.
      w = jax.random.normal(key, (x.shape[-1], size), jnp.float32)
      return {"w": (w / np.sqrt(x.shape[-1])).astype(dtype)}

    return pbp.Stage(init=init, apply=lambda p, x: jnp.tanh(x @ p["w"]))

  stages = [dense(width), dense(width), dense(4)]
  schedule = pbp.schedules.pipelined_backprop(3)
  optimizer = optax.chain(
    pbp.spike_compensation(0.9, schedule.delay),
    optax.scale_by_learning_rate(0.01),
    pbp.linear_weight_prediction(schedule.delay, learning_rate=0.01),
  )
  loss = lambda y, t: jnp.mean((y - t) ** 2)
  return pbp.Simulator(stages, loss, optimizer, schedule)


def train(dtype=jnp.float32, width=16, batch_size=1):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(_COUNT, batch_size, 8)).astype("f4").astype(dtype)
  targets = np.tanh(inputs[..., :4]).astype(dtype)
  simulator = _simulator(dtype, width)
  state = simulator.init(jax.random.key(0), inputs[0])
  state, metrics = simulator.run(state, inputs, targets)
  return state, metrics["loss"]


def digest(state, losses):
  arrays = [*jax.tree.leaves(state.params), losses]
  return b"".join(np.asarray(x).tobytes() for x in arrays).hex()


def _resident_bytes():
  text = pathlib.Path("/proc/self/statm").read_text()
  return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


class NumbersTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.state, cls.losses = train()

  def test_second_run_is_the_first_bit_for_bit(self):
    state, losses = train()
    self.assertEqual(digest(state, losses), digest(self.state, self.losses))

  def test_double_precision_agrees_to_single_precision(self):
    with jax.enable_x64(True):
      state, losses = train(jnp.float64)
    self.assertEqual(losses.dtype, jnp.float64)
    np.testing.assert_allclose(losses, self.losses, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(
      jax.tree.map(np.float32, state.params), self.state.params, atol=1e-5
    )

  def test_without_jit_agrees_to_rounding(self):
    with jax.disable_jit():
      state, losses = train()
    np.testing.assert_allclose(losses, self.losses, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(state.params, self.state.params, atol=1e-5)

  def test_one_thread_or_many_give_the_same_bits(self):
    digests = []
    for flags in (
      "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
      "--xla_cpu_multi_thread_eigen=true",
    ):
      called = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=_ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
      )
      self.assertEqual(called.returncode, 0, called.stderr)
      digests.append(called.stdout.strip())
    self.assertNotEmpty(digests[0])
    self.assertEqual(*digests)

  def test_memory_stays_flat(self):
    simulator = _simulator()
    rng = np.random.default_rng(0)
    state = simulator.init(jax.random.key(0), jnp.zeros((1, 8)))
    before = None
    for chunk in range(_CHUNKS):
      inputs = rng.normal(size=(1000, 1, 8)).astype("f4")
      state, metrics = simulator.run(
        state, inputs, np.tanh(inputs[..., :4]), donate=True
      )
      self.assertTrue(np.isfinite(metrics["loss"]).all())
      if chunk == _CHUNKS // 4:  # warm
        before = _resident_bytes()
    growth = _resident_bytes() / before - 1
    print(f"{_CHUNKS * 1000} steps: memory grew by {growth:.3%}")
    self.assertLess(growth, 0.01)


if __name__ == "__main__":
  absltest.main()
