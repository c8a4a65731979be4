"""Tests of the closed forms, against simulations and known answers."""

import json
import pathlib

from absl.testing import absltest, parameterized
import jax
import numpy as np

from pbp_jax import quadratic

_KNOWN_ANSWERS = pathlib.Path(__file__).parent / "known_answers"

_DELAYS = {f"delay_{delay}": delay for delay in (0, 1, 4)}

# Half-lives at condition number 1000 for delays 1 and 4. Upper bounds that an
# independent search has reached.
_HALF_LIVES = {
  "none": (694, 1997),
  "scd": (115.2, 356.8),
  "lwpd": (107.4, 331.7),
  "sc2d": (43.5, 132.3),
  "lwp2d": (43.5, 133.0),
  "lwpvd_scd": (43.5, 132.7),
  "lwpwd_scd": (37.9, 109.5),
}


def _setting(name, momentum, delay):
  """a, b, velocity horizon, weight horizon, error feedback, by their names."""
  spike = lambda d: (momentum**d, (1 - momentum**d) / (1 - momentum))
  return {
    "none": (1, 0, 0, 0, 0),
    "scd": (*spike(delay), 0, 0, 0),
    "sc2d": (*spike(2 * delay), 0, 0, 0),
    "lwpd": (1, 0, delay, 0, 0),
    "lwp2d": (1, 0, 2 * delay, 0, 0),
    "lwpvd_scd": (*spike(delay), delay, 0, 0),
    "lwpwd_scd": (*spike(delay), 0, delay, 0),
    "nesterov": (momentum, 1, 0, 0, 0),
    "error_feedback": (1, 0, 0, 0, 1),
    "all_at_once": (0.7, 0.6, 0.4, 1.3, 0),
  }[name]


def _method(name, delay):
  if name == "all_at_once":
    return quadratic.Coefficients(0.7, 0.6, 0.4, 1.3)
  return quadratic.named_method(name, delay)


class _DelayedDescent:
  """The recurrence itself, on one weight, with no polynomial in sight."""

  def __init__(self, setting, rate, momentum, delay):
    self.setting, self.rate = setting, rate
    self.momentum, self.delay = momentum, delay

  @property
  def size(self):
    return 2 * (self.delay + 1) + 2

  def step(self, state):
    """One update of a state [velocities, weights, update], newest first."""
    a, b, velocity_horizon, weight_horizon, feedback = self.setting
    depth = self.delay + 1
    velocities, weights = state[:depth], state[depth:-1]
    last_update = state[-1]
    seen = (
      weights[self.delay]
      - self.rate * velocity_horizon * velocities[self.delay]
      + weight_horizon * (weights[self.delay] - weights[self.delay + 1])
    )
    # Units in which the curvature is 1.
    velocity = self.momentum * velocities[0] + seen
    update = self.rate * (a * velocity + b * seen)
    weight = weights[0] - update - feedback * (update - last_update)
    return np.concatenate(
      [[velocity], velocities[:-1], [weight], weights[:-1], [update]]
    )

  def spectral_radius(self):
    jacobian = np.stack([self.step(row) for row in np.eye(self.size)], axis=1)
    return np.abs(np.linalg.eigvals(jacobian)).max()


class SpectralRadiusTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (f"{name}_{label}", name, delay)
    for name in (*quadratic.METHOD_NAMES, "all_at_once")
    for label, delay in _DELAYS.items()
  )
  def test_equals_that_of_the_simulated_recurrence(self, name, delay):
    rates, momenta = np.meshgrid([1e-3, 0.02, 0.3, 1.1], [0.1, 0.6, 0.95])
    with jax.enable_x64(True):
      radii = quadratic.spectral_radius(
        _method(name, delay), rates, momenta, delay
      )
    expected = [
      _DelayedDescent(_setting(name, m, delay), rate, m, delay)
      for rate, m in zip(rates.flat, momenta.flat, strict=True)
    ]
    np.testing.assert_allclose(
      np.ravel(radii), [run.spectral_radius() for run in expected], rtol=1e-8
    )

  @parameterized.named_parameters(
    ("plain", "none"),
    ("combined_velocity_form", "lwpvd_scd"),
    ("combined_weight_form", "lwpwd_scd"),
    ("error_feedback", "error_feedback"),
  )
  def test_is_the_growth_of_a_long_run(self, name):
    rate, momentum, delay, num_steps = 0.01, 0.7, 3, 4000
    run = _DelayedDescent(
      _setting(name, momentum, delay), rate, momentum, delay
    )
    state, log_norm = np.ones(run.size), 0.0
    for _ in range(num_steps):
      state = run.step(state)
      norm = np.linalg.norm(state)
      state, log_norm = state / norm, log_norm + np.log(norm)
    with jax.enable_x64(True):
      radius = quadratic.spectral_radius(
        _method(name, delay), rate, momentum, delay
      )
    # What the transient leaves behind is a constant over the steps.
    np.testing.assert_allclose(
      log_norm / num_steps, np.log(float(radius)), atol=5 / num_steps
    )

  def test_equals_the_known_answers(self):
    with jax.enable_x64(True):
      for case in _known_cases():
        rates, radii = np.transpose(case["spectral_radius_at_L"])
        with self.subTest(**_labels(case)):
          np.testing.assert_allclose(
            quadratic.spectral_radius(
              quadratic.named_method(case["method"], case["delay"]),
              rates,
              case["momentum"],
              case["delay"],
            ),
            radii,
            rtol=0,
            atol=1e-8,
          )

  def test_broadcasts_horizons_rates_and_momenta(self):
    horizons = np.linspace(0, 3, 4)
    with jax.enable_x64(True):
      table = quadratic.spectral_radius(
        quadratic.Method(velocity_horizon=horizons[:, None]),
        np.array([[0.1, 0.2]]),
        0.5,
        delay=2,
      )
      one = quadratic.spectral_radius(
        quadratic.Method(velocity_horizon=3.0), 0.2, 0.5, delay=2
      )
    self.assertEqual(table.shape, (4, 2))
    np.testing.assert_allclose(table[3, 1], one, rtol=1e-14)

  @parameterized.named_parameters(
    ("fraction", 1.5), ("negative", -1), ("bool", True)
  )
  def test_refuses_a_delay_that_is_no_count(self, delay):
    with self.assertRaisesRegex(ValueError, "delay must be an int >= 0"):
      quadratic.spectral_radius(quadratic.Method(), 0.1, 0.5, delay)


class MethodTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("no_momentum", 0.0, 2.5, 0.0, 1.0),
    ("no_momentum_no_delay", 0.0, 0.0, 1.0, 0.0),
    ("middle", 0.5, 2.0, 0.25, 1.5),
    ("no_damping", 1.0, 2.5, 1.0, 2.5),
  )
  def test_spike_compensation_has_its_coefficients(self, momentum, d, a, b):
    result = quadratic.Method(spike_delay=d).coefficients(momentum)
    np.testing.assert_allclose(result[:2], (a, b), rtol=1e-6)

  def test_spike_compensation_keeps_its_precision_near_no_damping(self):
    momentum, d = np.float32(1 - 2.0**-20), 60
    exact = sum(float(momentum) ** k for k in range(d))
    result = quadratic.Method(spike_delay=d).coefficients(momentum)
    np.testing.assert_allclose(result.b, exact, rtol=5e-7)

  def test_nesterov_is_spike_compensation_of_one_update(self):
    momentum = np.linspace(0, 0.99, 5)
    with jax.enable_x64(True):
      a, b, *_ = quadratic.named_method("nesterov", 7).coefficients(momentum)
    np.testing.assert_allclose(a, momentum, atol=1e-15)
    np.testing.assert_allclose(b, np.ones(5))

  @parameterized.named_parameters(
    (name, name) for name in quadratic.METHOD_NAMES if name != "lwpwd_scd"
  )
  def test_effective_horizon_is_all_there_is_to_a_method(self, name):
    delay, momentum = 3, np.array([0.2, 0.9])
    method = quadratic.named_method(name, delay)
    with jax.enable_x64(True):
      horizon = quadratic.effective_horizon(method, momentum)
      plain = quadratic.Method(velocity_horizon=horizon)
      for rate in (1e-3, 0.1):
        np.testing.assert_allclose(
          quadratic.spectral_radius(method, rate, momentum, delay),
          quadratic.spectral_radius(plain, rate, momentum, delay),
          rtol=1e-10,
        )

  @parameterized.named_parameters(
    ("none", "none", 0.0),
    ("error_feedback", "error_feedback", 1.0),
    ("nesterov", "nesterov", 0.5),
    ("scd", "scd", 0.5 + 0.25 + 0.125),
    ("lwpd", "lwpd", 3.0),
    ("lwpvd_scd", "lwpvd_scd", 3.875),
  )
  def test_effective_horizon_has_its_value(self, name, expected):
    method = quadratic.named_method(name, delay=3)
    self.assertAlmostEqual(
      float(quadratic.effective_horizon(method, 0.5)), expected, places=6
    )

  def test_effective_horizon_refuses_what_has_none(self):
    with self.assertRaisesRegex(ValueError, "effective horizon"):
      quadratic.effective_horizon(quadratic.named_method("lwpwd_scd", 2), 0.5)

  def test_refuses_an_unknown_name(self):
    with self.assertRaisesRegex(ValueError, "'scdd'"):
      quadratic.named_method("scdd", 1)

  def test_refuses_a_negative_delay(self):
    with self.assertRaisesRegex(ValueError, "delay must be >= 0, got -1"):
      quadratic.named_method("scd", -1)


