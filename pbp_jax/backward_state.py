"""The part of a stage's state that the backward pass advances.

Some layers remember what their backward passes saw, such as the control
variables of Online Normalization. A pass back through a stage has one way out,
the gradient, so such a variable gets its next value by it: what
back-propagation returns as its gradient is the value that the next micro-batch
finds. (Flax's FP8 layers hand their scales on in the same way.)
"""

from collections.abc import Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class BackwardState:
  """Marks a part of a stage's state as advanced by the backward pass.

  A stage's `init_state` wraps that part of the state in it, at any depth. The
  stage reads `.value`, and returns the part unchanged. Its derivative rule (a
  `jax.custom_vjp`) returns the part's next value in the place of its gradient,
  so each part is to be used once in a micro-batch.

  Micro-batches pass a stage in their order, forward and backward, however long
  the delay between the two. So a backward state advances in that order as well,
  once a micro-batch, not once an update.

  Attributes:
    value: A pytree of floating arrays.

  Example:
    A stage that doubles its input, and counts its backward passes:

    >>> import jax, jax.numpy as jnp, optax
    >>> import pbp_jax as pbp
    >>> @jax.custom_vjp
    ... def double(x, count):
    ...   return 2 * x
    >>> double.defvjp(
    ...   lambda x, count: (2 * x, count),
    ...   lambda count, error: (2 * error, count + 1))
    >>> stage = pbp.Stage(
    ...   init=lambda key, x: {},
    ...   apply=lambda params, state, x: (double(x, state.value), state),
    ...   init_state=lambda key, x: pbp.BackwardState(jnp.zeros([])))
    >>> simulator = pbp.Simulator(
    ...   [stage], lambda y, t: jnp.sum(y), optax.sgd(0.1),
    ...   pbp.schedules.synchronous(1))
    >>> state = simulator.init(jax.random.key(0), jnp.ones(3))
    >>> state, _ = simulator.run(state, jnp.ones((5, 3)), jnp.ones(5))
    >>> float(state.stage_state[0].value)
    5.0
  """

  value: Any


def get(states: Any) -> list[Any]:
  """The values of all backward states in a pytree, in its order.

  Args:
    states: The states of the stages.

  Returns:
    The values, a list.

  Raises:
    ValueError: If a value has a leaf that isn't floating, whose gradient could
      not be its next value.

  Example:
    >>> get((None, {"u": BackwardState(1.0), "mean": 2.0}))
    [1.0]
  """
  values = [
    node.value
    for node in jax.tree.leaves(states, is_leaf=_is_marked)
    if _is_marked(node)
  ]
  for leaf in jax.tree.leaves(values):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
      raise ValueError(
        "A BackwardState must hold floating arrays, whose gradients are their"
        f" next values; got {jnp.result_type(leaf)}."
      )
  return values


def put(states: Any, values: Sequence[Any]) -> Any:
  """The same pytree with other values of its backward states.

  Args:
    states: The states of the stages.
    values: As `get` returns them.

  Returns:
    The states.

  Example:
    >>> put({"mean": 2.0, "u": BackwardState(1.0)}, [5.0])
    {'mean': 2.0, 'u': BackwardState(value=5.0)}
  """
  rest = iter(values)
  return jax.tree.map(
    lambda node: BackwardState(next(rest)) if _is_marked(node) else node,
    states,
    is_leaf=_is_marked,
  )


def _is_marked(node: Any) -> bool:
  return isinstance(node, BackwardState)
