"""Evaluates a jaxpr on weights in two versions; the machine behind `saved`.

A stage's function is traced to a jaxpr, whose values fall into three classes:
made of weights alone (kept in two versions), made of the input (saved by the
forward pass), and made of neither (constants). An operation that does not mix
weights with input needs nothing new. One that mixes them computes with the
forward version of the weights and is differentiated at the backward version.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp

from pbp_jax import stages

# ---- Values of the three classes: a bare array is a constant.


class Weight(NamedTuple):
  """A value made of weights alone, in both versions."""

  fwd: Any
  bwd: Any


class Activation(NamedTuple):
  """A value that the input went into."""

  value: Any


_Value = Any  # Weight, Activation or a bare array
_CLASSES = (object, Weight, Activation)  # each can be raised to the next


def _class_of(value: _Value) -> type:
  return type(value) if isinstance(value, Weight | Activation) else object


def _highest(classes: Sequence[type]) -> type:
  return max(classes, key=_CLASSES.index)


def _forward(value: _Value) -> Any:
  if isinstance(value, Weight):
    return value.fwd
  return value.value if isinstance(value, Activation) else value


def _backward(value: _Value) -> Any:
  return value.bwd if isinstance(value, Weight) else _forward(value)


@jax.custom_vjp
def _merge(fwd, bwd):
  """The forward version, with a gradient that goes to the backward one."""
  del bwd
  return fwd


_merge.defvjp(
  lambda fwd, bwd: (fwd, None),
  lambda _, cotangent: (jnp.zeros_like(cotangent), cotangent),
)


def _raise_to(kind: type, value: _Value) -> _Value:
  """The value as one of a class that is its own or higher."""
  if isinstance(value, kind):
    return value
  if kind is Weight:
    return Weight(value, value)
  if isinstance(value, Weight) and _is_differentiable(value.fwd):
    return Activation(_merge(value.fwd, value.bwd))
  return Activation(_forward(value))


def hand_on(value: _Value) -> Any:
  """The array that the next stage gets; a weight's gradient goes to it."""
  return _raise_to(Activation, value).value


def _is_differentiable(x: Any) -> bool:
  return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def zero_cotangents(tree: stages.PyTree) -> stages.PyTree:
  """Zeros for floats, and None, custom_vjp's zero, for all else."""
  return jax.tree.map(
    lambda x: jnp.zeros_like(x) if _is_differentiable(x) else None, tree
  )


# ---- The interpreter.


def evaluate(
  jaxpr: jex_core.Jaxpr, consts: Sequence[Any], operands: Sequence[_Value]
) -> list[_Value]:
  """Evaluates a jaxpr on values of the three classes."""
  values: dict[Any, _Value] = dict(zip(jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.invars, operands, strict=True))
  read = lambda atom: (
    atom.val if isinstance(atom, jex_core.Literal) else values[atom]
  )
  for equation in jaxpr.eqns:
    results = _apply(equation, [read(atom) for atom in equation.invars])
    values.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Applies one operation to operands of any classes."""
  classes = {_class_of(operand) for operand in operands}
  if {Weight, Activation} <= classes:
    rule = _MIXED_RULES.get(equation.primitive.name, _apply_mixed)
    return rule(equation, operands)
  forward = _bind(equation, [_forward(operand) for operand in operands])
  if Weight in classes:
    backward = _bind(equation, [_backward(operand) for operand in operands])
    return [Weight(*pair) for pair in zip(forward, backward, strict=True)]
  if Activation in classes:
    return [Activation(y) for y in forward]
  return forward


def _bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
  primitive = equation.primitive
  parameters = primitive.get_bind_params(equation.params)
  results = primitive.bind(*operands, **parameters)
  return list(results) if primitive.multiple_results else [results]


# ---- Rules for operations that mix weights with input.

# Kept whole though they hold a jaxpr: it is a detail of one operation, or the
# operation has a derivative rule of its own.
_WHOLE = frozenset({
    "custom_jvp_call", "custom_vjp_call", "reduce", "scatter", "scatter-add",
    "scatter-mul", "scatter-min", "scatter-max",
})  # fmt: skip


def _apply_mixed(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Computes on the forward weights, differentiates at the backward ones."""
  name = equation.primitive.name
  kinds = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
  inner = [v for v in jax.tree.leaves(equation.params) if isinstance(v, kinds)]
  if inner and name not in _WHOLE:
    raise _cannot_take_apart(f"`{name}`")
  if not any(
    jnp.issubdtype(y.aval.dtype, jnp.inexact) for y in equation.outvars
  ):
    return [
      Activation(y)
      for y in _bind(equation, [_forward(operand) for operand in operands])
    ]
  # Three groups of arguments, since a custom_vjp may not close over traced
  # values: where to differentiate, the forward versions of the weights, and
  # what has no derivative, such as constants that a custom_vjp closes over
  # (None holds the others' places). One that closes over weights or input is
  # refused by JAX.
  num_closed_over = equation.params.get("num_consts", 0)
  moves = [
    _is_differentiable(_forward(operand))
    and (i >= num_closed_over or isinstance(operand, Weight | Activation))
    for i, operand in enumerate(operands)
  ]
  points = [
    _backward(x) if move else None
    for x, move in zip(operands, moves, strict=True)
  ]
  fwd = [x.fwd if isinstance(x, Weight) else None for x in operands]
  still = [
    None if move else _backward(x)
    for x, move in zip(operands, moves, strict=True)
  ]
  first = lambda *columns: [
    next(x for x in row if x is not None) for row in zip(*columns, strict=True)
  ]

  @jax.custom_vjp
  def operation(points, fwd, still):
    return _bind(equation, first(fwd, points, still))

  def forward(*arguments):
    return operation(*arguments), arguments

  def backward(arguments, cotangents):
    points, fwd, still = arguments
    _, pullback = jax.vjp(
      lambda points: _bind(equation, first(points, still)), points
    )
    return (
      *pullback(cotangents),
      zero_cotangents(fwd),
      zero_cotangents(still),
    )

  operation.defvjp(forward, backward)
  return [Activation(y) for y in operation(points, fwd, still)]


