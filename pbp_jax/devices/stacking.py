"""Arrays stacked along a leading axis: micro-batches, or runs of a sweep."""

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax.stages import PyTree


def length(**trees: PyTree) -> int:
  """The length of the leading axis that arrays have in common.

  Args:
    **trees: Trees of arrays, by the names that errors call them.

  Returns:
    The length, at least 1.

  Raises:
    ValueError: If a leaf is no array of numbers, or the leading axes differ.

  Example:
    >>> length(inputs={"x": np.ones((5, 2))}, targets=np.ones(5))
    5
  """
  for name, tree in trees.items():
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      _check_numbers(name + jax.tree_util.keystr(path), leaf)
  sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(trees)}
  if len(sizes) != 1 or sizes <= {(), (0,)}:
    raise ValueError(
      f"{' and '.join(trees)} must be stacked: all leaves need one and the same"
      f" leading axis >= 1, got leading axes {sorted(sizes)}."
    )
  ((size,),) = sizes
  return size


def count_micro_batches(
  inputs: PyTree, targets: PyTree, example: tuple[PyTree, PyTree]
) -> int:
  """How many micro-batches these are.

  Args:
    inputs: Their inputs, stacked along a leading axis.
    targets: Their targets, likewise.
    example: Shapes and dtypes of one micro-batch.

  Returns:
    The number, at least 1.

  Raises:
    ValueError: If they are not of the form of the example, or their numbers
      differ.
  """
  given = {"inputs": inputs, "targets": targets}
  for (name, tree), like in zip(given.items(), example, strict=True):
    found, wanted = map(jax.tree.structure, (tree, like))
    if found != wanted:
      raise ValueError(
        f"{name} must be stacked arrays in the tree of example, {wanted}; got"
        f" {textwrap.shorten(str(found), 80)}. A list is a tree of its items:"
        " np.stack makes an array of it."
      )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), form in zip(leaves, jax.tree.leaves(like), strict=True):
      _check_form(name + jax.tree_util.keystr(path), leaf, form)
  return length(**given)


def _check_numbers(name: str, leaf: Any) -> None:
  if not isinstance(leaf, np.ndarray | jax.Array):
    raise ValueError(
      f"{name} must be an array of NumPy or JAX, got {leaf!r}. A list is a tree"
      " of its items: np.stack makes an array of it."
    )
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    raise ValueError(
      f"{name} must be numbers, got random keys of {leaf.dtype}: give seeds, of"
      " which jax.random.key makes keys where they are used."
    )
  try:
    jnp.result_type(leaf)
  except TypeError as error:
    raise ValueError(
      f"{name} must be numbers that JAX knows, got {leaf.dtype}."
    ) from error


def _check_form(name: str, leaf: Any, like: jax.ShapeDtypeStruct) -> None:
  """Other shapes would be broadcast, other dtypes cast, without a word."""
  _check_numbers(name, leaf)
  dtype = jnp.result_type(leaf)
  if leaf.shape[1:] != like.shape or dtype != like.dtype:
    raise ValueError(
      f"{name} must be micro-batches of shape {like.shape} and {like.dtype}, as"
      f" example; got {leaf.shape[1:]} and {dtype}, stacked to {leaf.shape}."
    )
