"""The coefficients of spike compensation, and their derivatives."""

import decimal
import fractions

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import transforms

_MOMENTA = (0.0, 1e-30, 1e-3, 0.3, 0.5, 0.9, 0.9992, 1 - 2.0**-20, 1.0)
_DELAYS = (0, 1, 2, 3, 7, 66)


def _exact(momentum, delay):
  """a, b and their derivatives by the momentum, for whole delays."""
  m = fractions.Fraction(float(momentum))
  power = lambda k: m**k if k >= 0 else fractions.Fraction(0)
  delay = int(delay)
  a, slope_a = m**delay, delay * power(delay - 1)
  b = sum((m**k for k in range(delay)), start=fractions.Fraction(0))
  slope_b = sum(k * power(k - 1) for k in range(delay))
  return [float(x) for x in (a, b, slope_a, slope_b)]


def _by_delay(momentum, delay):
  """The derivatives of a and b by the delay, for 0 < m < 1."""
  with decimal.localcontext(prec=60):
    m, d = decimal.Decimal(float(momentum)), decimal.Decimal(float(delay))
    slope = m.ln() * (d * m.ln()).exp()
    return float(slope), float(-slope / (1 - m))


def _derivatives(argnum, momentum, delay, dtype):
  """The derivatives of a and b, as JAX finds them in both modes."""
  m, d = jnp.asarray(momentum, dtype), jnp.asarray(delay, dtype)
  forward = jax.jacfwd(transforms.spike_coefficients, argnum)(m, d)
  backward = jax.jacrev(transforms.spike_coefficients, argnum)(m, d)
  np.testing.assert_allclose(forward, backward, rtol=10 * jnp.finfo(dtype).eps)
  return backward


class SpikeCoefficientsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("float64", jnp.float64, 1e-14), ("float32", jnp.float32, 1e-6)
  )
  def test_they_and_their_derivatives_are_exact(self, dtype, rtol):
    """Near both ends, and at them."""
    m, d = np.meshgrid(np.asarray(_MOMENTA, dtype), _DELAYS)
    m, d = m.ravel(), d.ravel()
    exact = np.array([_exact(*pair) for pair in zip(m, d, strict=True)]).T
    with jax.enable_x64(dtype == jnp.float64):
      momenta, delays = jnp.asarray(m), jnp.asarray(d, dtype)
      got = jax.jit(transforms.spike_coefficients)(momenta, delays)
      slopes = jax.jit(jax.vmap(jax.jacfwd(transforms.spike_coefficients)))(
        momenta, delays
      )
    (a, b), (slope_a, slope_b) = got, slopes
    np.testing.assert_allclose((a, slope_a), exact[::2], rtol=rtol, atol=1e-37)
    np.testing.assert_allclose((b, slope_b), exact[1::2], rtol=rtol, atol=rtol)
    known = transforms.spike_coefficients(m, d)
    np.testing.assert_allclose(known, exact[:2], rtol=1e-14, atol=1e-300)

  @parameterized.named_parameters(
    ("fraction", 0.5), ("between", 1.5), ("many", 12.25)
  )
  def test_derivatives_of_real_delays_at_a_momentum_of_one(self, delay):
    with jax.enable_x64(True):
      a, b = _derivatives(0, 1.0, delay, jnp.float64)
    np.testing.assert_allclose(a, delay, rtol=1e-14)
    np.testing.assert_allclose(b, delay * (delay - 1) / 2, rtol=1e-14)

  @parameterized.named_parameters(
    ("fraction", 0.5, np.inf, -np.inf), ("between", 1.5, 0.0, 1.0)
  )
  def test_derivatives_of_real_delays_without_momentum(self, delay, a, b):
    got = jax.jacfwd(transforms.spike_coefficients)(0.0, delay)
    np.testing.assert_array_equal(got, (a, b))

  @parameterized.named_parameters(
    ("none", 0.0), ("fraction", 0.25), ("some", 3.0), ("many", 66.0)
  )
  def test_derivatives_by_the_delay(self, delay):
    for momentum in (1e-3, 0.3, 0.9, 1 - 2.0**-20):
      got = _derivatives(1, momentum, delay, jnp.float32)
      exact = _by_delay(np.float32(momentum), np.float32(delay))
      np.testing.assert_allclose(got, exact, rtol=2e-6, atol=1e-37)
    got = _derivatives(1, 1.0, delay, jnp.float32)
    np.testing.assert_allclose(got, (0, 1), rtol=1e-6)
    got = _derivatives(1, 0.0, delay, jnp.float32)
    np.testing.assert_array_equal(got, (0, 0))

  def test_known_and_traced_numbers_of_any_kind(self):
    got = jax.jit(transforms.spike_coefficients)(jnp.bfloat16(0.5), 3)
    for x, y in zip(got, (0.125, 1.75), strict=True):
      self.assertEqual((x.dtype, float(x)), (jnp.float32, y))


class LinkTest(parameterized.TestCase):
  """Through three updates with gradients of one, against differences."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  def _spike(self, momentum, delay):
    link = pbp.spike_compensation(momentum, delay)
    state = link.init(jnp.zeros(()))
    total = 0.0
    for _ in range(3):
      update, state = link.update(jnp.ones(()), state)
      total += update
    return total

  def _msnag(self, momentum, delay):
    link = optax.chain(optax.trace(0.5), pbp.msnag(delay, momentum, 0.1))
    params = jnp.zeros(())
    _, state = link.update(jnp.ones(()), link.init(params))
    return pbp.predict_params(state, params)

  @parameterized.named_parameters(
    ("spike_without_momentum", "_spike", 0.0, 3.0),
    ("spike_of_one_update_without_momentum", "_spike", 0.0, 1.0),
    ("spike_at_one", "_spike", 1.0, 3.0),
    ("spike_of_a_fraction_at_one", "_spike", 1.0, 0.5),
    ("msnag_without_momentum", "_msnag", 0.0, 3.0),
    ("msnag_at_one", "_msnag", 1.0, 3.0),
  )
  def test_gradient_by_momentum_at_the_ends(self, name, momentum, delay):
    f = lambda m: getattr(self, name)(m, delay)
    step = 1e-4 * (1 if momentum == 0 else -1)
    values = [float(f(momentum + k * step)) for k in range(4)]
    slope = np.dot((-11, 18, -9, 2), values) / (6 * step)  # of third order
    np.testing.assert_allclose(jax.grad(f)(momentum), slope, rtol=1e-8)

  def test_gradients_at_the_ends_are_those_worked_out_by_hand(self):
    slope = jax.grad(self._spike)
    np.testing.assert_allclose([slope(0.0, 3.0), slope(1.0, 3.0)], [3, 31])


if __name__ == "__main__":
  absltest.main()
