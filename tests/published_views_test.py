"""What the arms of published views give their links."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_STAGES = 5


def _arm(name, **settings):
  settings = {"learning_rate": 0.05, "momentum": 0.9, **settings}
  return pbp.presets.make_arm(name, _STAGES, **settings)


def _trained(optimizer):
  """Weights and both views after given gradients."""
  params = [jnp.asarray(0.5)] * _STAGES
  state = optimizer.init(params)
  for t in range(4):
    gradients = [jnp.cos(t + s * 1.0) for s in range(_STAGES)]
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  return np.array(
    [
      params,
      pbp.predict_params(state, params),
      pbp.predict_params(state, params, "backward"),
    ]
  )


def _sgdm(*links, rate=0.05):
  return optax.chain(
    optax.trace(0.9), optax.scale_by_learning_rate(rate), *links
  )


class PublishedViewsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(
    ("pipelined_backprop", "pb+spectrain", 1, [8, 6, 4, 2, 0], range(5)),
    ("1f1b", "1f1b+spectrain", 1, [4, 3, 2, 1, 0], [0, 0, 1, 1, 2]),
    (
      "two_micro_batches_an_update",
      "pb+spectrain",
      2,
      [4, 3, 2, 1, 0],
      np.arange(5) / 2,
    ),
  )
  def test_spectrain_knows_when_a_micro_batch_leaves(
    self, name, interval, delay, lead
  ):
    got = _trained(_arm(name, update_interval=interval).optimizer)
    expected = _trained(_sgdm(pbp.spectrain(delay, 0.05, list(lead))))
    np.testing.assert_allclose(got, expected, rtol=1e-12)

  def test_msnag_rounds_delays_under_a_schedule(self):
    schedule = optax.linear_schedule(0.05, 0.01, 10)
    arm = _arm("pb+msnag", learning_rate=schedule, update_interval=4)
    np.testing.assert_array_equal(arm.schedule.delay, [2, 1.5, 1, 0.5, 0])
    expected = _sgdm(pbp.msnag([2, 2, 1, 0, 0], 0.9, schedule), rate=schedule)
    np.testing.assert_allclose(
      _trained(arm.optimizer), _trained(expected), rtol=1e-12
    )

  @parameterized.named_parameters(
    ("number", 0.05), ("schedule", lambda count: 0.05 / (count + 1))
  )
  def test_nesterov_gives_a_gradient_the_rate_that_it_has_in_sgdm(self, rate):
    """The first update is that of SGD with momentum."""
    params = [jnp.asarray(0.5)] * _STAGES
    optimizer = _arm("1f1b+nesterov", learning_rate=rate).optimizer
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates, -0.05 * np.array(params), rtol=1e-12)

  @parameterized.named_parameters(
    ("view", "pb+pipeoptim+lwpvd"),
    ("momentum", "pb+nesterov+scd"),
    ("rate", "pb+spectrain+staleness"),
  )
  def test_words_for_one_place_contradict_each_other(self, name):
    with self.assertRaisesRegex(ValueError, "must n"):
      _arm(name)


if __name__ == "__main__":
  absltest.main()
