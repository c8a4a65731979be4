"""Ring buffers inside a scan that XLA updates in place.

Write first, then read: a slot that is read before it is overwritten makes XLA
copy the whole ring in every step. For the same reason nothing is ever shifted
or rolled; what is counted up stays where it is, in the slot whose number is the
count modulo the number of slots.

Formats that a processor does not compute in (bfloat16, the floats of eight
bits) are kept as their bits. XLA for CPUs does all with such arrays in float32,
even the copying of a slot, for which it converts the whole ring in every step.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np

# Slots are never negative; not to ask saves XLA a select in every access.
_INDEXING = {"axis": 0, "allow_negative_indices": False}


def write_slot(array: jax.Array, leaf: jax.Array, slot: ArrayLike) -> jax.Array:
  """An array, `[slots, ...]`, with another one in a slot."""
  return jax.lax.dynamic_update_index_in_dim(
    array, leaf.astype(array.dtype), slot, **_INDEXING
  )


def read_slot(array: jax.Array, slot: ArrayLike) -> jax.Array:
  """What is in a slot of an array, `[slots, ...]`."""
  return jax.lax.dynamic_index_in_dim(array, slot, keepdims=False, **_INDEXING)


@struct.dataclass
class Ring:
  """Versions of a tree of arrays, one a slot.

  Attributes:
    kept: The tree, leaves `[num_slots, ...]`. Of arrays in formats that XLA for
      CPUs converts (bfloat16, say) these are the bits, as unsigned integers:
      look at `values` instead.
    dtypes: The dtypes of the arrays, in the order of the leaves.
    num_slots: The number of slots.

  Example:
    >>> import jax.numpy as jnp
    >>> ring = full({"w": jnp.zeros(2)}, num_slots=3, dtype=jnp.bfloat16)
    >>> ring = ring.write({"w": jnp.ones(2)}, slot=1)
    >>> ring.read(slot=1)
    {'w': Array([1, 1], dtype=bfloat16)}
    >>> ring.values["w"].shape, ring.kept["w"].dtype.name
    ((3, 2), 'uint16')
  """

  kept: Any
  dtypes: tuple[np.dtype, ...] = struct.field(pytree_node=False)
  num_slots: int = struct.field(pytree_node=False)

  @property
  def values(self) -> Any:
    """What is in all slots, leaves `[num_slots, ...]`."""
    return self._map(_floats)

  @property
  def forms(self) -> Any:
    """The shapes and dtypes of `values`."""
    return self._map(
      lambda kept, dtype: jax.ShapeDtypeStruct(kept.shape, dtype)
    )

  def write(self, tree: Any, slot: ArrayLike) -> "Ring":
    """The ring with a tree of arrays in a slot, 0 <= slot < num_slots."""

    def write(kept, dtype, leaf):
      return write_slot(kept, _bits(leaf.astype(dtype)), slot)

    return dataclasses.replace(self, kept=self._map(write, tree))

  def read(self, slot: ArrayLike) -> Any:
    """What is in a slot, 0 <= slot < num_slots."""
    return self._map(lambda kept, dtype: _floats(read_slot(kept, slot), dtype))

  def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
    """`function(kept, dtype, ...)` of every leaf."""
    leaves, structure = jax.tree.flatten(self.kept)
    others = map(structure.flatten_up_to, trees)
    return structure.unflatten(map(function, leaves, self.dtypes, *others))


def full(tree: Any, num_slots: int, dtype: DTypeLike | None = None) -> Ring:
  """A ring that holds a tree of arrays in every slot.

  Args:
    tree: The arrays, leaves `[...]`.
    num_slots: The number of slots.
    dtype: What floating-point arrays are kept in; None for their own dtypes.

  Returns:
    The ring, whose `values` have leaves `[num_slots, ...]`.
  """

  def rounded(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if dtype is not None and is_float else leaf

  def repeated(leaf):
    return jnp.broadcast_to(_bits(leaf), (num_slots, *leaf.shape))

  tree = jax.tree.map(rounded, tree)
  return Ring(
    kept=jax.tree.map(repeated, tree),
    dtypes=tuple(leaf.dtype for leaf in jax.tree.leaves(tree)),
    num_slots=num_slots,
  )


def is_ring(node: Any) -> bool:
  """Whether a node of a tree is a ring; to stop at, as `is_leaf`."""
  return isinstance(node, Ring)


def _dtype_of_bits(dtype: np.dtype) -> DTypeLike | None:
  """The integers that hold a format XLA for CPUs converts; None for others."""
  if not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.float16:
    return None
  # Of less than a byte XLA for CPUs can't take the bits.
  return {8: jnp.uint8, 16: jnp.uint16}.get(jnp.finfo(dtype).bits)


def _bits(leaf: jax.Array) -> jax.Array:
  """An array as a ring keeps it."""
  dtype = _dtype_of_bits(leaf.dtype)
  return leaf if dtype is None else _as_bits(leaf, dtype)


def _floats(kept: jax.Array, dtype: np.dtype) -> jax.Array:
  """What a ring keeps, as what it is."""
  if _dtype_of_bits(dtype) is None:
    return kept
  return jax.lax.bitcast_convert_type(kept, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _as_bits(leaf: jax.Array, dtype: DTypeLike) -> jax.Array:
  return jax.lax.bitcast_convert_type(leaf, dtype)


@_as_bits.defjvp
def _refuse_derivative(dtype, primals, tangents):
  # Bits have no derivative: it would be lost here without a word.
  del dtype, tangents
  raise ValueError(
    "What is differentiated must not be kept in a ring in"
    f" {primals[0].dtype.name}, whose bits have no derivative; keep old weights"
    " in float32 or float16 (history_dtype)."
  )