class ImpulseResponseTest(parameterized.TestCase):
  def test_is_that_of_the_simulated_recurrence(self):
    momentum, delay, num_steps = 0.8, 3, 12
    velocity, updates = 0.0, []
    a, b, *_ = _setting("scd", momentum, delay)
    for step in range(num_steps):
      gradient = float(step == delay)
      velocity = momentum * velocity + gradient
      updates.append(a * velocity + b * gradient)
    np.testing.assert_allclose(
      quadratic.impulse_response(
        quadratic.named_method("scd", delay), momentum, delay, num_steps
      ),
      updates,
      rtol=1e-5,
    )

  def test_spike_compensation_catches_up_with_the_undelayed_curve(self):
    delay, num_steps = 4, 30
    curves = [
      np.cumsum(quadratic.impulse_response(method, 0.9, d, num_steps))
      for method, d in (
        (quadratic.Method(), 0),
        (quadratic.named_method("scd", delay), delay),
      )
    ]
    np.testing.assert_allclose(curves[0][delay:], curves[1][delay:], rtol=1e-5)
    np.testing.assert_array_equal(curves[1][:delay], np.zeros(delay))


class HalfLifeTest(absltest.TestCase):
  def test_error_has_halved_after_it(self):
    with jax.enable_x64(True):
      np.testing.assert_allclose(0.97 ** quadratic.half_life(0.97), 0.5)

  def test_is_infinite_without_convergence(self):
    self.assertEqual(float(quadratic.half_life(1.0)), np.inf)


class StabilityLimitTest(parameterized.TestCase):
  def test_equals_the_known_answers(self):
    with jax.enable_x64(True):
      for case in _known_cases():
        with self.subTest(**_labels(case)):
          limit = quadratic.stability_limit(
            quadratic.named_method(case["method"], case["delay"]),
            case["momentum"],
            case["delay"],
          )
          self.assertAlmostEqual(
            float(limit), case["stability_limit"], delta=1e-4
          )

  @parameterized.named_parameters(*_DELAYS.items())
  def test_of_delayed_sgd_has_a_closed_form(self, delay):
    with jax.enable_x64(True):
      limit = quadratic.stability_limit(quadratic.Method(), 0.0, delay)
    np.testing.assert_allclose(
      limit, 2 * np.sin(np.pi / (4 * delay + 2)), rtol=1e-12
    )

  @parameterized.named_parameters(
    (name, name) for name in (*quadratic.METHOD_NAMES, "all_at_once")
  )
  def test_separates_runs_that_shrink_from_runs_that_grow(self, name):
    momentum, delay = 0.8, 2
    with jax.enable_x64(True):
      limit = float(
        quadratic.stability_limit(_method(name, delay), momentum, delay)
      )
    radius = lambda rate: _DelayedDescent(
      _setting(name, momentum, delay), rate, momentum, delay
    ).spectral_radius()
    below = [radius(limit * fraction) for fraction in np.linspace(1e-3, 1, 100)]
    self.assertLess(max(below[:-1]), 1)
    self.assertAlmostEqual(below[-1], 1, delta=1e-9)
    self.assertGreater(radius(limit * 1.001), 1)

  def test_is_found_at_a_momentum_close_to_one(self):
    momentum, delay = 1 - 1e-5, 4
    with jax.enable_x64(True):
      method = quadratic.Method()
      limit = quadratic.stability_limit(method, momentum, delay)
      around = quadratic.spectral_radius(
        method, limit * np.array([0.999, 1.001]), momentum, delay
      )
    self.assertLess(float(around[0]), 1)
    self.assertGreater(float(around[1]), 1)

  def test_is_zero_without_damping(self):
    with jax.enable_x64(True):
      limits = quadratic.stability_limit(
        quadratic.Method(), np.array([0.5, 1.0]), delay=0
      )
    np.testing.assert_allclose(limits, [3.0, 0.0], rtol=1e-12)

  def test_needs_float64(self):
    with self.assertRaisesRegex(ValueError, "enable_x64"):
      quadratic.stability_limit(quadratic.Method(), 0.5, 1)


class BestHyperparametersTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (f"{name}_delay_{delay}", name, delay, bound)
    for name, bounds in _HALF_LIVES.items()
    for delay, bound in zip((1, 4), bounds, strict=True)
  )
  def test_half_life_is_as_short_as_known(self, name, delay, bound):
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(
        quadratic.named_method(name, float(delay)), 1e3, delay
      )
    self.assertLess(float(best.half_life), 1.01 * bound)

  @parameterized.named_parameters(("ten", 10.0), ("thousand", 1e3))
  def test_without_delay_is_polyaks(self, condition_number):
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(
        quadratic.Method(), condition_number, delay=0
      )
    root = condition_number**0.5
    radius = (root - 1) / (root + 1)
    np.testing.assert_allclose(
      best.half_life, -np.log(2) / np.log(radius), rtol=1e-4
    )
    np.testing.assert_allclose(best.momentum, radius**2, rtol=1e-4)
    np.testing.assert_allclose(
      best.learning_rate, (2 * root / (root + 1)) ** 2, rtol=1e-3
    )

  def test_without_delay_nesterovs_is_the_known_optimum(self):
    # 1 - 2 / sqrt(3 kappa + 1): Lessard, Recht and Packard, 2016, as recalled.
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(
        quadratic.named_method("nesterov", 0), 1e3, delay=0
      )
    radius = 1 - 2 / (3 * 1e3 + 1) ** 0.5
    np.testing.assert_allclose(
      best.half_life, -np.log(2) / np.log(radius), rtol=1e-4
    )

  def test_half_life_is_that_of_the_slowest_simulated_direction(self):
    name, delay, condition_number = "lwpwd_scd", 2, 50.0
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(
        quadratic.named_method(name, float(delay)), condition_number, delay
      )
    momentum = float(best.momentum)
    worst = max(
      _DelayedDescent(
        _setting(name, momentum, delay),
        float(best.learning_rate) / curvature,
        momentum,
        delay,
      ).spectral_radius()
      for curvature in np.geomspace(1, condition_number, 100)
    )
    np.testing.assert_allclose(
      best.half_life, -np.log(2) / np.log(worst), rtol=1e-4
    )

  def test_nothing_tried_at_random_is_better(self):
    rng = np.random.default_rng(0)
    delay, condition_number = 2, 100.0
    method = quadratic.named_method("lwpvd_scd", float(delay))
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(method, condition_number, delay)
      anywhere = quadratic.worst_radius(
        method,
        np.exp(rng.uniform(-9, 1, 2000)),
        1 - np.exp(rng.uniform(-7, 0, 2000)),
        condition_number,
        delay,
        num_curvatures=16,
      )
      nearby = quadratic.worst_radius(
        method,
        best.learning_rate * np.exp(rng.normal(0, 0.03, 2000)),
        1 - (1 - best.momentum) * np.exp(rng.normal(0, 0.03, 2000)),
        condition_number,
        delay,
        num_curvatures=16,
      )
      shortest = quadratic.half_life(np.append(anywhere, nearby).min())
    self.assertLess(float(best.half_life), float(shortest) * (1 + 1e-4))

  @parameterized.named_parameters(("delay_1", 1), ("delay_4", 4))
  def test_best_prediction_horizon_is_near_twice_the_delay(self, delay):
    horizons = delay * np.array([1, 1.5, 1.75, 2, 2.25, 2.5, 3])
    with jax.enable_x64(True):
      best = jax.vmap(
        lambda horizon: quadratic.best_hyperparameters(
          quadratic.Method(velocity_horizon=horizon), 1e3, delay
        )
      )(horizons)
    self.assertBetween(horizons[np.argmin(best.half_life)] / delay, 1.75, 2.25)

  def test_plain_delay_makes_momentum_useless(self):
    with jax.enable_x64(True):
      best = quadratic.best_hyperparameters(quadratic.Method(), 1e3, 4)
    self.assertLess(float(best.momentum), 1e-3)

  def test_refuses_a_condition_number_below_one(self):
    with (
      jax.enable_x64(True),
      self.assertRaisesRegex(ValueError, "condition_number must be >= 1"),
    ):
      quadratic.best_hyperparameters(quadratic.Method(), 0.5, 1)

  def test_refuses_fields_that_are_arrays(self):
    method = quadratic.Method(velocity_horizon=np.ones(2))
    with (
      jax.enable_x64(True),
      self.assertRaisesRegex(ValueError, "velocity_horizon must be a scalar"),
    ):
      quadratic.best_hyperparameters(method, 10.0, 1)

  def test_needs_float64(self):
    with self.assertRaisesRegex(ValueError, "enable_x64"):
      quadratic.best_hyperparameters(quadratic.Method(), 1e3, 1)


def _known_cases():
  text = (_KNOWN_ANSWERS / "quadratic.json").read_text()
  return json.loads(text)["cases"]


def _labels(case):
  return {name: case[name] for name in ("method", "momentum", "delay")}


if __name__ == "__main__":
  absltest.main()
