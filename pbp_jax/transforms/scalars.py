"""Scalars that optimizer states keep: rates, horizons, decays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import per_stage


def per_leaf(value: per_stage.PerStage, params: Any, name: str) -> Any:
  """Gives every leaf of the parameters its stage's value, as an array.

  Args:
    value: A real scalar, one value a stage, or a pytree prefix.
    params: The parameters, or optax's placeholder for them.
    name: What errors call the value.

  Returns:
    A tree like `params` of real scalars.

  Raises:
    ValueError: If the value does not fit.
  """
  return jax.tree.map(
    lambda leaf: jnp.asarray(leaf, dtype=float),
    per_stage.broadcast(value, params, name),
  )


def check_rate(learning_rate: ArrayLike | optax.Schedule) -> None:
  """Raises a ValueError if a rate is no schedule and no number >= 0."""
  if not callable(learning_rate):
    per_stage.check_numbers(learning_rate, "learning_rate")


def rate_at(
  learning_rate: ArrayLike | optax.Schedule, count: ArrayLike
) -> jax.Array:
  """The rate of the update that comes after `count` updates.

  Args:
    learning_rate: A number or an optax schedule.
    count: Updates done.

  Returns:
    A real scalar; an array for an array of counts and a schedule.
  """
  if callable(learning_rate):
    return jnp.asarray(learning_rate(count), dtype=float)
  return jnp.asarray(learning_rate, dtype=float)


def rates_ahead(
  learning_rate: ArrayLike | optax.Schedule, count: jax.Array, length: int
) -> jax.Array:
  """The rates of the next updates.

  Args:
    learning_rate: A number or an optax schedule.
    count: Updates done.
    length: How many rates.

  Returns:
    The rates, `[length]`.
  """
  ahead = count + jnp.arange(length)
  return jax.vmap(lambda count: rate_at(learning_rate, count))(ahead)
