"""What XLA makes of a step of every arm, read off the compiled program.

No timing: a slow machine says nothing here, an XLA that copies rings does.
"""

import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from experiments import replicas
import pbp_jax as pbp
from tests import chain, xla

_WIDTH, _STAGES, _SLOTS = 48, 2, 160
_READ = re.compile(rf" dynamic-slice\(.*dynamic_slice_sizes={{1,{_WIDTH}")


def _arm(name, num_stages=_STAGES):
  """An arm that is delayed by the same in every stage."""
  return pbp.presets.make_arm(
    name,
    num_stages,
    learning_rate=0.01,
    momentum=0.9,
    num_updates=100,
    schedule=pbp.schedules.uniform_delay(num_stages, _SLOTS - 1),
  )


def _families():
  """One arm of each family."""
  names = [
    name for name in pbp.presets.list_arms() if name.split("+")[0] == "pb"
  ]
  arms = map(_arm, [*names, "pb+recompute"])
  return {arm.family: arm for arm in arms}


def _compiled(
  arm, options=xla.AS_ELSEWHERE, dtype=jnp.float32, history_dtype=None
):
  """A run of as many stages as the arm's schedule has, with `dtype` weights."""
  weights = {"w": jnp.eye(_WIDTH, dtype=dtype), "b": jnp.zeros(_WIDTH, dtype)}
  simulator = pbp.Simulator(
    [chain.given(weights)] * len(arm.schedule.max_lag),
    chain.squared_error,
    arm.optimizer,
    arm.schedule,
    backward=arm.backward,
    history_dtype=history_dtype,
  )
  data = jnp.zeros((2, 4, 1, _WIDTH), dtype)
  state = jax.eval_shape(simulator.init, jax.random.key(0), data[0, 0])
  run = jax.jit(simulator.run, donate_argnums=0)
  return run.lower(state, *data).compile(options)


class CompiledStepTest(parameterized.TestCase):
  @parameterized.named_parameters(_families().items())
  def test_no_ring_is_copied_and_nothing_leaves_the_device(self, arm):
    compiled = _compiled(arm)
    text = compiled.as_text()
    ring = rf"f32\[{_SLOTS},{_WIDTH},{_WIDTH}\]"
    self.assertRegex(text, ring)
    # A ring that the loop carries is copied by no one, once it is given away.
    self.assertEmpty(re.findall(rf"= {ring}\S* copy\(", text))
    self.assertLess(
      compiled.memory_analysis().temp_size_in_bytes,
      _SLOTS * _WIDTH**2 * 4 / 2,
    )
    # What is read from a ring is in memory before anything is done with it.
    reads = [c for c in text.split("\n\n") if _READ.search(c)]
    self.assertNotEmpty(reads)
    for computation in reads:
      self.assertNotRegex(computation, r" (add|multiply|dot|transpose)\(")
    for word in ("infeed", "outfeed", "send(", "recv(", "callback"):
      self.assertNotIn(word, text)

  @parameterized.product(
    name=["pb", "pb+lwpvd+scd"],
    dtypes=[
      (jnp.float32, jnp.bfloat16),
      (jnp.float32, jnp.float16),
      (jnp.float32, jnp.float8_e4m3fn),
      (jnp.bfloat16, None),
      (jnp.bfloat16, jnp.float32),
    ],
  )
  def test_no_ring_is_converted(self, name, dtypes):
    dtype, history_dtype = dtypes
    compiled = _compiled(_arm(name), dtype=dtype, history_dtype=history_dtype)
    shape = rf"\[{_SLOTS},{_WIDTH},{_WIDTH}\]"
    text = compiled.as_text()
    kept = jnp.dtype(history_dtype or dtype)
    has_bits = kept not in (jnp.float32, jnp.float16)
    # Floats become bits before the loop, and floats again after it.
    self.assertLen(set(re.findall(rf"\b[a-z]\w+{shape}", text)), 1 + has_bits)
    self.assertEmpty(re.findall(rf"= \w+{shape}\S* convert\(", text))
    self.assertLen(
      re.findall(rf"= \w+{shape}\S* bitcast-convert\(", text),
      2 * _STAGES * has_bits,
    )
    rings = _STAGES * _SLOTS * _WIDTH**2 * kept.itemsize
    self.assertLess(
      compiled.memory_analysis().temp_size_in_bytes, (has_bits + 0.3) * rings
    )

  def test_programs_read_a_ring_when_its_stage_is_due(self):
    compiled = _compiled(
      _arm("pb", num_stages=4),
      xla.AS_ELSEWHERE | replicas.compiler_options("cpu"),
    )
    (step,) = (
      computation.splitlines()
      for computation in compiled.as_text().split("\n\n")
      if " call(" in computation and " dot(" in computation
    )
    reads, products = (
      [i for i, line in enumerate(step) if operation in line]
      for operation in (" call(", " dot(")
    )
    self.assertLen(reads, 4)
    for product, next_read in zip(products, reads[1:], strict=False):
      self.assertLess(product, next_read)


if __name__ == "__main__":
  absltest.main()
