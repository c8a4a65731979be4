"""The largest stable learning rate of a delayed method on a quadratic.

The package's docstring has the recurrence and the polynomial.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from pbp_jax.quadratic import polynomials


@functools.partial(jax.jit, static_argnames="delay")
def stability_limit(
  method: polynomials.Method | polynomials.Coefficients,
  momentum: ArrayLike,
  delay: int,
) -> jax.Array:
  r"""Returns the largest L such that every smaller L is stable.

  A root of A + L B lies on the unit circle, at :math:`z = e^{i\theta}`, where
  :math:`L = -A(z) / B(z)` is real. The limit is the smallest positive such L;
  the angles are found by bisection between sign changes of the imaginary part
  on a grid. For delayed SGD without momentum it is
  :math:`2 \sin(\pi / (4D + 2))`.

  Args:
    method: A `Method`, or `Coefficients` for any (a, b). Fields [...].
    momentum: Momentum m, [...].
    delay: The gradient's delay D in updates, >= 0. Static.

  Returns:
    The limit, learning rate times curvature, [...]. Zero where no L is stable
    (m >= 1), infinite where all are.

  Raises:
    ValueError: If called without float64 or the delay isn't an int >= 0.

  Example:
    >>> from pbp_jax import quadratic
    >>> with jax.enable_x64(True):
    ...   limit = quadratic.stability_limit(quadratic.Method(), 0.5, delay=0)
    >>> print(round(float(limit), 9))
    3.0
  """
  polynomials.require_float64("stability_limit")
  _, pull = polynomials.two_parts(method, momentum, delay)
  pull = pull[..., -3:]
  momentum = jnp.broadcast_to(jnp.asarray(momentum, float), pull.shape[:-1])
  # Large momenta cross near zero, hence the logarithmic part; the imaginary
  # part is a trigonometric polynomial of degree D + 3, hence the even one.
  grid = np.union1d(
    np.geomspace(1e-7, np.pi, 512),
    np.linspace(0, np.pi, 32 * (delay + 3))[1:],
  )
  limits = jax.lax.map(
    lambda case: _smallest_crossing(case[0], case[1], jnp.asarray(grid), delay),
    (momentum.reshape(-1), pull.reshape(-1, 3)),
  )
  return limits.reshape(momentum.shape)


def _smallest_crossing(momentum, pull, grid, delay):
  """The stability limit of one case; `grid` are angles in (0, pi]."""

  def crossing(theta):
    """Returns -A conj(B), as real as L is, and |B|^2."""
    z = jnp.exp(1j * theta)
    # z - 1 in a form that small angles don't cancel.
    z_minus_1 = 2j * jnp.sin(theta / 2) * jnp.exp(0.5j * theta)
    a = z ** (delay + 1) * z_minus_1 * (z - momentum)
    b = (pull[0] * z + pull[1]) * z + pull[2]
    return -a * jnp.conj(b), jnp.abs(b) ** 2

  is_positive = lambda theta: crossing(theta)[0].imag > 0
  low, high = grid[:-1], grid[1:]
  sign_low = is_positive(low)
  is_bracket = sign_low != is_positive(high)

  def bisect(_, bracket):
    low, high = bracket
    middle = (low + high) / 2
    is_low = is_positive(middle) == sign_low
    return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

  _, high = jax.lax.fori_loop(0, 50, bisect, (low, high))
  # z = -1 is a crossing always: everything is real there.
  product, norm = crossing(jnp.append(high, jnp.pi))
  rate = product.real / jnp.where(norm > 0, norm, 1)
  is_crossing = jnp.append(is_bracket, True) & (norm > 0) & (rate > 0)
  smallest = jnp.min(jnp.where(is_crossing, rate, jnp.inf))
  # At L = 0 the roots are 0, m and 1; the last one must start inwards.
  is_stable_at_zero = (jnp.abs(momentum) < 1) & (pull.sum() > 0)
  return jnp.where(is_stable_at_zero, smallest, 0.0)
