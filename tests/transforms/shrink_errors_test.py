"""The error that shrinks on its way, against the link on gradients."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_FACTOR = 0.6


def _branched_stages():
  """A pipeline in which a tuple, a key and a state travel along."""
  weights = {"w": 0.3 * jnp.arange(9.0).reshape(3, 3) - 1, "b": jnp.ones(3)}
  dense = chain.dense_tanh
  noisy = lambda p, x, key: (
    dense(p, x) * (1.0 if key is None else jax.random.uniform(key) + 0.5)
  )
  counting = lambda p, count, x: (
    (x[0], dense(p, x[1]) / (1 + count)),
    count + 1,
  )
  stage = lambda apply, **options: pbp.Stage(
    init=lambda key, x: weights, apply=apply, **options
  )
  return (
    stage(noisy, stochastic=True),
    *pbp.as_stages([lambda x: (x, x)]),
    stage(counting, init_state=lambda key, x: jnp.zeros(())),
    *pbp.as_stages([lambda x: x[0] + x[1]]),
    stage(dense),
    *pbp.as_stages([lambda x: x]),
  )


def _run(stages, optimizer, schedule, backward):
  simulator = pbp.Simulator(
    stages, chain.squared_error, optimizer, schedule, backward=backward
  )
  inputs = jax.random.normal(jax.random.key(2), (20, 1, 3))
  state = simulator.init(jax.random.key(0), inputs[0])
  state, metrics = simulator.run(state, inputs, jnp.cos(inputs))
  return metrics["loss"], state.params


class ShrinkErrorsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("saved", "inconsistent", "saved"),
    ("recompute", "inconsistent", "recompute"),
    ("stashed", "stashed", "saved"),
  )
  def test_it_is_the_link_for_a_linear_optimizer(self, consistency, backward):
    self.enter_context(jax.enable_x64(True))
    stages = _branched_stages()
    schedule = pbp.schedules.pipelined_backprop(len(stages))
    schedule = schedule.with_consistency(consistency)
    sgdm = optax.sgd(0.05, 0.9)
    losses, params = _run(
      pbp.shrink_errors(stages, _FACTOR), sgdm, schedule, backward
    )
    link = optax.chain(pbp.shrink_gradients(_FACTOR), sgdm)
    expected_losses, expected = _run(stages, link, schedule, backward)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-11)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
      params,
      expected,
    )

  def test_factor_of_one_changes_no_bit(self):
    schedule = pbp.schedules.pipelined_backprop(6)
    sgdm = optax.sgd(0.05, 0.9)
    got = _run(
      pbp.shrink_errors(_branched_stages(), 1.0), sgdm, schedule, "saved"
    )
    expected = _run(_branched_stages(), sgdm, schedule, "saved")
    jax.tree.map(np.testing.assert_array_equal, got, expected)

  def test_integers_pass_untouched(self):
    (stage,) = pbp.shrink_errors([lambda x: x[0] * x[1]], 0.5)
    gradient = jax.grad(lambda x: stage.apply({}, x), allow_int=True)((2.0, 3))
    self.assertEqual(gradient[0], 1.5)
    jaxpr = jax.make_jaxpr(lambda x: stage.apply({}, x))((2.0, 3)).jaxpr
    wrapped = [e for e in jaxpr.eqns if "custom_vjp" in e.primitive.name]
    self.assertLen(wrapped, 1)

  def test_factor_may_be_traced(self):
    (stage,) = pbp.shrink_errors([jnp.sin], 0.25)
    expected = jax.grad(lambda x: stage.apply({}, x))(0.5)

    def slope(factor):
      (stage,) = pbp.shrink_errors([jnp.sin], factor)
      return jax.grad(lambda x: stage.apply({}, x))(0.5)

    self.assertEqual(jax.jit(slope)(0.25), expected)

  def test_error_keeps_its_dtype(self):
    (stage,) = pbp.shrink_errors([jnp.sin], 0.25)
    x = jnp.ones(2, jnp.bfloat16)
    gradient = jax.grad(lambda x: stage.apply({}, x).sum())(x)
    self.assertEqual(gradient.dtype, jnp.bfloat16)


if __name__ == "__main__":
  absltest.main()
