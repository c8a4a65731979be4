"""Characteristic polynomials of the linear methods, and their roots.

The package's docstring has the recurrence and the polynomial.
"""

import functools
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np


class Coefficients(NamedTuple):
  """The numbers that make a linear method, at one momentum.

  Attributes:
    a: Weight of the momentum buffer in the update.
    b: Weight of the gradient that arrives now in the update.
    velocity_horizon: Updates to predict ahead along the velocity.
    weight_horizon: Updates to predict ahead along the last step.
  """

  a: ArrayLike = 1.0
  b: ArrayLike = 0.0
  velocity_horizon: ArrayLike = 0.0
  weight_horizon: ArrayLike = 0.0


class Method(NamedTuple):
  r"""A linear method, for any momentum. The default is plain SGDM.

  The fields may be arrays that broadcast: a sweep over horizons is one call.

  Attributes:
    spike_delay: The delay d that spike compensation makes up for, in updates,
      any real >= 0: :math:`a = m^d`, :math:`b = (1 - m^d) / (1 - m)`. With
      d = 1 it is Nesterov's momentum.
    velocity_horizon: Horizon of weight prediction in its velocity form, in
      updates, any real >= 0.
    weight_horizon: The same for the weight form. Error feedback of strength
      :math:`\lambda`, :math:`w_{t+1} = w_t - u_t - \lambda (u_t - u_{t-1})`,
      has the roots of `weight_horizon` :math:`= \lambda`: filtering the
      updates by :math:`1 + \lambda (1 - 1/z)` or the weights that gradients
      are taken at comes to the same.
  """

  spike_delay: ArrayLike = 0.0
  velocity_horizon: ArrayLike = 0.0
  weight_horizon: ArrayLike = 0.0

  def coefficients(self, momentum: ArrayLike) -> Coefficients:
    """Returns the coefficients at a momentum in [0, 1].

    Args:
      momentum: Momentum m, [...], broadcast with the fields.

    Returns:
      The coefficients. b has its limit d at m = 1.
    """
    m, d, velocity, weight = jnp.broadcast_arrays(
      *(jnp.asarray(x, float) for x in (momentum, *self))
    )
    is_inside = (m > 0) & (m < 1)
    m_inside = jnp.where(is_inside, m, 0.5)
    # 1 - m^d without cancellation near m = 1.
    b = -jnp.expm1(d * jnp.log(m_inside)) / (1 - m_inside)
    b = jnp.where(is_inside, b, jnp.where(m > 0, d, jnp.where(d > 0, 1.0, 0)))
    return Coefficients(1 - b * (1 - m), b, velocity, weight)


# Spike delay, velocity and weight horizon in units of the delay.
_IN_DELAYS = {
  "none": (0.0, 0.0, 0.0),
  "scd": (1.0, 0.0, 0.0),
  "sc2d": (2.0, 0.0, 0.0),
  "lwpd": (0.0, 1.0, 0.0),
  "lwp2d": (0.0, 2.0, 0.0),
  "lwpvd_scd": (1.0, 1.0, 0.0),
  "lwpwd_scd": (1.0, 0.0, 1.0),
}
# The same in updates, whatever the delay.
_IN_UPDATES = {"nesterov": (1.0, 0.0, 0.0), "error_feedback": (0.0, 0.0, 1.0)}
METHOD_NAMES = (*_IN_DELAYS, *_IN_UPDATES)


def named_method(name: str, delay: float) -> Method:
  """Returns a method by the name it has in tables and figures.

  Args:
    name: One of `METHOD_NAMES`. In these, `sc` is spike compensation, `lwpv`
      and `lwpw` are the velocity and the weight form of linear weight
      prediction, `lwp` either (they are equal for plain SGDM), and `d` or `2d`
      says for once or twice the delay.
    delay: The gradient's delay, in updates.

  Returns:
    The method.

  Raises:
    ValueError: If the name is unknown or the delay negative.

  Example:
    >>> from pbp_jax import quadratic
    >>> quadratic.named_method("lwpvd_scd", delay=4)
    Method(spike_delay=4.0, velocity_horizon=4.0, weight_horizon=0.0)
  """
  if delay < 0:
    raise ValueError(f"delay must be >= 0, got {delay}.")
  if name in _IN_UPDATES:
    return Method(*_IN_UPDATES[name])
  if name not in _IN_DELAYS:
    raise ValueError(
      f"name must be one of {', '.join(METHOD_NAMES)}, got {name!r}."
    )
  return Method(*(multiple * delay for multiple in _IN_DELAYS[name]))


