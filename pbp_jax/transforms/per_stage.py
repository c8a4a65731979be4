"""Values that differ from stage to stage, matched to the parameters.

Hyperparameters such as a delay are given as one number, as one number a stage,
or as a pytree prefix of the parameters; here they become one number a leaf.
"""

import numbers
from typing import Any

import jax
from jax import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

# A real scalar, a sequence or array with one value a stage, or a pytree prefix.
PerStage = Any


def broadcast(value: PerStage, tree: Any, name: str) -> Any:
  """Gives every leaf of a tree the value of its stage.

  Args:
    value: A real scalar, for all leaves; an array, list or tuple with one value
      a stage, where the top level of `tree` is a list or tuple of that length;
      or a pytree prefix of `tree`.
    tree: The parameters, or a tree like them. A tree without leaves (optax's
      placeholder, a masked node) takes any value.
    name: What errors call the value.

  Returns:
    A tree like `tree` with a scalar at every leaf.

  Raises:
    ValueError: If the value fits none of the three.

  Example:
    >>> broadcast([4, 2], ({"w": 0.0, "b": 0.0}, {"w": 0.0}), name="delay")
    ({'b': 4, 'w': 4}, {'w': 2})
  """
  if not jax.tree.leaves(tree):
    return tree
  try:
    is_by_stage = _is_sequence(value) and isinstance(tree, list | tuple)
    if is_by_stage and len(value) == len(tree):
      value = jax.tree.unflatten(_one_level(tree)[1], list(value))
    return _spread(value, tree)
  except ValueError as error:
    shown = f"shape {value.shape}" if hasattr(value, "shape") else repr(value)
    raise ValueError(
      f"{name} must be a real scalar, a sequence with one value a stage where"
      " the parameters are a list or tuple of stages, or a pytree prefix of the"
      f" parameters; got {shown}, {error}."
    ) from error


def is_scalar(value: Any) -> bool:
  """Whether a value is one real number, of Python, NumPy or JAX."""
  if isinstance(value, np.ndarray | jax.Array):
    return value.ndim == 0
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_numbers(
  value: PerStage,
  name: str,
  *,
  minimum: float = 0.0,
  maximum: float = np.inf,
  whole: bool = False,
) -> None:
  """Raises a ValueError unless the known numbers in a value are allowed.

  Args:
    value: The value, as `broadcast` takes it. Traced numbers are not known.
    name: What the error calls it.
    minimum: The smallest allowed number.
    maximum: The largest allowed number.
    whole: Whether only ints are allowed, and none may be traced: for what
      decides the shape of a buffer.
  """
  allowed = f"{'ints' if whole else 'real numbers'} >= {minimum:g}"
  if maximum < np.inf:
    allowed += f" and <= {maximum:g}"
  for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None):
    if isinstance(leaf, jax_core.Tracer) and not whole:
      continue
    known = None if isinstance(leaf, jax_core.Tracer) else np.asarray(leaf)
    kind = np.integer if whole else (np.integer, np.floating)
    if known is None or not any(
      np.issubdtype(known.dtype, k) or jnp.issubdtype(known.dtype, k)
      for k in (kind if isinstance(kind, tuple) else (kind,))
    ):
      hint = "; a schedule of it goes through optax.inject_hyperparams"
      raise ValueError(
        f"{name} must hold {allowed}, got {value!r}"
        f"{hint if callable(leaf) and not whole else ''}."
      )
    if not ((known >= minimum) & (known <= maximum)).all():
      raise ValueError(f"{name} must hold {allowed}, got {value!r}.")


def stage_trees(tree: Any) -> tuple[list[Any], Any]:
  """Takes a tree apart into stages: the elements of a top-level list or tuple.

  Any other tree is one stage.

  Args:
    tree: The parameters, or a tree like them.

  Returns:
    The stages, and the treedef that puts them together again.
  """
  if _is_sequence(tree):
    return _one_level(tree)
  return [tree], jax.tree.structure(0)


def _is_sequence(value: Any) -> bool:
  if isinstance(value, np.ndarray | jax.Array):
    return value.ndim == 1
  return isinstance(value, list | tuple)


def _one_level(tree: Any) -> tuple[list[Any], Any]:
  return jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)


def _spread(value: Any, tree: Any) -> Any:
  """Spreads a pytree prefix over a tree; raises a ValueError on a misfit."""
  if is_scalar(value):
    return jax.tree.map(lambda _: value, tree)
  if isinstance(tree, optax.MaskedNode):
    return tree
  values, value_structure = _one_level(value)
  branches, structure = _one_level(tree)
  if value_structure != structure or (len(values) == 1 and values[0] is value):
    raise ValueError(f"{_top(value)} where they have {_top(tree)}")
  return jax.tree.unflatten(structure, list(map(_spread, values, branches)))


def _top(tree: Any) -> str:
  """Says what the top level of a tree is, for errors."""
  is_below = lambda node: node is not tree
  below = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_below)[0]
  keys = [jax.tree_util.keystr(path) for path, _ in below]
  kind = type(tree).__name__
  return f"{kind} of {len(keys)} ({' '.join(keys)})" if any(keys) else kind