def _cannot_take_apart(what: str) -> ValueError:
  return ValueError(
    f'backward="saved" can\'t take apart {what}, which mixes weights with the'
    ' stage\'s input. Use backward="recompute", or write the stage without it.'
  )


def _apply_inlined(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Goes through a function that is called as one operation."""
  jaxpr = equation.params["jaxpr"]
  if isinstance(jaxpr, jex_core.Jaxpr):
    return evaluate(jaxpr, (), operands)
  return evaluate(jaxpr.jaxpr, jaxpr.consts, operands)


def _apply_scan(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Goes through a scan's body, with a carry of values of fixed classes."""
  parameters = equation.params
  num_consts, num_carry = parameters["num_consts"], parameters["num_carry"]
  consts = list(operands[:num_consts])
  carry = list(operands[num_consts : num_consts + num_carry])
  xs = list(operands[num_consts + num_carry :])
  jaxpr = parameters["jaxpr"]

  def body(carry, xs, classes):
    results = evaluate(jaxpr.jaxpr, jaxpr.consts, consts + carry + xs)
    carry = list(map(_raise_to, classes, results[:num_carry]))
    return carry, results[num_carry:]

  def next_classes(classes):
    """The carry's classes after one turn of the loop."""
    start = list(map(_raise_to, classes, carry))
    first = jax.tree.map(lambda x: x[0], xs)
    results = jax.eval_shape(
      lambda carry, xs: evaluate(
        jaxpr.jaxpr, jaxpr.consts, consts + carry + xs
      ),
      start,
      first,
    )
    return [
      _highest((old, _class_of(new)))
      for old, new in zip(classes, results[:num_carry], strict=True)
    ]

  classes = [_class_of(value) for value in carry]
  while (after := next_classes(classes)) != classes:
    classes = after
  last, ys = jax.lax.scan(
    functools.partial(body, classes=classes),
    list(map(_raise_to, classes, carry)),
    xs,
    length=parameters["length"],
    reverse=parameters["reverse"],
    unroll=parameters["unroll"],
  )
  return last + ys


def _apply_cond(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Goes through every branch; the results are of the highest class."""
  index, *operands = operands
  if isinstance(index, Weight):
    raise _cannot_take_apart("a `cond` or `switch` that branches on a weight")
  branches = [
    functools.partial(evaluate, branch.jaxpr, branch.consts)
    for branch in equation.params["branches"]
  ]
  results = [jax.eval_shape(branch, list(operands)) for branch in branches]
  # What the input chooses among weights is a weight; among constants, its own.
  classes = [
    Activation if kind is object and isinstance(index, Activation) else kind
    for kind in (
      _highest(list(map(_class_of, values)))
      for values in zip(*results, strict=True)
    )
  ]
  return jax.lax.switch(
    _forward(index),
    [
      lambda operands, branch=branch: list(
        map(_raise_to, classes, branch(operands))
      )
      for branch in branches
    ],
    list(operands),
  )


def _apply_select(equation: Any, operands: Sequence[_Value]) -> list[_Value]:
  """Weights that the input chooses between are weights: `vmap` of a `cond`."""
  if any(isinstance(case, Activation) for case in operands[1:]):
    return _apply_mixed(equation, operands)
  forward = _bind(equation, [_forward(operand) for operand in operands])
  backward = _bind(equation, [_backward(operand) for operand in operands])
  return [Weight(*pair) for pair in zip(forward, backward, strict=True)]


_MIXED_RULES = {
  "select_n": _apply_select,
  "jit": _apply_inlined,
  "pjit": _apply_inlined,
  "closed_call": _apply_inlined,
  "core_call": _apply_inlined,
  "remat2": _apply_inlined,
  "checkpoint": _apply_inlined,
  "scan": _apply_scan,
  "cond": _apply_cond,
}
