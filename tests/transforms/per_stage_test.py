"""Values that differ from stage to stage: what their errors say."""

import re

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax.transforms import per_stage

_FLAX = {"params": {"Dense_0": {"bias": 0.0, "kernel": 0.0}, "Dense_1": 0.0}}


class PerStageTest(parameterized.TestCase):
  def test_a_number_a_layer_of_a_flax_model(self):
    delays = {"params": {"Dense_0": 4, "Dense_1": 2}}
    self.assertEqual(
      per_stage.broadcast(delays, _FLAX, "delay"),
      {"params": {"Dense_0": {"bias": 4, "kernel": 4}, "Dense_1": 2}},
    )

  @parameterized.named_parameters(
    (
      "a_list_for_a_dict",
      [4, 2],
      _FLAX,
      "got [4, 2], list of 2 ([0] [1]) where they have dict of 1 (['params']).",
    ),
    (
      "an_array_for_a_dict",
      np.ones(2),
      _FLAX,
      "got shape (2,), ndarray where they have dict of 1 (['params']).",
    ),
    (
      "a_dict_without_a_layer",
      {"params": {"Dense_0": 4}},
      _FLAX,
      "dict of 1 (['Dense_0']) where they have dict of 2 (['Dense_0']"
      " ['Dense_1']).",
    ),
    (
      "too_few",
      [4, 2],
      [0.0, 0.0, 0.0],
      "list of 2 ([0] [1]) where they have list of 3 ([0] [1] [2]).",
    ),
    (
      "a_list_for_an_array",
      [4, 2],
      jnp.ones(2),
      "list of 2 ([0] [1]) where they have ArrayImpl.",
    ),
  )
  def test_a_misfit_says_where(self, value, tree, message):
    with self.assertRaisesRegex(ValueError, re.escape(message)):
      per_stage.broadcast(value, tree, "delay")

  def test_a_schedule_is_sent_to_inject_hyperparams(self):
    momentum = optax.linear_schedule(0.5, 0.9, 10)
    with self.assertRaisesRegex(ValueError, "through optax.inject_hyperparams"):
      pbp.spike_compensation(momentum, delay=2)
    injected = optax.inject_hyperparams(pbp.spike_compensation)
    state = injected(momentum, delay=2).init(jnp.ones(2))
    self.assertAlmostEqual(state.hyperparams["momentum"], 0.5, places=6)


if __name__ == "__main__":
  absltest.main()
