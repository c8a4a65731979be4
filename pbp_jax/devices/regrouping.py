"""A run's weights and states, for other groups of the same stages.

Groups only nest their stages' trees: the leaves of all groups together are
those of the stages, in their order, however they are grouped. So do the states
of an optimizer, as far as they are like the weights. What else an optimizer
keeps is either the run's (a count of updates) or follows from the grouping
(horizons, since other groups have other delays); starting the optimizers of
both groupings from the same weights tells which: where the two starts differ,
the grouping says so.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from pbp_jax import argument_checks, tree_forms
from pbp_jax.devices import layout as layout_lib
from pbp_jax.devices import merging
from pbp_jax.stages import PyTree


class Gathered(NamedTuple):
  """A run's weights and states, as the state of a `Simulator` has them.

  Attributes:
    params: The newest raw weights, a tuple of S pytrees.
    opt_state: The optimizer's state.
    stage_state: The state of each stage, None for stages without one.
  """

  params: tuple[PyTree, ...]
  opt_state: optax.OptState
  stage_state: tuple[PyTree, ...]


def fitted(
  gathered: Gathered,
  optimizer: optax.GradientTransformation | None,
  new_optimizer: optax.GradientTransformation,
  layout: layout_lib.Layout,
) -> Gathered:
  """A run's weights and states as a pipeline has them.

  Args:
    gathered: The run's weights and states.
    optimizer: Its optimizer; None if its groups are those of the pipeline.
    new_optimizer: The optimizer of the pipeline.
    layout: What the pipeline's devices hold.

  Returns:
    Weights and states of the pipeline's groups.

  Raises:
    ValueError: If they are not of the pipeline's stages.
  """
  if not all(hasattr(gathered, name) for name in Gathered._fields):
    raise ValueError(
      "gathered must be a pbp.devices.Gathered, as Pipeline.gather returns it;"
      f" got {type(gathered).__name__}."
    )
  # A simulator's state has these fields as well.
  gathered = Gathered(*(getattr(gathered, name) for name in Gathered._fields))
  params, stage_state = layout.params.shapes(), layout.stage_state.shapes()
  if optimizer is not None:
    argument_checks.check_optimizer(optimizer)
    gathered = regroup(gathered, optimizer, new_optimizer, params, stage_state)
  like = Gathered(
    params, jax.eval_shape(new_optimizer.init, params), stage_state
  )
  if other := tree_forms.first_difference(gathered, like):
    raise ValueError(
      "gathered must be of the groups of stages of this pipeline, unless the"
      " optimizer of other groups is given; so must have"
      f" {other.wanted} in gathered{other.path}, got {other.found}."
    )
  return Gathered(*map(merging.take, gathered, like))


def regroup(
  gathered: Gathered,
  optimizer: optax.GradientTransformation,
  new_optimizer: optax.GradientTransformation,
  params: tuple[PyTree, ...],
  stage_state: tuple[PyTree, ...],
) -> Gathered:
  """What a run has, for other groups of its stages.

  Args:
    gathered: The run's weights and states.
    optimizer: Its optimizer.
    new_optimizer: The optimizer of the other groups.
    params: The shapes of their weights.
    stage_state: The shapes of their stages' states.

  Returns:
    Weights and states of the other groups.

  Raises:
    ValueError: If the groups are not of the same stages, or the optimizers
      differ in more than numbers.
  """
  new_params = renest(gathered.params, params, "params")
  return Gathered(
    new_params,
    regroup_opt_state(
      gathered.opt_state,
      optimizer.init(gathered.params),
      new_optimizer.init(new_params),
    ),
    renest(gathered.stage_state, stage_state, "stage_state"),
  )


def renest(tree: PyTree, like: PyTree, name: str) -> PyTree:
  """The leaves of a tree in the structure of another one.

  Args:
    tree: Trees of groups of stages.
    like: Trees, or their shapes, of other groups of the same stages.
    name: What errors call the tree.

  Returns:
    A tree of the structure of `like`.

  Raises:
    ValueError: If the leaves are not of the same shapes and dtypes.

  Example:
    >>> import numpy as np
    >>> one, two = np.ones(1), np.ones(2)
    >>> renest(((one, two),), ((one,), (two,)), "params")
    ((array([1.]),), (array([1., 1.]),))
  """
  leaves, structure = jax.tree.flatten(like)
  wanted = list(map(tree_forms.form, leaves))
  found = list(map(tree_forms.form, jax.tree.leaves(tree)))
  if found != wanted:
    raise ValueError(
      f"gathered.{name} must be of the stages of this pipeline, in groups or"
      f" not, so have the leaves {wanted}; got {found}."
    )
  return jax.tree.unflatten(structure, jax.tree.leaves(tree))


def regroup_opt_state(
  opt_state: PyTree, start: PyTree, new_start: PyTree
) -> PyTree:
  """An optimizer's state for other groups of stages.

  Args:
    opt_state: The state of a run.
    start: The state in which that optimizer starts.
    new_start: The state in which the other groups' optimizer starts from the
      same weights.

  Returns:
    A tree of the structure of `new_start`: of each leaf the run's value, but
    where the starts differ that of `new_start`.

  Raises:
    ValueError: If the states have different numbers of leaves.

  Example:
    >>> import numpy as np
    >>> regroup_opt_state(
    ...   {"count": np.array(7), "horizon": np.array([4, 2, 0])},
    ...   {"count": np.array(0), "horizon": np.array([4, 2, 0])},
    ...   {"count": np.array(0), "horizon": np.array([2, 0])})
    {'count': array(7), 'horizon': array([2, 0])}
  """
  new_leaves, structure = jax.tree.flatten(new_start)
  leaves, old_leaves = jax.tree.leaves(opt_state), jax.tree.leaves(start)
  if not len(leaves) == len(old_leaves) == len(new_leaves):
    raise ValueError(
      "optimizer must be that of the run, and differ from that of this pipeline"
      f" in numbers only; its states have {len(old_leaves)} leaves, those of"
      f" the run {len(leaves)} and those of this pipeline {len(new_leaves)}."
    )
  return jax.tree.unflatten(
    structure,
    [
      leaf if _are_equal(old, new) else new
      for leaf, old, new in zip(leaves, old_leaves, new_leaves, strict=True)
    ],
  )


def _are_equal(a: Any, b: Any) -> bool:
  a, b = np.asarray(a), np.asarray(b)
  return a.dtype == b.dtype and np.array_equal(a, b)
