"""Back-propagation through a stage whose weights changed in between.

In a pipeline that is not drained, the backward pass of a micro-batch meets
weights other than its forward pass did. `saved` and `recompute` make, of a
stage's function `f(params, x)`, a function `f(params_fwd, params_bwd, x)` whose
value is that of `f(params_fwd, x)` and whose gradient is what such a pipeline
computes, carried by `params_bwd`. Further arguments (random keys, a stage's
state) are constants: neither weights nor activations.
"""

from collections.abc import Callable
from typing import Any

import jax

from pbp_jax import stages
from pbp_jax import two_version_interpreter as interpreter

# f(params, x, *constants), and f(params_fwd, params_bwd, x, *constants).
OneVersion = Callable[..., stages.PyTree]
TwoVersion = Callable[..., stages.PyTree]


def recompute(function: OneVersion) -> TwoVersion:
  """Backward by recomputing the stage on the newest weights.

  Value `y = f(params_fwd, x)`; gradient that of `f` at `(params_bwd, x)`: what
  hardware does that saves the stage's input only (activation checkpointing)
  and runs the stage again on the weights it holds when the gradient arrives.

  Args:
    function: `f(params, x, *constants) -> y`, any pytrees.

  Returns:
    `f(params_fwd, params_bwd, x, *constants) -> y`. The gradient with respect
    to params_fwd is zero. Reverse mode only.

  Example:
    >>> import jax
    >>> square = recompute(lambda w, x: (w * x) ** 2)
    >>> value, grad = jax.value_and_grad(square, argnums=1)(2.0, 3.0, 1.0)
    >>> float(value), float(grad)
    (4.0, 6.0)
  """

  @jax.custom_vjp
  def two_version(params_fwd, params_bwd, *rest):
    del params_bwd
    return function(params_fwd, *rest)

  def forward(*arguments):
    return two_version(*arguments), arguments

  def backward(arguments, cotangent):
    params_fwd, *point = arguments
    _, pullback = jax.vjp(function, *point)
    return (interpreter.zero_cotangents(params_fwd), *pullback(cotangent))

  two_version.defvjp(forward, backward)
  return two_version


def saved(function: OneVersion) -> TwoVersion:
  """Backward on saved activations and the newest weights.

  Value `y = f(params_fwd, x)`. In the gradient, activations, masks and
  statistics are those of the forward pass on params_fwd, and every operation
  that reads a weight uses params_bwd: what hardware without recomputation does.
  For `y = sigma(w x)` with `a = w_fwd x`: `dw = (dy * sigma'(a)) x` and
  `dx = w_bwd (dy * sigma'(a))`. It costs what plain back-propagation costs.

  Elementwise products of several factors depend on their association: in
  `y * (rsqrt(var) * scale)` the factor in brackets is an activation, made on
  the forward's `scale`, as far as `y`'s gradient is concerned. The kernels of
  dense and convolutional layers do not.

  Functions with a derivative rule of their own (`jax.custom_jvp`,
  `jax.custom_vjp`: straight-through estimators, hand-written convolutions) are
  kept whole: value on params_fwd, their own rule on params_bwd.

  Args:
    function: `f(params, x, *constants) -> y`, any pytrees.

  Returns:
    `f(params_fwd, params_bwd, x, *constants) -> y`. The gradient with respect
    to params_fwd is zero. Reverse mode only.

  Raises:
    ValueError: When called, if the function mixes weights with input in a
      construct that can't be taken apart, such as a `while_loop`; it is named.

  Example:
    >>> import jax
    >>> square = saved(lambda w, x: (w * x) ** 2)
    >>> value, grad = jax.value_and_grad(square, argnums=1)(2.0, 3.0, 1.0)
    >>> float(value), float(grad)
    (4.0, 4.0)
  """

  def two_version(params_fwd, params_bwd, x, *constants):
    jaxpr, out_shape = jax.make_jaxpr(function, return_shape=True)(
      params_fwd, x, *constants
    )
    operands: list[Any] = [
      interpreter.Weight(jax.lax.stop_gradient(fwd), bwd)
      for fwd, bwd in zip(
        jax.tree.leaves(params_fwd),
        jax.tree.leaves(params_bwd),
        strict=True,
      )
    ]
    operands += map(interpreter.Activation, jax.tree.leaves(x))
    operands += jax.tree.leaves(constants)
    outputs = interpreter.evaluate(jaxpr.jaxpr, jaxpr.consts, operands)
    return jax.tree.unflatten(
      jax.tree.structure(out_shape), map(interpreter.hand_on, outputs)
    )

  return two_version
