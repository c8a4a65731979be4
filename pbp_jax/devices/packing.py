"""One layout for the trees of all devices.

A program on a mesh sees arrays of one shape on every device. Where the devices'
trees have leaves of the same shapes, those leaves are the layout; otherwise a
tree travels as one vector a dtype, as long as the longest of them.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax.stages import PyTree

# What every device holds: leaves, or one vector a dtype.
Packed = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Packing:
  """How trees of different shapes become arrays of the same shapes.

  Attributes:
    structures: The treedef of each tree.
    leaves: The shapes and dtypes of each tree's leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> packing = of([{"w": jnp.ones((2, 2))}, {"b": jnp.ones(3)}])
    >>> packing.pack({"b": jnp.ones(3)}, 1)
    (Array([1., 1., 1., 0.], dtype=float32),)
    >>> packing.unpack(packing.pack({"b": jnp.ones(3)}, 1), 1)
    {'b': Array([1., 1., 1.], dtype=float32)}
  """

  structures: tuple[Any, ...]
  leaves: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

  @functools.cached_property
  def is_uniform(self) -> bool:
    """Whether all trees have leaves of the same shapes and dtypes."""
    return len(set(map(_signature, self.leaves))) <= 1

  @functools.cached_property
  def form(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of what `pack` returns."""
    if self.is_uniform:
      return self.leaves[0]
    sizes: dict[Any, int] = {}
    for leaves in self.leaves:
      for dtype in {leaf.dtype for leaf in leaves}:
        size = sum(math.prod(x.shape) for x in leaves if x.dtype == dtype)
        sizes[dtype] = max(size, sizes.get(dtype, 0))
    return tuple(
      jax.ShapeDtypeStruct((size,), dtype)
      for dtype, size in sorted(sizes.items(), key=str)
    )

  def pack(self, tree: PyTree, index: int, xp: Any = jnp) -> Packed:
    """Brings a tree into the common form.

    Args:
      tree: The tree of device `index`.
      index: Which of the trees it is.
      xp: `jax.numpy`, or `numpy` for arrays on the host.

    Returns:
      Arrays as `form` says, padded by zeros.
    """
    leaves = [
      xp.asarray(leaf, like.dtype)
      for leaf, like in zip(
        jax.tree.leaves(tree), self.leaves[index], strict=True
      )
    ]
    if self.is_uniform:
      return tuple(leaves)
    vectors = []
    for like in self.form:
      parts = [xp.ravel(leaf) for leaf in leaves if leaf.dtype == like.dtype]
      missing = like.shape[0] - sum(part.size for part in parts)
      vectors.append(xp.concatenate([*parts, xp.zeros(missing, like.dtype)]))
    return tuple(vectors)

  def unpack(self, packed: Packed, index: int) -> PyTree:
    """The tree that `pack` was given.

    Args:
      packed: Arrays as `form` says.
      index: Which of the trees it is.

    Returns:
      The tree.
    """
    leaves = list(packed)
    if not self.is_uniform:
      vectors = {
        like.dtype: v for like, v in zip(self.form, packed, strict=True)
      }
      used = dict.fromkeys(vectors, 0)
      leaves = []
      for like in self.leaves[index]:
        start, size = used[like.dtype], math.prod(like.shape)
        used[like.dtype] += size
        vector = vectors[like.dtype][start : start + size]
        leaves.append(vector.reshape(like.shape))
    return jax.tree.unflatten(self.structures[index], leaves)

  def zeros(self) -> Packed:
    """Zeros in the common form."""
    return tuple(jnp.zeros(like.shape, like.dtype) for like in self.form)

  def stack(self, trees: Sequence[PyTree]) -> Packed:
    """All trees in the common form, along a new first axis, on the host."""
    packed = [self.pack(tree, p, np) for p, tree in enumerate(trees)]
    return tuple(map(np.stack, zip(*packed, strict=True)))

  def unstack(self, packed: Packed) -> tuple[PyTree, ...]:
    """The trees that `stack` was given."""
    return tuple(
      self.unpack(tuple(array[p] for array in packed), p)
      for p in range(len(self.structures))
    )

  def shapes(self) -> tuple[PyTree, ...]:
    """The trees, of shapes and dtypes."""
    return tuple(map(jax.tree.unflatten, self.structures, self.leaves))

  def num_bytes(self, index: int) -> int:
    """Bytes of a tree, without padding."""
    return sum(
      math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves[index]
    )

  def signature(self, index: int) -> tuple[Any, ...]:
    """What two trees have in common if one program can work on both."""
    return (self.structures[index], _signature(self.leaves[index]))


def of(trees: Sequence[PyTree]) -> Packing:
  """The packing of trees, one a device.

  Args:
    trees: Trees of arrays, or of their shapes and dtypes.

  Returns:
    The packing.

  Raises:
    ValueError: If a tree holds a random key, which can't be padded.
  """
  made = Packing(
    tuple(jax.tree.structure(tree) for tree in trees),
    tuple(tuple(map(_shape, jax.tree.leaves(tree))) for tree in trees),
  )
  for leaf in sum(made.leaves, ()):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise ValueError(
        "What devices hold or send must be arrays of numbers, got a random key"
        f" of {leaf.dtype}; use jax.random.key_data."
      )
  return made


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _signature(leaves: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[Any, ...]:
  return tuple((leaf.shape, leaf.dtype) for leaf in leaves)
