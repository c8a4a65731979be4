"""Shapes and dtypes of a tree's leaves, to hold one tree against another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pbp_jax.stages import PyTree


class Difference(NamedTuple):
  """Where two trees differ.

  Attributes:
    path: The leaf's path, as in `jax.tree_util.keystr`.
    found: What the tree has there.
    wanted: What it should have.
  """

  path: str
  found: str
  wanted: str


def form(leaf: Any, dtype_of: Callable[[Any], Any] = jnp.result_type) -> str:
  """Shape and dtype, as errors show them.

  Args:
    leaf: An array, its shape, or a number; of anything else its type is shown.
    dtype_of: How to ask for the dtype: by default that which JAX computes in.

  Returns:
    A text.

  Example:
    >>> import numpy as np
    >>> form(np.ones((2, 3), np.float32))
    'float32[2, 3]'
  """
  try:
    return f"{dtype_of(leaf)}{list(jnp.shape(leaf))}"
  except TypeError:  # no number
    return type(leaf).__name__


def first_difference(
  tree: PyTree,
  like: PyTree,
  dtype_of: Callable[[Any], Any] = jnp.result_type,
) -> Difference | None:
  """Where a tree first differs from another one in shape or dtype.

  By paths, so that it does not matter which kind of node holds a leaf.

  Args:
    tree: The tree.
    like: What it should be like, arrays or their shapes.
    dtype_of: As in `form`.

  Returns:
    The difference, None if there is none.

  Example:
    >>> import numpy as np
    >>> first_difference({"w": np.ones(2, np.float32)}, {}).wanted
    'nothing'
  """
  found, wanted = (
    {
      jax.tree_util.keystr(path): form(leaf, dtype_of)
      for path, leaf in jax.tree_util.tree_leaves_with_path(either)
    }
    for either in (tree, like)
  )
  for path in {**wanted, **found}:
    if found.get(path) != wanted.get(path):
      return Difference(
        path, found.get(path, "nothing"), wanted.get(path, "nothing")
      )
  return None
