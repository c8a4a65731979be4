"""Ring buffers inside a scan that XLA updates in place.

Write first, then read: a slot that is read before it is overwritten makes XLA
copy the whole ring in every step. For the same reason nothing is ever shifted
or rolled; what is counted up stays where it is, in the slot whose number is the
count modulo the number of slots.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

# Slots are never negative; not to ask saves XLA a select in every access.
_INDEXING = {"axis": 0, "allow_negative_indices": False}


def full(leaf: ArrayLike, slots: int) -> jax.Array:
  """A ring, `[slots, ...]`, that holds an array in every slot."""
  return jnp.broadcast_to(leaf, (slots, *jnp.shape(leaf)))


def write(ring: jax.Array, leaf: jax.Array, index: jax.Array) -> jax.Array:
  """The ring with an array in slot `index` modulo the number of slots."""
  return write_slot(ring, leaf, index % ring.shape[0])


def read(ring: jax.Array, index: jax.Array) -> jax.Array:
  """What is in slot `index` modulo the number of slots."""
  return read_slot(ring, index % ring.shape[0])


def write_slot(ring: jax.Array, leaf: jax.Array, slot: jax.Array) -> jax.Array:
  """The ring with an array in a slot, whose number is known to be one."""
  return jax.lax.dynamic_update_index_in_dim(
    ring, leaf.astype(ring.dtype), slot, **_INDEXING
  )


def read_slot(ring: jax.Array, slot: jax.Array) -> jax.Array:
  """What is in a slot, whose number is known to be one."""
  return jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False, **_INDEXING)
