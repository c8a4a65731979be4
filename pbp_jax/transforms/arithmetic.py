"""Arithmetic on leaves that keeps their dtype."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def linear_combination(*terms: tuple[ArrayLike, jax.Array]) -> jax.Array:
  """Sums coefficient times array, in the first array's dtype.

  The sum is taken in float32 at least: a momentum of .9992 is 1 in bfloat16.

  Args:
    *terms: Pairs of a scalar and an array.

  Returns:
    The sum, in the dtype of the first array.
  """
  dtype = terms[0][1].dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  total = None
  for coefficient, array in terms:
    term = array.astype(wide)
    if not (isinstance(coefficient, int) and coefficient == 1):
      term = jnp.asarray(coefficient).astype(wide) * term
    total = term if total is None else total + term
  assert total is not None
  return total.astype(dtype)
