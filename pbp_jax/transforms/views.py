"""Views: what a pass sees instead of the raw weights.

A mitigation that changes the weights a pass meets keeps what it needs in its
optimizer state, and that state's class says what the view is. `predict_params`
finds such states anywhere in an optimizer's state and applies them; neither it
nor the simulator knows any method by name.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

from flax import nnx
import jax
import optax

# Any pytree; parameters, and what is shaped like them.
PyTree = Any
Which = Literal["forward", "backward"]


@runtime_checkable
class Prediction(Protocol):
  """An optimizer state that changes what a pass sees."""

  def predict_view(
    self, params: PyTree, enclosing: tuple[Any, ...], which: Which
  ) -> PyTree:
    """The weights that a pass sees.

    Args:
      params: The weights, as far as they are predicted already.
      enclosing: The states that hold this one, the innermost first.
      which: The pass.

    Returns:
      A tree like `params`.
    """
    ...


def predict_params(
  opt_state: optax.OptState, params: PyTree, which: Which = "forward"
) -> PyTree:
  """The weights that a pass is to be run on: the view.

  A pure read-out, like `optax.contrib.schedule_free_eval_params`, that works in
  any training loop: take the gradient at `predict_params(opt_state, params)`,
  then call `optimizer.update(gradients, opt_state, params)`. Update, evaluate
  and store the weights, not the view. Without this call a prediction does
  nothing.

  Every prediction state in `opt_state` is applied, whatever holds it
  (`optax.chain`, `inject_hyperparams`, `masked`, `partition`, `MultiSteps`,
  `apply_if_finite`). Leaves that a prediction is masked from stay as they are.

  Args:
    opt_state: The state of the optimizer that updates `params`.
    params: The newest weights.
    which: "forward" or "backward", the pass that is to see the view. Weight
      prediction as in the paper is for the forward pass only.

  Returns:
    A tree of the structure and dtypes of `params`; `params` itself if the state
    holds no prediction.

  Raises:
    ValueError: If `which` is neither, a velocity-form prediction finds no
      momentum buffer or several, the state belongs to other parameters, or an
      optimizer is given for its state.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.trace(decay=0.9),
    ...   optax.scale_by_learning_rate(0.1),
    ...   pbp.linear_weight_prediction(horizon=2.0, learning_rate=0.1))
    >>> params = {"w": jnp.ones(2)}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": jnp.ones(2)}, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params["w"], pbp.predict_params(state, params)["w"])
    [0.9 0.9] [0.7 0.7]
  """
  if which not in ("forward", "backward"):
    raise ValueError(f'which must be "forward" or "backward", got {which!r}.')
  predictions = list(find_predictions(opt_state))
  if not predictions:
    _check_is_state(opt_state, params)
    return params
  bare = without_variables(params)
  for state, enclosing in predictions:
    bare = state.predict_view(bare, enclosing, which)
  return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(bare))


def find_predictions(
  opt_state: optax.OptState,
) -> Iterator[tuple[Prediction, tuple[Any, ...]]]:
  """Finds the prediction states, each with the states that hold it.

  Args:
    opt_state: An optimizer's state.

  Yields:
    A prediction state and its enclosing states, the innermost first.
  """
  for node, enclosing in _walk(without_variables(opt_state), ()):
    if isinstance(node, Prediction):
      yield node, enclosing


def find_momentum(enclosing: tuple[Any, ...], link: str, instead: str) -> Any:
  """Finds the momentum buffer that a prediction belongs to.

  Args:
    enclosing: The states that hold the prediction, the innermost first.
    link: What errors call the prediction.
    instead: What errors recommend where there is no such buffer.

  Returns:
    The one field `trace` in the innermost state that has any.

  Raises:
    ValueError: If that state has several, or none has one.
  """
  buffers = _innermost(enclosing, ("trace",))
  if len(buffers) > 1:
    raise ValueError(
      f"{link} found {len(buffers)} momentum buffers (fields `trace`) beside"
      " it; it needs exactly one. Put it into one optax.chain with the momentum"
      f" it belongs to, or use {instead}."
    )
  if not buffers:
    raise ValueError(
      f"{link} found no momentum buffer (a field `trace`, as of optax.trace or"
      " pbp.spike_compensation) in the optimizer's state. Chain it after one,"
      f" or use {instead}."
    )
  return buffers[0].trace


def find_adam(enclosing: tuple[Any, ...]) -> Any:
  """Finds the moments of Adam that a prediction belongs to.

  Args:
    enclosing: The states that hold the prediction, the innermost first.

  Returns:
    The one state with fields `mu` and `nu` in the innermost state that has any.

  Raises:
    ValueError: If that state has several, or none has one.
  """
  moments = _innermost(enclosing, ("mu", "nu"))
  if len(moments) != 1:
    raise ValueError(
      f"A prediction found {len(moments)} states with Adam's moments (fields"
      " `mu` and `nu`, as of optax.scale_by_adam) beside it; it needs exactly"
      " one. Put it into one optax.chain with the Adam it belongs to."
    )
  return moments[0]


def map_covered(function: Any, params: Any, *others: Any) -> Any:
  """Maps over the leaves that all trees have; leaves the rest as it is.

  Args:
    function: Called with a leaf of each tree.
    params: The tree whose structure the result has.
    *others: Trees like `params`, in which leaves may be masked.

  Returns:
    A tree like `params`.

  Raises:
    ValueError: If another tree has a leaf that `params` does not have.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(params)
  paths = [path for path, _ in leaves]
  columns = []
  for other in others:
    column = dict(jax.tree_util.tree_flatten_with_path(other)[0])
    if foreign := set(column) - set(paths):
      raise ValueError(
        "opt_state must belong to params: it has a leaf at"
        f" {jax.tree_util.keystr(min(foreign, key=str))}, which params do not."
      )
    columns.append(column)
  return jax.tree.unflatten(
    structure,
    [
      function(leaf, *(column[path] for column in columns))
      if all(path in column for column in columns)
      else leaf
      for path, leaf in leaves
    ],
  )


