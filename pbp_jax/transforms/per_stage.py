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
  above: float = -np.inf,
  maximum: float = np.inf,
  below: float = np.inf,
  whole: bool = False,
) -> None:
  """Raises a ValueError unless the known numbers in a value are allowed.

  Bounds have to hold in the working precision too: there 1 - 1e-9 may be 1.

  Args:
    value: The value, as `broadcast` takes it. Traced numbers are not known.
    name: What the error calls it.
    minimum: The smallest allowed number.
    above: All numbers are greater; so none is infinite.
    maximum: The largest allowed number.
    below: All numbers are less.
    whole: Whether only ints are allowed, and none may be traced: for what
      decides the shape of a buffer.
  """
  bounds = {">=": minimum, ">": above, "<=": maximum, "<": below}
  allowed = f"hold {_describe(bounds, whole)}"
  for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None):
    _check_leaf(leaf, value, name, bounds, allowed, whole)


def check_number(
  value: Any,
  name: str,
  *,
  minimum: float = 0.0,
  above: float = -np.inf,
  maximum: float = np.inf,
  below: float = np.inf,
  whole: bool = False,
  alternative: str = "",
) -> None:
  """Raises a ValueError unless a value is one number, the same for all stages.

  One value a stage would be broadcast against the axes of the weights.

  Args:
    value: The value; one that is traced has no known number, but a shape.
    name: What the error calls it.
    minimum: As for `check_numbers`, like all bounds.
    above: Likewise.
    maximum: Likewise.
    below: Likewise.
    whole: Likewise.
    alternative: What else the caller takes, for the error.
  """
  bounds = {">=": minimum, ">": above, "<=": maximum, "<": below}
  allowed = f"be one {_describe(bounds, whole).replace('s', '', 1)}"
  if alternative:
    allowed += f", or {alternative}"
  if not is_scalar(value):
    hint = "" if alternative else _schedule_hint(value)
    raise ValueError(f"{name} must {allowed}, got {value!r}{hint}.")
  _check_leaf(value, value, name, bounds, allowed, whole)


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


def _describe(bounds: dict[str, float], whole: bool) -> str:
  """Says which numbers are allowed, in the plural."""
  low = ">" if bounds[">"] >= bounds[">="] else ">="
  high = "<" if bounds["<"] <= bounds["<="] else "<="
  limits = [
    f"{sign} {bounds[sign]:g}"
    for sign in (low, high)
    if np.isfinite(bounds[sign])
  ]
  kind = "ints" if whole else "real numbers"
  if len(limits) < 2 and not whole:
    kind = f"finite {kind}"
  return " ".join([kind, " and ".join(limits)]).strip()


def _check_leaf(
  leaf: Any,
  value: PerStage,
  name: str,
  bounds: dict[str, float],
  allowed: str,
  whole: bool,
) -> None:
  """Raises a ValueError unless a leaf of a value is allowed, or not known."""
  is_traced = isinstance(leaf, jax_core.Tracer)
  if is_traced and not whole:
    return
  known = None if is_traced else np.asarray(leaf)
  kinds = (np.integer,) if whole else (np.integer, np.floating)
  if known is None or not any(
    np.issubdtype(known.dtype, k) or jnp.issubdtype(known.dtype, k)
    for k in kinds
  ):
    hint = "" if whole else _schedule_hint(leaf)
    raise ValueError(f"{name} must {allowed}, got {value!r}{hint}.")
  working = jnp.result_type(float)
  if not _is_within(known, bounds, np.float64):
    raise ValueError(f"{name} must {allowed}, got {value!r}.")
  if not _is_within(known, bounds, working):
    raise ValueError(f"{name} must {allowed} in {working}, got {value!r}.")


def _schedule_hint(value: Any) -> str:
  if not callable(value):
    return ""
  return "; a schedule of it goes through optax.inject_hyperparams"


def _is_within(known: np.ndarray, bounds: dict[str, float], dtype: Any) -> bool:
  """Whether all numbers are, in a precision without subnormal numbers."""
  with np.errstate(over="ignore", under="ignore"):
    number = known.astype(dtype)
  number = np.where(np.abs(number) < np.finfo(dtype).tiny, 0, number)
  low, above, high, below = bounds.values()
  inside = (number >= low) & (number > above) & (number <= high)
  return bool((inside & (number < below)).all())


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
