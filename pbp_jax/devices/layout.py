"""The shapes of all that devices hold and send, known before anything runs."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pbp_jax import network
from pbp_jax import stages as stages_lib
from pbp_jax.devices import packing
from pbp_jax.op_by_op import op_by_op
from pbp_jax.stages import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """The common form of what differs from device to device.

  Attributes:
    params: Of the weights.
    opt_state: Of the optimizer's states.
    stage_state: Of the stages' states.
    activations: Of what travels: tree p is the input of device p, and the last
      one the output of the pipeline. Errors have the same form.
    targets: The shapes of a micro-batch's targets.
  """

  params: packing.Packing
  opt_state: packing.Packing
  stage_state: packing.Packing
  activations: packing.Packing
  targets: PyTree


def of(
  stages: Sequence[stages_lib.Stage],
  optimizer: optax.GradientTransformation,
  example: tuple[PyTree, PyTree],
) -> Layout:
  """The layout of a pipeline.

  Args:
    stages: The stage of each device.
    optimizer: The optimizer of all devices' weights.
    example: Shapes and dtypes of the inputs and targets that a pipeline gets in
      one micro-batch.

  Returns:
    The layout.

  Raises:
    ValueError: If a stage can't take what the stage before it gives.
  """
  inputs, targets = example
  params, stage_state = jax.eval_shape(
    lambda key: init_network(stages, key, inputs), jax.random.key(0)
  )
  activations = [inputs]
  for stage, own_params, own_state in zip(
    stages, params, stage_state, strict=True
  ):
    activations.append(
      jax.eval_shape(
        lambda *args, stage=stage: stage(*args, None)[0],
        own_params,
        own_state,
        activations[-1],
      )
    )
  opt_states = [
    jax.eval_shape(optimizer.init, alone(own_params, p, len(stages)))
    for p, own_params in enumerate(params)
  ]
  return Layout(
    packing.of(params),
    packing.of(opt_states),
    packing.of(stage_state),
    packing.of(activations),
    targets,
  )


def init_network(
  stages: Sequence[stages_lib.Stage], key: jax.Array, inputs: PyTree
) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
  """Draws weights and states for inputs of given shapes, as the simulator.

  Args:
    stages: The stages.
    key: A random key.
    inputs: Shapes and dtypes of the inputs.

  Returns:
    The weights and the states of the stages.
  """
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
  return op_by_op(functools.partial(network.init, stages))(key, zeros)


def alone(params: PyTree, p: int, num_stages: int) -> tuple[PyTree, ...]:
  """A device's weights in the place they have among those of all devices.

  So the optimizer finds the values of this device where it was given one value
  a stage; in the places of the others is nothing.

  Args:
    params: The weights of device p.
    p: The device.
    num_stages: Devices in all.

  Returns:
    A tuple of as many trees as there are devices.
  """
  return tuple(params if q == p else {} for q in range(num_stages))


def shapes(tree: Any) -> Any:
  """The shapes and dtypes of a tree's leaves."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree
  )


def shapes_of_example(example: Any) -> tuple[PyTree, PyTree]:
  """The shapes and dtypes of a micro-batch's inputs and targets.

  Args:
    example: A pair of trees of arrays, or of their shapes.

  Returns:
    A pair of trees of shapes.

  Raises:
    ValueError: If it is anything else.
  """
  if not isinstance(example, tuple) or len(example) != 2:
    raise ValueError(
      "example must be a pair (inputs, targets) of one micro-batch, got"
      f" {type(example).__name__}."
    )
  try:
    # An array first: JAX takes a string for the name of a dtype.
    return shapes(jax.tree.map(_as_array, example))
  except TypeError as error:
    raise ValueError(
      f"example must be arrays of numbers, or their shapes; got {example!r}."
    ) from error


def _as_array(leaf: Any) -> Any:
  return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def part_of_replica(example: PyTree, num_replicas: int) -> PyTree:
  """The shapes of the part of a micro-batch that one replica gets.

  Args:
    example: Shapes and dtypes of a micro-batch.
    num_replicas: How many share it along its first axis.

  Returns:
    Shapes and dtypes.

  Raises:
    ValueError: If the first axis can't be shared evenly.
  """
  if num_replicas == 1:
    return example

  def part(leaf):
    if not leaf.shape or leaf.shape[0] % num_replicas:
      raise ValueError(
        "example must have a first axis that the replicas can share evenly,"
        f" num_replicas={num_replicas}; got shape {leaf.shape}."
      )
    shape = (leaf.shape[0] // num_replicas, *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)

  return jax.tree.map(part, example)