def effective_horizon(method: Method, momentum: ArrayLike) -> jax.Array:
  r"""Returns the horizon of the pure weight prediction that a method equals.

  Unless spike compensation meets the weight form, the polynomial is
  :math:`z^D (z-1) (z-m) + L [(1+T) z - T]`, times z, with
  :math:`T = m (1 - m^d) / (1 - m) + T_v + T_w`: that of
  `Method(velocity_horizon=T)`. So T, for a delay, is all there is to a method.

  Args:
    method: The method. Concrete numbers, as they are checked.
    momentum: Momentum m, [...], broadcast with the method's fields.

  Returns:
    T in updates, [...].

  Raises:
    ValueError: If both spike compensation and the weight form are on.

  Example:
    >>> from pbp_jax import quadratic
    >>> method = quadratic.named_method("scd", delay=2)
    >>> print(quadratic.effective_horizon(method, momentum=0.5))
    0.75
  """
  if np.any(method.spike_delay) and np.any(method.weight_horizon):
    raise ValueError(
      "method must have spike_delay 0 or weight_horizon 0 to have an effective"
      f" horizon, got {method}."
    )
  momentum = jnp.asarray(momentum, float)
  _, b, velocity_horizon, weight_horizon = method.coefficients(momentum)
  return jnp.asarray(b * momentum + velocity_horizon + weight_horizon)


def two_parts(
  method: Method | Coefficients, momentum: ArrayLike, delay: int
) -> tuple[jax.Array, jax.Array]:
  """Returns A and B of the characteristic polynomial A + L B.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields [...].
    momentum: Momentum m, [...].
    delay: The gradient's delay D in updates, >= 0. Static.

  Returns:
    Coefficients of A and B, highest power first, each [..., D + 4].

  Raises:
    ValueError: If the delay isn't an int >= 0.
  """
  is_int = isinstance(delay, numbers.Integral) and not isinstance(delay, bool)
  if not is_int or delay < 0:
    raise ValueError(f"delay must be an int >= 0, got {delay!r}.")
  if isinstance(method, Method):
    method = method.coefficients(momentum)
  m, a, b, t_v, t_w = jnp.broadcast_arrays(
    *(jnp.asarray(x, float) for x in (momentum, *method))
  )
  zeros = jnp.zeros((*m.shape, delay + 1), m.dtype)
  free = jnp.stack([jnp.ones_like(m), -1 - m, m], axis=-1)
  pull = jnp.stack(
    [
      (a + b) * (1 + t_w) + t_v,
      -(a + b) * t_w - b * m * (1 + t_w) - t_v,
      b * m * t_w,
    ],
    axis=-1,
  )
  return (
    jnp.concatenate([free, zeros], axis=-1),
    jnp.concatenate([zeros, pull], axis=-1),
  )


def characteristic_polynomial(
  method: Method | Coefficients,
  rate: ArrayLike,
  momentum: ArrayLike,
  delay: int,
) -> jax.Array:
  """Returns the coefficients of the polynomial in the package's docstring.

  Its degree is D + 3 for every method: one root is zero unless the weight form
  of prediction is on.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields [...].
    rate: Learning rate times curvature L, [...].
    momentum: Momentum m, [...].
    delay: The gradient's delay D in updates, >= 0. Static.

  Returns:
    Coefficients, highest power first, [..., D + 4].

  Raises:
    ValueError: If the delay isn't an int >= 0.

  Example:
    >>> from pbp_jax import quadratic
    >>> print(quadratic.characteristic_polynomial(
    ...     quadratic.Method(), rate=0.5, momentum=0.5, delay=0))
    [ 1.  -1.   0.5  0. ]
  """
  free, pull = two_parts(method, momentum, delay)
  rate = jnp.asarray(rate, float)[..., None]
  free, rate, pull = jnp.broadcast_arrays(free, rate, pull)
  return free + rate * pull


