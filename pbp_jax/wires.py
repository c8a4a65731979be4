"""Wires between stages that XLA does not fuse across.

XLA's CPU compiler fuses cheap operations into each of their users and copies
them for it. Along a chain of residual blocks, `x + f(norm(x))`, every block is
such a user of all sums before it: a chain of S blocks then compiles to a
program of some S² sums. For 34 narrow blocks (`models.residual_mlp`) that is
most of the time to compile and to run. Where a block is costly, as in a ResNet,
the copies do not matter and isolating wires makes a step slower: measure.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pbp_jax import stages as stages_lib


def isolate(x: Any) -> Any:
  """Returns its argument, by an operation that XLA computes only once.

  Each floating leaf is divided by a one that the compiler can't know to be
  one. XLA never copies a division into several users. The result is `x` bit for
  bit (XLA flushes subnormal numbers to zero here as anywhere); so is its
  gradient, which is isolated likewise.

  `jax.lax.optimization_barrier` does not help: the CPU compiler drops it before
  it fuses.

  Args:
    x: A pytree of arrays.

  Returns:
    The same pytree.

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax import wires
    >>> print(wires.isolate(jnp.array([0.1, jnp.inf])))
    [0.1 inf]
  """
  return jax.tree.map(_isolate_leaf, x)


def isolate_stages(
  stages: tuple[stages_lib.Stage, ...],
) -> tuple[stages_lib.Stage, ...]:
  """Isolates the output of every stage.

  Args:
    stages: A pipeline.

  Returns:
    The pipeline of the same parameters, outputs and gradients.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> from pbp_jax import wires
    >>> (stage,) = wires.isolate_stages(pbp.as_stages([jnp.square]))
    >>> stage.name, float(stage.apply({}, jnp.array(3.0)))
    ('square', 9.0)
  """
  return tuple(map(_isolated, stages))


def _isolated(stage: stages_lib.Stage) -> stages_lib.Stage:
  def apply(*args):
    if stage.init_state is None:
      return isolate(stage.apply(*args))
    y, state = stage.apply(*args)
    return isolate(y), state

  return dataclasses.replace(stage, apply=apply)


def _isolate_leaf(leaf: jax.Array) -> jax.Array:
  if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or not leaf.size:
    return leaf
  first = jax.lax.stop_gradient(jnp.ravel(leaf)[0])
  # Zero times a finite number: XLA does not know that it is finite.
  finite = jnp.clip(jnp.nan_to_num(first), -1, 1)
  return leaf / (1 + 0 * finite)
