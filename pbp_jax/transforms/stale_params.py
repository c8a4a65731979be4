"""What links that compare the newest weights with stale ones have in common."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pbp_jax.transforms import views


def map_gaps(
  function: Callable[..., jax.Array],
  updates: optax.Updates,
  params: optax.Params | None,
  stale_params: optax.Params | None,
  *others: Any,
  link: str,
) -> Any:
  """Maps over the gradients and how far their weights have moved since.

  Args:
    function: `function(gradient, gap, *others) -> leaf`, in float32 at least,
      with `gap = newest - stale`.
    updates: The gradients; leaves may be masked.
    params: The newest weights; may be whole where `updates` are masked.
    stale_params: The weights that the forward passes met, likewise.
    *others: Trees like `updates`.
    link: What errors call the link.

  Returns:
    A tree like `updates`, of what `function` returns.

  Raises:
    ValueError: If one of the two is missing or lacks a leaf of `updates`.
  """
  if params is None:
    raise ValueError(f"{link} needs params, the newest weights, in update.")
  if stale_params is None:
    raise ValueError(
      f"{link} needs the extra argument stale_params in update: the weights"
      " that the forward passes met. Simulator passes it; in a loop of your own"
      " call optimizer.update(gradients, state, params, stale_params=...)."
    )
  leaves, structure = jax.tree.flatten(updates)
  paths = [
    path
    for path, _ in jax.tree_util.tree_flatten_with_path(
      views.without_variables(updates)
    )[0]
  ]
  newest = _leaves_at(paths, params, link, "params")
  stale = _leaves_at(paths, stale_params, link, "stale_params")
  mapped = [
    function(_wide(g), _wide(w) - _wide(w_stale), *map(_wide, rest))
    for g, w, w_stale, *rest in zip(
      leaves, newest, stale, *map(structure.flatten_up_to, others), strict=True
    )
  ]
  return jax.tree.unflatten(structure, mapped)


def cast_like(tree: Any, example: Any) -> Any:
  """Casts every leaf to the dtype of the example's."""
  return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, example)


def wide_zeros(params: optax.Params) -> Any:
  """Zeros like the parameters, in float32 at least."""
  return jax.tree.map(lambda leaf: jnp.zeros_like(_wide(leaf)), params)


def is_read(
  optimizer: optax.GradientTransformationExtraArgs,
  params: optax.Params,
  opt_state: optax.OptState,
) -> bool:
  """Whether an optimizer makes any use of the extra argument `stale_params`.

  Args:
    optimizer: The optimizer.
    params: The weights, or their shapes and dtypes.
    opt_state: The optimizer's state, likewise.

  Returns:
    Whether an update depends on it.
  """
  jaxpr = jax.make_jaxpr(
    lambda params, opt_state, stale_params: optimizer.update(
      params, opt_state, params, stale_params=stale_params
    )
  )(params, opt_state, params).jaxpr
  stale = jaxpr.invars[len(jax.tree.leaves((params, opt_state))) :]
  read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
  read |= {id(v) for v in jaxpr.outvars}
  return any(id(v) in read for v in stale)


def _leaves_at(paths: list[Any], tree: Any, link: str, name: str) -> list[Any]:
  column = dict(
    jax.tree_util.tree_flatten_with_path(views.without_variables(tree))[0]
  )
  for path in paths:
    if path not in column:
      raise ValueError(
        f"{link} needs {name} with a leaf for every gradient, but there is none"
        f" at {jax.tree_util.keystr(path)}."
      )
  return [column[path] for path in paths]


def _wide(leaf: Any) -> jax.Array:
  leaf = jnp.asarray(leaf)
  return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
