import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import pbp_jax as pbp
from pbp_jax import wires


class IsolateTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("numbers", [0.1, -3.0, 1e-30, 7e37]),
    ("infinite_first", [np.inf, 0.3]),
    ("not_a_number_first", [np.nan, 0.3]),
    ("largest_first", [3.4e38, 0.3]),
  )
  def test_value_is_the_same_bit_for_bit(self, values):
    x = jnp.array(values, jnp.float32)
    np.testing.assert_array_equal(jax.jit(wires.isolate)(x), x)

  @parameterized.named_parameters(
    ("float32", jnp.float32), ("bfloat16", jnp.bfloat16)
  )
  def test_gradient_is_the_same_bit_for_bit(self, dtype):
    x = jnp.array([0.3, -0.7, 2.0], dtype)
    function = lambda x: jnp.sin(x).sum()
    isolated = lambda x: function(wires.isolate(x))
    got = jax.jit(jax.grad(isolated))(x)
    self.assertEqual(got.dtype, dtype)
    np.testing.assert_array_equal(got, jax.jit(jax.grad(function))(x))

  def test_type_is_kept(self):
    self.assertEqual(wires.isolate(jnp.ones(2, jnp.bfloat16)).dtype, "bfloat16")

  def test_leaves_without_fractions_pass(self):
    tree = {"i": jnp.arange(3), "empty": jnp.zeros((0, 2))}
    isolated = wires.isolate(tree)
    self.assertIs(isolated["i"], tree["i"])
    self.assertIs(isolated["empty"], tree["empty"])

  def test_program_of_a_residual_chain_grows_linearly(self):
    def num_operations(num_blocks, wire):
      def loss(weights, x):
        for w in weights:
          centred = x - x.mean()
          normed = centred * jax.lax.rsqrt((centred**2).mean() + 1e-6)
          x = wire(x + jnp.maximum(normed, 0) @ w)
        return jnp.sum(x**2)

      shapes = (
        jax.ShapeDtypeStruct((num_blocks, 8, 8), jnp.float32),
        jax.ShapeDtypeStruct((1, 8), jnp.float32),
      )
      compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
      return len(re.findall(r"^\s+\S+ = ", compiled.as_text(), re.M))

    growth = {
      wire.__name__: num_operations(32, wire) / num_operations(16, wire)
      for wire in (wires.isolate, jax.lax.optimization_barrier)
    }
    self.assertLess(growth["isolate"], 2.3)
    # If this fails, XLA has learned it, and this module is not needed.
    self.assertGreater(growth["optimization_barrier"], 3)


class IsolateStagesTest(parameterized.TestCase):
  def test_params_and_outputs_are_the_same(self):
    stages = pbp.models.residual_mlp(num_stages=4, width=8)
    x = jnp.ones((1, 8, 8, 1))
    outputs = []
    for pipeline in (stages, wires.isolate_stages(stages)):
      y = x
      for s, stage in enumerate(pipeline):
        params = stage.init(jax.random.key(s), y)
        y = stage.apply(params, y)
      outputs.append(y)
    np.testing.assert_array_equal(*outputs)

  def test_state_and_key_go_through(self):
    stage = pbp.Stage(
      init=lambda key, x: {},
      apply=lambda params, state, x, key: (x + key, state + 1),
      stochastic=True,
      init_state=lambda key, x: 0,
    )
    (isolated,) = wires.isolate_stages((stage,))
    y, state = isolated({}, 5, jnp.ones(()), jnp.array(2.0))
    self.assertEqual((float(y), state), (3.0, 6))


if __name__ == "__main__":
  absltest.main()
