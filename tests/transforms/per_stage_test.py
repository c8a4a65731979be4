"""Values that differ from stage to stage: what their errors say."""

import re

from absl.testing import absltest, parameterized
import jax
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

  @parameterized.named_parameters(
    ("half_open", {"below": 1.0}, 1.0, "real numbers >= 0 and < 1"),
    ("closed", {"maximum": 1.0}, 1.5, "real numbers >= 0 and <= 1"),
    ("open", {"above": 0.0, "below": 1.0}, 0.0, "real numbers > 0 and < 1"),
    ("positive", {"above": 0.0}, -1, "finite real numbers > 0"),
    ("infinite", {}, np.inf, "finite real numbers >= 0"),
    ("any", {"minimum": -np.inf}, np.nan, "finite real numbers"),
    ("one_of_many", {}, [1.0, -np.inf], "finite real numbers >= 0"),
    ("ints", {"minimum": 1, "whole": True}, 0, "ints >= 1"),
  )
  def test_bounds_are_those_that_the_error_tells(self, bounds, value, allowed):
    message = f"x must hold {allowed}, got {value!r}."
    with self.assertRaisesRegex(ValueError, f"^{re.escape(message)}$"):
      per_stage.check_numbers(value, "x", **bounds)

  @parameterized.named_parameters(
    ("one", {"below": 1.0}, 1 - 1e-9),
    ("zero", {"above": 0.0}, 1e-40),
    ("infinity", {}, 1e39),
  )
  def test_bounds_hold_in_working_precision(self, bounds, value):
    message = re.escape(f" in float32, got {value!r}.")
    with (
      jax.enable_x64(False),
      self.assertRaisesRegex(ValueError, message),
    ):
      per_stage.check_numbers(value, "x", **bounds)
    with jax.enable_x64(True):
      per_stage.check_numbers(value, "x", **bounds)

  def test_a_bound_may_be_reached(self):
    third = 1 / 3  # which rounds up
    per_stage.check_numbers([0.0, third], "x", maximum=third)

  @parameterized.named_parameters(
    ("list", [0.5, 0.5], "one finite real number >= 0"),
    ("bool", True, "one finite real number >= 0"),
  )
  def test_one_number_is_one(self, value, allowed):
    message = f"x must be {allowed}, got {value!r}."
    with self.assertRaisesRegex(ValueError, re.escape(message)):
      per_stage.check_number(value, "x")

  def test_a_schedule_of_one_rate_a_stage_is_refused(self):
    link = pbp.pipeoptim(1, lambda count: jnp.full(2, 0.1))
    with self.assertRaisesRegex(ValueError, r"learning_rate .* shape \(2,\)"):
      link.init((jnp.ones(2), jnp.ones(2)))

  def test_schedule_hint_for_one_number(self):
    decay = optax.constant_schedule(0.5)
    with self.assertRaisesRegex(ValueError, "through optax.inject_hyperparams"):
      pbp.gap_aware(0.9, 0.1, decay=decay)

  def test_hyperparameters_are_scaled_below_a_momentum_of_one(self):
    message = "momentum must hold real numbers >= 0 and < 1, got 1.0."
    with self.assertRaisesRegex(ValueError, message):
      pbp.scale_hyperparameters(0.1, 1.0, 128)


if __name__ == "__main__":
  absltest.main()
