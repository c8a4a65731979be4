"""The links on a quadratic: their own dynamics against known answers.

One update and view of a scalar quadratic, with the ring of the delay, is a
linear map of (weight, optimizer state, past views). Its Jacobian is taken from
the links as they are; nothing here knows a method's characteristic polynomial
but the tests that compare with one.
"""

import functools
import json
import pathlib

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_CASES = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "known_answers" / "quadratic.json"
  ).read_text()
)["cases"]


def _chain(core, *views, rate=1.0):
  return optax.chain(core, optax.scale_by_learning_rate(rate), *views)


def _velocity(horizon):
  return pbp.linear_weight_prediction(horizon, "velocity", 1.0)


def _weight(horizon):
  return pbp.linear_weight_prediction(horizon, "weight")


# With rate 1, so that L = rate x curvature is the curvature.
_METHODS = {
  "none": lambda m, d: _chain(optax.trace(m)),
  "scd": lambda m, d: _chain(pbp.spike_compensation(m, d)),
  "sc2d": lambda m, d: _chain(pbp.spike_compensation(m, 2 * d)),
  "lwpd": lambda m, d: _chain(optax.trace(m), _velocity(d)),
  "lwp2d": lambda m, d: _chain(optax.trace(m), _velocity(2 * d)),
  "lwpvd_scd": lambda m, d: _chain(pbp.spike_compensation(m, d), _velocity(d)),
  "lwpwd_scd": lambda m, d: _chain(pbp.spike_compensation(m, d), _weight(d)),
}


def _jacobians(optimizer, delay):
  """The Jacobian of a step at L = 0, and what an L of 1 adds to it."""
  params = jnp.asarray(0.5)
  state = optimizer.init(params)
  # Constants in the state, as horizons, are no part of the dynamics: the leaves
  # that a second update changes are.
  _, before = optimizer.update(jnp.asarray(0.25), state, params)
  _, after = optimizer.update(jnp.asarray(0.75), before, params)
  leaves, structure = jax.tree.flatten(before)
  moving = [
    i
    for i, (a, b) in enumerate(zip(leaves, jax.tree.leaves(after), strict=True))
    if jnp.issubdtype(a.dtype, jnp.floating) and (a != b).any()
  ]

  def step(x, curvature):
    now = list(leaves)
    for i, value in zip(moving, x[1:], strict=False):
      now[i] = value
    state = jax.tree.unflatten(structure, now)
    past = x[1 + len(moving) :]
    # The views of this version and the D before it; the oldest is met.
    views = jnp.append(past, pbp.predict_params(state, x[0]))
    updates, state = optimizer.update(curvature * views[0], state, x[0])
    now = jax.tree.leaves(state)
    return jnp.concatenate(
      [
        jnp.stack([x[0] + updates, *(now[i] for i in moving)]),
        views[1:],
      ]
    )

  start = jnp.zeros(1 + len(moving) + delay)
  without, full = (
    np.asarray(jax.jacfwd(step)(start, curvature)) for curvature in (0.0, 1.0)
  )
  return without, full - without


@functools.cache
def _known(index):
  case = _CASES[index]
  with jax.enable_x64(True):
    optimizer = _METHODS[case["method"]](case["momentum"], case["delay"])
    return _jacobians(optimizer, case["delay"])


def _radius(index, curvature):
  without, added = _known(index)
  curvature = np.asarray(curvature)[..., None, None]
  return np.abs(np.linalg.eigvals(without + curvature * added)).max(axis=-1)


def _named_cases():
  for index, case in enumerate(_CASES):
    momentum = str(case["momentum"]).replace(".", "_")
    yield (
      f"{case['method']}_momentum_{momentum}_delay_{case['delay']}",
      index,
    )


