"""`predict_params` with what a user may hand it."""

from absl.testing import absltest, parameterized
from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp


def _optimizer():
  prediction = pbp.linear_weight_prediction(2.0, form="weight")
  return optax.chain(optax.sgd(0.5), prediction)


class PredictParamsTest(parameterized.TestCase):
  def test_finds_a_prediction_inside_an_nnx_optimizer(self):
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, _optimizer(), wrt=nnx.Param)
    gradients = nnx.grad(lambda net: net(jnp.ones((1, 2))).sum())(net)
    optimizer.update(net, gradients)
    params = nnx.state(net, nnx.Param)
    view = pbp.predict_params(optimizer, params)
    same = pbp.predict_params(optimizer.opt_state, params)
    np.testing.assert_array_equal(
      view["kernel"][...], params["kernel"][...] - 2 * 0.5
    )
    np.testing.assert_array_equal(view["kernel"][...], same["kernel"][...])

  @parameterized.named_parameters(
    ("its_optimizer", lambda tx, params: (tx, params), "not the optimizer"),
    ("its_init", lambda tx, params: (tx.init, params), "not the optimizer"),
    (
      "them_in_the_other_order",
      lambda tx, params: (params, tx.init(params)),
      "the other order",
    ),
  )
  def test_refuses(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      pbp.predict_params(*arguments(_optimizer(), {"w": jnp.ones(2)}))

  def test_a_state_without_prediction_gives_the_very_weights(self):
    params = {"w": jnp.ones(2)}
    state = optax.adam(0.1).init(params)
    self.assertIs(pbp.predict_params(state, params), params)


if __name__ == "__main__":
  absltest.main()
