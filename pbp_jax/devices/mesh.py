"""The mesh of a pipeline, and how arrays get onto it and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import sharding
import numpy as np

from pbp_jax import schedules
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
    ValueError: If a number is no int >= 1, or there are too few devices or not
      all different.
  """
  num_stages = schedules.check_count("num_stages", num_stages, minimum=1)
  num_replicas = schedules.check_count("num_replicas", num_replicas, minimum=1)
  devices = as_devices(devices)
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


def as_devices(devices: Any, name: str = "devices") -> list[Any]:
  """The devices given, by default all there are, as a list.

  Args:
    devices: Devices, or None.
    name: What errors call them.

  Returns:
    One or more devices, all different.

  Raises:
    ValueError: If they are anything else.
  """
  if devices is None:
    return jax.devices()
  found = list(devices) if isinstance(devices, Iterable) else []
  if (
    not found
    or not all(isinstance(device, jax.Device) for device in found)
    or len(set(found)) < len(found)
  ):
    raise ValueError(
      f"{name} must be a sequence of one or more devices, each once, such as"
      f" jax.devices(); got {devices!r}."
    )
  return found


def check_mesh(mesh: Any, num_stages: int) -> None:
  """Raises a ValueError unless a mesh is one for so many stages."""
  if not isinstance(mesh, sharding.Mesh):
    raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}.")
  if mesh.axis_names != (REPLICA, STAGE) or mesh.shape[STAGE] != num_stages:
    raise ValueError(
      f"mesh must have the axes {(REPLICA, STAGE)} with {num_stages} devices"
      f" along the second; got {dict(mesh.shape)}. See pbp.devices.make_mesh."
    )
  as_devices(list(mesh.devices.flat), "mesh.devices")


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
