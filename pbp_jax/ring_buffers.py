"""Ring buffers inside a scan that XLA updates in place.

Write first, then read, both by an index modulo the number of slots: a slot that
is read before it is overwritten makes XLA copy the whole ring in every step.
For the same reason nothing is ever shifted or rolled.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def full(leaf: ArrayLike, slots: int) -> jax.Array:
  """A ring, `[slots, ...]`, that holds an array in every slot."""
  return jnp.broadcast_to(leaf, (slots, *jnp.shape(leaf)))


def write(ring: jax.Array, leaf: jax.Array, index: jax.Array) -> jax.Array:
  """The ring with an array in slot `index` modulo the number of slots."""
  return jax.lax.dynamic_update_index_in_dim(
    ring, leaf.astype(ring.dtype), index % ring.shape[0], axis=0
  )


def read(ring: jax.Array, index: jax.Array) -> jax.Array:
  """What is in slot `index` modulo the number of slots."""
  return jax.lax.dynamic_index_in_dim(
    ring, index % ring.shape[0], axis=0, keepdims=False
  )
