"""Gradient shrinking: the longer an error travels, the less it counts."""

from collections.abc import Iterable
import dataclasses
from typing import Any

import jax
from jax import core as jax_core
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax import stages as stages_lib
from pbp_jax.transforms import arithmetic, per_stage


def shrink_gradients(
  factor: ArrayLike, hops: per_stage.PerStage | None = None
) -> optax.GradientTransformation:
  """Multiplies the gradient of stage s by `factor` for every hop of its error.

  `uₛ = β^(S - 1 - s) gₛ`, with β the factor and S - 1 - s the hops from the
  last stage, where the loss is, to stage s. Early stages, whose gradients are
  the stalest, learn slower. It is stateless and knows no delay; β = 1 is the
  identity. In a pipeline of many fine stages even β = .8 all but stops the
  first ones: 33 hops leave `6e-4` of the gradient.

  It is the gradient that shrinks, so coupled weight decay that is added after
  it does not, and an optimizer that normalises (Adam) undoes it.
  `shrink_errors` multiplies the travelling error itself: for the gradient it is
  the same.

  Args:
    factor: β in [0, 1]; the source uses .2 to .8. May be traced.
    hops: How often the error hopped: a scalar, one value a stage, or a pytree
      prefix of the parameters. By default S - 1 - s, which needs parameters
      whose top level is a list or tuple of stages.

  Returns:
    A transformation without a state.

  Raises:
    ValueError: If the factor is out of range or, in use, the parameters are no
      list or tuple of stages and `hops` is not given.

  References:
    Zhuang et al., Fully Decoupled Neural Network Learning Using Delayed
    Gradients, arXiv 1906.09108: as read in the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.shrink_gradients(0.5)
    >>> gradients = (jnp.ones(2), jnp.ones(1), jnp.ones(1))
    >>> shrunk, _ = link.update(gradients, optax.EmptyState())
    >>> print(*shrunk)
    [0.25 0.25] [0.5] [1.]
  """
  _check_factor(factor)
  if hops is not None:
    per_stage.check_numbers(hops, "hops")

  def hops_of(updates):
    if hops is not None:
      return per_stage.broadcast(hops, updates, "hops")
    if not isinstance(updates, list | tuple):
      raise ValueError(
        "shrink_gradients needs hops, one value a part of the parameters, since"
        f" they are no list or tuple of stages but {type(updates).__name__}."
      )
    return per_stage.broadcast(list(range(len(updates)))[::-1], updates, "hops")

  def update_fn(updates, state, params=None):
    del params
    if not jax.tree.leaves(updates):
      return updates, state
    shrunk = jax.tree.map(
      lambda g, h: arithmetic.linear_combination((_power(factor, h), g)),
      updates,
      hops_of(updates),
    )
    return shrunk, state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)


def shrink_errors(
  stages: Iterable[Any], factor: ArrayLike
) -> tuple[stages_lib.Stage, ...]:
  """Makes every stage hand on only a part of the error of its input.

  The stages compute the same; the error that a stage sends to the one before
  it, the gradient with respect to its input, is multiplied by `factor`. So the
  gradient of stage s gets `β^(S - 1 - s)`, as by `shrink_gradients`, whatever
  the weights of the passes, and whatever travels between the stages. Unlike the
  link it acts before anything an optimizer does, and is no part of its state.

  Args:
    stages: The pipeline, input first: whatever `as_stages` takes.
    factor: β in [0, 1]; may be traced.

  Returns:
    The stages, to be given to `Simulator`.

  Raises:
    ValueError: If the factor is out of range or the stages are none.

  References:
    As `shrink_gradients`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> (stage,) = pbp.shrink_errors([jnp.sin], 0.5)
    >>> float(jax.grad(lambda x: stage.apply({}, x))(0.0))
    0.5
  """
  _check_factor(factor)

  def wrap(stage):
    place = 0 if stage.init_state is None else 1  # of the input, after params

    def apply(params, *rest):
      rest = list(rest)
      rest[place] = jax.tree.map(shrink, rest[place])
      return stage.apply(params, *rest)

    return dataclasses.replace(stage, apply=apply)

  def shrink(leaf):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      return leaf  # no error travels back through integers
    return _scale_cotangent(leaf, factor)

  return tuple(map(wrap, stages_lib.as_stages(stages)))


@jax.custom_vjp
def _scale_cotangent(x: jax.Array, factor: ArrayLike) -> jax.Array:
  """The identity, whose cotangent is multiplied by a factor."""
  del factor
  return x


def _scale_cotangent_fwd(x, factor):
  return x, factor


def _scale_cotangent_bwd(factor, cotangent):
  scaled = arithmetic.linear_combination((factor, cotangent))
  return scaled, jnp.zeros_like(factor)


_scale_cotangent.defvjp(_scale_cotangent_fwd, _scale_cotangent_bwd)


def _check_factor(factor: ArrayLike) -> None:
  per_stage.check_number(factor, "factor", maximum=1.0)


def _power(base: ArrayLike, exponent: ArrayLike) -> ArrayLike:
  """A power, of known numbers in float64 on the host."""
  if any(isinstance(x, jax_core.Tracer) for x in (base, exponent)):
    base, exponent = jnp.asarray(base), jnp.asarray(exponent)
    # 0^0 has no derivatives, 1^0 has those that are wanted.
    base = jnp.where((base == 0) & (exponent == 0), 1, base)
    return jnp.power(base, exponent)
  return np.power(np.asarray(base, np.float64), exponent)
