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


def as_given(value: per_stage.PerStage, params: Any, name: str) -> Any:
  """What a state keeps of a value; `spread` makes each leaf's of it again.

  One array a state, and not one a leaf: inside a scan each is copied in every
  step, and a deep pipeline has many leaves. Only where some leaves are masked
  it is one a leaf, which says what is covered.

  Args:
    value: A real scalar, one value a stage, or a pytree prefix.
    params: The parameters, or optax's placeholder for them.
    name: What errors call the value.

  Returns:
    The value as an array, or a prefix as a tree of arrays.

  Raises:
    ValueError: If the value does not fit.
  """
  fitted = per_stage.broadcast(value, params, name)
  if _has_masked(params):
    value = fitted
  elif isinstance(value, list | tuple) and all(map(per_stage.is_scalar, value)):
    return jnp.stack([jnp.asarray(number, dtype=float) for number in value])
  return jax.tree.map(lambda number: jnp.asarray(number, dtype=float), value)


def spread(kept: Any, params: Any, name: str) -> Any:
  """Each leaf's value of what `as_given` kept.

  Args:
    kept: From `as_given`.
    params: The parameters, whether or not some were masked there.
    name: What errors call the value.

  Returns:
    A tree like `params` of scalars; what was masked is masked.

  Raises:
    ValueError: If the value belongs to other parameters.
  """
  if kept is None or _has_masked(kept):
    return kept
  return per_stage.broadcast(kept, params, name)


def _has_masked(tree: Any) -> bool:
  is_masked = lambda node: isinstance(node, optax.MaskedNode)
  return any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked)))


def check_rate(learning_rate: ArrayLike | optax.Schedule) -> None:
  """Raises a ValueError if a rate is no schedule and no number >= 0."""
  if not callable(learning_rate):
    per_stage.check_number(
      learning_rate, "learning_rate", alternative="a schedule"
    )


def rate_at(
  learning_rate: ArrayLike | optax.Schedule, count: ArrayLike
) -> jax.Array:
  """The rate of the update that comes after `count` updates.

  Args:
    learning_rate: A number or an optax schedule.
    count: Updates done.

  Returns:
    A real scalar.

  Raises:
    ValueError: If a schedule gives anything else.
  """
  if not callable(learning_rate):
    return jnp.asarray(learning_rate, dtype=float)
  rate = learning_rate(count)
  if jnp.shape(rate):
    raise ValueError(
      "learning_rate must be one number, or a schedule of one, got a schedule"
      f" of shape {jnp.shape(rate)}."
    )
  return jnp.asarray(rate, dtype=float)


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