def without_variables(tree: Any) -> Any:
  """Replaces the variables of nnx by their values, in any tree."""
  is_variable = lambda node: isinstance(node, nnx.Variable)
  return jax.tree.map(
    lambda node: node.get_value() if is_variable(node) else node,
    tree,
    is_leaf=is_variable,
  )


def _check_is_state(opt_state: optax.OptState, params: PyTree) -> None:
  """Raises a ValueError where a state without predictions can be none."""
  if any(map(callable, jax.tree.leaves(opt_state))):
    raise ValueError(
      "opt_state must be an optimizer's state, as optimizer.init(params) makes"
      f" it, not the optimizer; got {opt_state!r}."
    )
  if any(True for _ in find_predictions(params)):
    raise ValueError(
      "opt_state must be an optimizer's state, and params weights; got them in"
      " the other order: predict_params(opt_state, params)."
    )


def _is_record(node: Any) -> bool:
  """Whether a node has named fields: a named tuple or a dataclass."""
  return hasattr(node, "_fields") or (
    dataclasses.is_dataclass(node) and not isinstance(node, type)
  )


def _innermost(
  enclosing: tuple[Any, ...], fields: tuple[str, ...]
) -> list[Any]:
  """The records with certain fields in the innermost state that has any."""
  for holder in enclosing:
    records = [
      node
      for node, _ in _walk(holder, ())
      if _is_record(node) and all(hasattr(node, name) for name in fields)
    ]
    if records:
      return records
  return []


def _walk(
  node: Any, enclosing: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
  """Visits the containers of a state, each with those that hold it."""
  children = jax.tree.leaves(node, is_leaf=lambda other: other is not node)
  if children and children[0] is node:
    return
  yield node, enclosing
  for child in children:
    yield from _walk(child, (node, *enclosing))
