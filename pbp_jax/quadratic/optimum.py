"""The best learning rate and momentum for a range of curvatures.

The package's docstring has the recurrence and the polynomial.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax import core
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from pbp_jax.quadratic import polynomials


class Optimum(NamedTuple):
  """The best hyperparameters for a condition number.

  Attributes:
    learning_rate: In units of one over the largest curvature, a scalar.
    momentum: Momentum, a scalar.
    half_life: Half-life of the slowest eigendirection, in updates, a scalar.
  """

  learning_rate: jax.Array
  momentum: jax.Array
  half_life: jax.Array


def worst_radius(
  method: polynomials.Method | polynomials.Coefficients,
  learning_rate: ArrayLike,
  momentum: ArrayLike,
  condition_number: ArrayLike,
  delay: int,
  num_curvatures: int = 512,
) -> jax.Array:
  """Returns the largest spectral radius over a range of curvatures.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields [...].
    learning_rate: In units of one over the largest curvature, [...].
    momentum: Momentum m, [...].
    condition_number: Largest over smallest curvature, >= 1, [...].
    delay: The gradient's delay D in updates, >= 0. Static.
    num_curvatures: How many curvatures to try, spaced evenly in their
      logarithm, both ends included. Static.

  Returns:
    The largest radius, [...].

  Example:
    >>> from pbp_jax import quadratic
    >>> with jax.enable_x64(True):
    ...   print(round(float(quadratic.worst_radius(
    ...       quadratic.Method(), learning_rate=1.0, momentum=0.0,
    ...       condition_number=10.0, delay=0)), 6))
    0.9
  """
  last = lambda x: jnp.asarray(x, float)[..., None]
  condition, fraction = jnp.broadcast_arrays(
    last(condition_number), jnp.linspace(0.0, 1.0, num_curvatures)
  )
  rate, curvature = jnp.broadcast_arrays(
    last(learning_rate), condition**-fraction
  )
  method = type(method)(*map(last, method))
  return polynomials.spectral_radius(
    method, rate * curvature, last(momentum), delay
  ).max(-1)


def best_hyperparameters(
  method: polynomials.Method, condition_number: ArrayLike, delay: int
) -> Optimum:
  r"""Returns the learning rate and momentum of the shortest half-life.

  Minimizes the largest spectral radius over the curvatures from
  :math:`\lambda_{max} / \kappa` to :math:`\lambda_{max}`, :math:`\kappa` being
  `condition_number`. At a fixed momentum, raising the rate speeds up the low
  end and slows down the high end, so a golden-section search over its logarithm
  finds the best. Momenta, from 0 to 1 - 1e-6, are tried on a grid over
  :math:`\ln(1-m)` that is narrowed about its best point seven times. Without a
  delay the radius is Polyak's
  :math:`(\sqrt\kappa - 1) / (\sqrt\kappa + 1)`.

  Args:
    method: The method. Its fields are scalars; `jax.vmap` for a sweep.
    condition_number: Largest over smallest curvature, >= 1, a scalar.
    delay: The gradient's delay D in updates, >= 0. Static.

  Returns:
    The optimum. The search looks at 8 curvatures, the half-life at 512.

  Raises:
    ValueError: If called without float64, an argument isn't a scalar, or the
      condition number or the delay is out of its range.

  Example:
    >>> from pbp_jax import quadratic
    >>> with jax.enable_x64(True):
    ...   best = quadratic.best_hyperparameters(
    ...       quadratic.Method(), condition_number=1e3, delay=0)
    >>> print(round(float(best.half_life), 2))
    10.96
  """
  polynomials.require_float64("best_hyperparameters")
  for name, value in (
    ("condition_number", condition_number),
    *method._asdict().items(),
  ):
    if jnp.ndim(value):
      raise ValueError(
        f"{name} must be a scalar, got shape {jnp.shape(value)}."
      )
  is_traced = isinstance(condition_number, core.Tracer)
  if not is_traced and not 1 <= np.asarray(condition_number) < math.inf:
    raise ValueError(
      f"condition_number must be >= 1 and finite, got {condition_number}."
    )
  return _search(method, condition_number, delay)


_GOLDEN = (math.sqrt(5) - 1) / 2
# Bounds of the search: ln(rate), ln(1 - m).
_LOG_RATES = (math.log(1e-8), math.log(8.0))
_LOG_DAMPINGS = (math.log(1e-6), 0.0)


# The search looks at fewer curvatures than its result is checked on.
_NUM_CURVATURES = 8


@functools.partial(jax.jit, static_argnames="delay")
def _search(method, condition_number, delay):
  def try_momenta(log_dampings, log_rate_bounds, num_steps):
    """Returns the best of ln(1 - m) [n], and its best ln(rate)."""
    momentum = -jnp.expm1(log_dampings)
    log_rate, radius = _golden_section(
      lambda log_rate: worst_radius(
        method,
        jnp.exp(log_rate),
        momentum,
        condition_number,
        delay,
        _NUM_CURVATURES,
      ),
      jnp.full_like(momentum, log_rate_bounds[0]),
      jnp.full_like(momentum, log_rate_bounds[1]),
      num_steps,
    )
    best = jnp.argmin(radius)
    return log_dampings[best], log_rate[best]

  def zoom(best, step):
    log_damping, log_rate = best
    grid = log_damping + step * jnp.linspace(-1.0, 1.0, 9)
    grid = jnp.clip(grid, *_LOG_DAMPINGS)
    # A step is less than e, and the best rate goes with 1 - m or slower.
    return try_momenta(grid, (log_rate - 2, log_rate + 2), 34), None

  grid = jnp.linspace(*_LOG_DAMPINGS, 33)
  best = try_momenta(grid, _LOG_RATES, 26)
  steps = (grid[1] - grid[0]) / 4.0 ** jnp.arange(7)
  (log_damping, log_rate), _ = jax.lax.scan(zoom, best, steps)
  rate, momentum = jnp.exp(log_rate), 0.0 - jnp.expm1(log_damping)
  radius = worst_radius(method, rate, momentum, condition_number, delay)
  return Optimum(rate, momentum, polynomials.half_life(radius))


def _golden_section(function, low, high, num_steps):
  """Minimizes a function with one valley, elementwise on [n] brackets."""
  span = _GOLDEN * (high - low)
  left, right = high - span, low + span

  def narrow(_, carry):
    low, high, left, right, f_left, f_right = carry
    is_left = f_left < f_right
    low, high = jnp.where(is_left, low, left), jnp.where(is_left, right, high)
    span = _GOLDEN * (high - low)
    new = jnp.where(is_left, high - span, low + span)
    f_new = function(new)
    return (
      low,
      high,
      jnp.where(is_left, new, right),
      jnp.where(is_left, left, new),
      jnp.where(is_left, f_new, f_right),
      jnp.where(is_left, f_left, f_new),
    )

  carry = (low, high, left, right, function(left), function(right))
  _, _, left, right, f_left, f_right = jax.lax.fori_loop(
    0, num_steps, narrow, carry
  )
  is_left = f_left < f_right
  return (
    jnp.where(is_left, left, right),
    jnp.where(is_left, f_left, f_right),
  )
