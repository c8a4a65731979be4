"""The mesh of a pipeline, and how arrays get onto it and back."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import sharding
import numpy as np

from pbp_jax.stages import PyTree

REPLICA, STAGE = "replica", "stage"
# What differs from device to device has these axes in front.
BY_DEVICE = sharding.PartitionSpec(REPLICA, STAGE)
EVERYWHERE = sharding.PartitionSpec()


def make_mesh(
  num_stages: int,
  num_replicas: int = 1,
  devices: Sequence[Any] | None = None,
) -> sharding.Mesh:
  """The mesh of a pipeline and its replicas.

  Args:
    num_stages: Devices a pipeline.
    num_replicas: Pipelines that train on parts of each micro-batch.
    devices: Which devices, in the order of the pipeline, one replica after the
      other; by default the first ones of `jax.devices()`. Neighbours in the
      pipeline should have a fast connection.

  Returns:
    A mesh with the axes "replica" and "stage".

  Raises:
    ValueError: If there are too few devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  wanted = num_stages * num_replicas
  if len(devices) < wanted:
    raise ValueError(
      f"A pipeline of num_stages={num_stages} on num_replicas={num_replicas}"
      f" needs {wanted} devices, got {len(devices)}. Merge stages"
      " (pbp.devices.partition), or on a CPU set"
      f" XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
    )
  grid = np.empty(wanted, object)
  grid[:] = devices[:wanted]
  return sharding.Mesh(grid.reshape(num_replicas, num_stages), (REPLICA, STAGE))


def check_mesh(mesh: sharding.Mesh, num_stages: int) -> None:
  """Raises a ValueError unless a mesh is one for so many stages."""
  if mesh.axis_names != (REPLICA, STAGE) or mesh.shape[STAGE] != num_stages:
    raise ValueError(
      f"mesh must have the axes {(REPLICA, STAGE)} with {num_stages} devices"
      f" along the second; got {dict(mesh.shape)}. See pbp.devices.make_mesh."
    )


def put(
  tree: PyTree, mesh: sharding.Mesh, spec: sharding.PartitionSpec
) -> PyTree:
  """Puts arrays, which all processes have, onto a mesh.

  Args:
    tree: The arrays, the same on all processes.
    mesh: The mesh.
    spec: How they are to lie on it.

  Returns:
    The arrays on the mesh; each process has copied to its own devices only.
  """
  target = sharding.NamedSharding(mesh, spec)
  if target.is_fully_addressable:
    return jax.device_put(tree, target)

  def put_leaf(leaf):
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
      host.shape, target, lambda index: host[index]
    )

  return jax.tree.map(put_leaf, tree)


def fetch(tree: PyTree, mesh: sharding.Mesh) -> PyTree:
  """Brings arrays from all devices to every process.

  Args:
    tree: Arrays on the mesh.
    mesh: The mesh.

  Returns:
    NumPy arrays.
  """
  everywhere = sharding.NamedSharding(mesh, EVERYWHERE)
  if not everywhere.is_fully_addressable:
    tree = jax.jit(lambda x: x, out_shardings=everywhere)(tree)
  return jax.tree.map(np.asarray, tree)
