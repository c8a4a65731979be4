"""Ring buffers inside a scan that XLA updates in place.

Write first, then read: a slot that is read before it is overwritten makes XLA
copy the whole ring in every step. For the same reason nothing is ever shifted
or rolled; what is counted up stays where it is, in the slot whose number is the
count modulo the number of slots.

Within one compiled program a `Ring` keeps formats that a processor does not
compute in (bfloat16, the floats of eight bits) as their bits. XLA for CPUs does
all with such arrays in float32, even the copying of a slot, for which it
converts the whole ring in every step. Rings never leave a program: bits taken
for numbers would be wrong without a word.
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


def full(leaf: ArrayLike, slots: int) -> jax.Array:
  """A ring, `[slots, ...]`, that holds an array in every slot."""
  return jnp.broadcast_to(leaf, (slots, *jnp.shape(leaf)))


def write(ring: jax.Array, leaf: ArrayLike, index: jax.Array) -> jax.Array:
  """The ring with an array in slot `index` modulo the number of slots."""
  return write_slot(ring, leaf, index % ring.shape[0])


def read(ring: jax.Array, index: jax.Array) -> jax.Array:
  """What is in slot `index` modulo the number of slots."""
  return read_slot(ring, index % ring.shape[0])


def write_slot(ring: jax.Array, leaf: ArrayLike, slot: ArrayLike) -> jax.Array:
  """The ring with an array in a slot, whose number is known to be one."""
  return jax.lax.dynamic_update_index_in_dim(
    ring, jnp.asarray(leaf).astype(ring.dtype), slot, **_INDEXING
  )


def read_slot(ring: jax.Array, slot: ArrayLike) -> jax.Array:
  """What is in a slot, whose number is known to be one."""
  return jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False, **_INDEXING)


@struct.dataclass
class Ring:
  """The rings of a tree's leaves, as a compiled program carries them.

  Attributes:
    kept: The tree, leaves `[num_slots, ...]`; bits instead of numbers where XLA
      would convert.
    dtypes: The dtypes of the arrays, in the order of the leaves.
    num_slots: The number of slots.

  Example:
    >>> import jax.numpy as jnp
    >>> ring = Ring.of({"w": jnp.zeros((3, 2), jnp.bfloat16)})
    >>> ring = ring.write({"w": jnp.ones(2)}, slot=1)
    >>> ring.read(slot=1)
    {'w': Array([1, 1], dtype=bfloat16)}
    >>> ring.values["w"].dtype.name
    'bfloat16'
  """

  kept: Any
  dtypes: tuple[np.dtype, ...] = struct.field(pytree_node=False)
  num_slots: int = struct.field(pytree_node=False)

  @classmethod
  def of(cls, tree: Any) -> "Ring":
    """The ring of arrays `[num_slots, ...]`."""
    leaves = jax.tree.leaves(tree)
    (num_slots,) = {leaf.shape[0] for leaf in leaves}
    return cls(
      kept=jax.tree.map(_bits, tree),
      dtypes=tuple(leaf.dtype for leaf in leaves),
      num_slots=num_slots,
    )

  @property
  def values(self) -> Any:
    """What is in all slots, leaves `[num_slots, ...]`."""
    return self._map(_floats)

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


def _dtype_of_bits(dtype: np.dtype) -> DTypeLike | None:
  """The integers that hold a format XLA converts; None for other formats."""
  if jax.default_backend() != "cpu" or dtype == jnp.float16:
    return None
  if not jnp.issubdtype(dtype, jnp.floating):
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
    "A run on a CPU can't be differentiated through old weights that are kept"
    f" in {primals[0].dtype.name}; give history_dtype float32 or float16, also"
    " where the weights themselves are of that kind."
  )