class KnownAnswersTest(parameterized.TestCase):
  @parameterized.named_parameters(*_named_cases())
  def test_spectral_radii_are_the_known_ones(self, index):
    curvatures, radii = np.transpose(_CASES[index]["spectral_radius_at_L"])
    np.testing.assert_allclose(
      _radius(index, curvatures), radii, rtol=0, atol=1e-8
    )

  @parameterized.named_parameters(*_named_cases())
  def test_stability_ends_at_the_known_limit(self, index):
    limit = _CASES[index]["stability_limit"]
    below = np.linspace(0, limit * (1 - 1e-4), 400)[1:]
    self.assertLess(_radius(index, below).max(), 1)
    self.assertGreater(_radius(index, limit * (1 + 1e-4)), 1)

  def test_every_method_is_there(self):
    self.assertEqual({case["method"] for case in _CASES}, set(_METHODS))


def _spike_horizon(momentum, delay):
  """The horizon that spike compensation reaches in effect."""
  return momentum * (1 - momentum**delay) / (1 - momentum)


_FAMILY = (
  ("none", _METHODS["none"], lambda m, d: 0.0),
  (
    "nesterov",
    lambda m, d: _chain(optax.trace(m, nesterov=True)),
    lambda m, d: m,
  ),
  ("spike_compensation", _METHODS["scd"], _spike_horizon),
  ("velocity_prediction", _METHODS["lwpd"], lambda m, d: d),
  (
    "velocity_prediction_and_spike_compensation",
    _METHODS["lwpvd_scd"],
    lambda m, d: d + _spike_horizon(m, d),
  ),
  (
    "weight_prediction_by_spikes_horizon",
    lambda m, d: _chain(optax.trace(m), _weight(_spike_horizon(m, d))),
    _spike_horizon,
  ),
  (
    "msnag",
    lambda m, d: _chain(optax.trace(m), pbp.msnag(d, m, 1.0)),
    _spike_horizon,
  ),
  (
    "spectrain",
    lambda m, d: _chain(optax.trace(m), pbp.spectrain(d, 1.0, 2.0)),
    lambda m, d: d + 2.0,
  ),
  (
    "pipeoptim",
    lambda m, d: _chain(optax.chain(optax.trace(m), pbp.pipeoptim(d, 1.0))),
    lambda m, d: d,
  ),
  (
    "xpipe",
    lambda m, d: _chain(optax.chain(optax.trace(m), pbp.xpipe(d, 0, 1.0))),
    lambda m, d: d,
  ),
)


class EffectiveHorizonTest(parameterized.TestCase):
  """`(z - 1)(z - m) z^D + c L ((1 + T) z - T)`: linear methods differ in T."""

  def _assert_has_horizon(self, optimizer, momentum, delay, horizon, scale=1.0):
    with jax.enable_x64(True):
      without, added = _jacobians(optimizer, delay)
    curvature = 0.03
    got = np.poly(without + curvature * added)
    expected = np.zeros(delay + 3)
    expected[:3] = [1, -1 - momentum, momentum]
    expected[-2:] += scale * curvature * np.array([1 + horizon, -horizon])
    # The rest of the state adds roots at zero.
    longest = max(len(got), len(expected))
    padded = [np.pad(p, (0, longest - len(p))) for p in (got, expected)]
    np.testing.assert_allclose(*padded, rtol=0, atol=1e-11)

  @parameterized.named_parameters(
    (f"{name}_delay_{delay}", method, horizon, delay)
    for name, method, horizon in _FAMILY
    for delay in (1, 4)
  )
  def test_a_method_has_its_effective_horizon(self, method, horizon, delay):
    momentum = 0.7
    self._assert_has_horizon(
      method(momentum, delay), momentum, delay, horizon(momentum, delay)
    )

  def test_asynchronous_nesterov_is_nesterov_with_discounted_gradients(self):
    self._assert_has_horizon(
      pbp.asynchronous_nesterov(1.0, 0.7), 0.7, 3, horizon=0.7, scale=0.3
    )


if __name__ == "__main__":
  absltest.main()
