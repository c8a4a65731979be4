"""Weights and optimizer states of other groups of the same stages."""

from absl.testing import absltest
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax.devices import regrouping


class RenestTest(absltest.TestCase):
  def test_other_weights_are_refused(self):
    with self.assertRaisesRegex(
      ValueError, r"gathered\.params must be.*float32\[2\].*got.*float32\[3\]"
    ):
      regrouping.renest((np.ones(3, "f"),), (np.ones(2, "f"),), "params")


class OptimizerStateTest(absltest.TestCase):
  def test_what_the_grouping_says_is_new_and_the_rest_the_runs(self):
    """Horizons are one a leaf where some are masked; a ring is as the delay."""
    fine = ({"w": jnp.ones(2)}, {"w": jnp.ones(3), "b": jnp.ones(1)})
    coarse = (fine,)

    def optimizer(delay):
      return optax.chain(
        optax.inject_hyperparams(optax.adam)(0.1),
        pbp.delay_gradients(int(delay[0])),
        optax.masked(
          pbp.linear_weight_prediction(delay, "weight"),
          lambda params: jax.tree.map(lambda leaf: leaf.size > 1, params),
        ),
      )

    before = optimizer([2.0, 0.0])
    after = optimizer([1.0])
    state = before.init(fine)
    for _ in range(3):
      _, state = before.update(fine, state, fine)
    got = regrouping.regroup_opt_state(
      state, before.init(fine), after.init(coarse)
    )
    adam, delayed, prediction = (
      got[0].inner_state[0],
      got[1],
      got[2].inner_state,
    )
    ran = state[0].inner_state[0]
    self.assertEqual((got[0].count, adam.count, delayed.count), (3, 3, 3))
    chex.assert_trees_all_equal(adam.mu, (ran.mu,))
    self.assertEqual(prediction.horizon[0][0]["w"], 1.0)
    self.assertEqual(prediction.horizon[0][1]["b"], optax.MaskedNode())
    chex.assert_trees_all_equal(
      prediction.last_update, (state[2].inner_state.last_update,)
    )
    self.assertEqual(delayed.history[0][1]["w"].shape, (2, 3))
    np.testing.assert_array_equal(delayed.history[0][1]["w"], 0)

  def test_another_optimizer_is_refused(self):
    state = optax.sgd(0.1, momentum=0.9).init(jnp.ones(2))
    with self.assertRaisesRegex(ValueError, "numbers only; .* 1 .* 1 .* 3"):
      regrouping.regroup_opt_state(
        state, state, optax.adam(0.1).init(jnp.ones(2))
      )


if __name__ == "__main__":
  absltest.main()