@functools.partial(jax.jit, static_argnames="delay")
def spectral_radius(
  method: Method | Coefficients,
  rate: ArrayLike,
  momentum: ArrayLike,
  delay: int,
) -> jax.Array:
  """Returns the largest root modulus: by so much the error shrinks an update.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields [...].
    rate: Learning rate times curvature L, [...].
    momentum: Momentum m, [...].
    delay: The gradient's delay D in updates, >= 0. Static.

  Returns:
    The spectral radius, [...], all arguments broadcast. Where two roots meet
    it is known to the square root of the precision, 1e-8 in float64.

  Raises:
    ValueError: If the delay isn't an int >= 0.

  Example:
    >>> from pbp_jax import quadratic
    >>> with jax.enable_x64(True):
    ...   radius = quadratic.spectral_radius(
    ...       quadratic.Method(), rate=0.1, momentum=0.81, delay=0)
    >>> print(round(float(radius), 6))
    0.9
  """
  polynomial = characteristic_polynomial(method, rate, momentum, delay)
  degree = delay + 3
  companion = jnp.broadcast_to(
    jnp.eye(degree, k=-1, dtype=polynomial.dtype),
    (*polynomial.shape[:-1], degree, degree),
  )
  companion = companion.at[..., 0, :].set(-polynomial[..., 1:])
  return jnp.abs(jnp.linalg.eigvals(companion)).max(-1)


def half_life(radius: ArrayLike) -> jax.Array:
  """Returns the updates in which the error halves, -ln 2 / ln r.

  Args:
    radius: Spectral radius r, [...].

  Returns:
    Half-life in updates, [...]; infinite where r >= 1.

  Example:
    >>> from pbp_jax import quadratic
    >>> print(quadratic.half_life(0.5))
    1.0
  """
  radius = jnp.asarray(radius, float)
  inside = jnp.where(radius < 1, radius, 0.5)
  return jnp.where(radius < 1, -math.log(2) / jnp.log(inside), jnp.inf)


def impulse_response(
  method: Method | Coefficients,
  momentum: ArrayLike,
  delay: int,
  num_steps: int,
) -> jax.Array:
  r"""Returns the updates that one gradient of size one causes.

  The gradient belongs to step 0 and arrives in step D: update t is
  :math:`a m^{t-D} + b [t = D]` from there on. Weight prediction changes where
  gradients are taken, not what follows from one.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields are scalars.
    momentum: Momentum m, a scalar.
    delay: The gradient's delay D in updates, >= 0.
    num_steps: How many updates to return. Static.

  Returns:
    Updates over the learning rate, [num_steps]. All of them, without end, sum
    to 1 / (1 - m), with and without spike compensation.

  Example:
    >>> from pbp_jax import quadratic
    >>> print(quadratic.impulse_response(
    ...     quadratic.Method(spike_delay=1), 0.5, delay=1, num_steps=4))
    [0.    1.5   0.25  0.125]
  """
  if isinstance(method, Method):
    method = method.coefficients(momentum)
  age = jnp.arange(num_steps) - delay
  decayed = method.a * jnp.asarray(momentum, float) ** jnp.maximum(age, 0)
  return jnp.where(age < 0, 0.0, decayed + method.b * (age == 0))


def require_float64(name: str) -> None:
  """Raises a ValueError if new floats aren't float64."""
  if jnp.result_type(float) != jnp.float64:
    raise ValueError(
      f"{name} needs float64: call it inside `with jax.enable_x64(True):`."
    )
