"""Many runs that differ in numbers, on all devices of all processes."""

from collections.abc import Callable
from typing import Any

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from pbp_jax.devices import mesh as mesh_lib
from pbp_jax.devices import stacking
from pbp_jax.stages import PyTree

SWEEP = "sweep"


def sweep(
  function: Callable[..., Any],
  *arguments: PyTree,
  devices: Any = None,
) -> PyTree:
  """Maps a function over seeds or settings, which the devices share.

  `jax.vmap(function)(*arguments)` by `jax.shard_map` over a mesh of all
  devices, under `jax.distributed` those of all processes: each device computes
  its part of the leading axis. If the devices can't share it evenly, the last
  entry is computed several times. Runs don't exchange anything.

  Args:
    function: A function of one run's numbers, such as one that makes a
      `Simulator` with them, trains and returns its losses; what it closes over
      must be the same on all processes, as arrays of NumPy.
    *arguments: Its arguments, stacked along a leading axis; arrays, the same on
      all processes. Give seeds in place of random keys.
    devices: Which devices; by default `jax.devices()`.

  Returns:
    The results, stacked likewise, NumPy arrays on every process.

  Raises:
    ValueError: If the arguments are no arrays of numbers or their leading axes
      differ, the devices are none or not all different, or the function returns
      anything but numbers.

  Example:
    >>> import jax, jax.numpy as jnp, numpy as np, optax
    >>> import pbp_jax as pbp
    >>> stages = pbp.as_stages([pbp.Stage(
    ...   lambda key, x: jax.random.normal(key, x.shape), jnp.multiply)])
    >>> x, y = np.ones((50, 3)), np.zeros((50, 3))
    >>> def train(seed, rate):
    ...   simulator = pbp.Simulator(
    ...     stages, lambda y, t: jnp.sum((y - t) ** 2), optax.sgd(rate),
    ...     pbp.schedules.synchronous(1))
    ...   state = simulator.init(jax.random.key(seed), x[0])
    ...   _, metrics = simulator.run(state, x, y)
    ...   return metrics["loss"]
    >>> losses = sweep(train, np.arange(4), np.array([0.01, 0.02, 0.1, 0.2]))
    >>> losses.shape, bool((losses[:, -1] < losses[:, 0]).all())
    ((4, 50), True)
  """
  if not callable(function):
    raise ValueError(f"function must be a function, got {function!r}.")
  count = stacking.length(arguments=arguments)
  grid = np.asarray(mesh_lib.as_devices(devices))
  mesh = sharding.Mesh(grid, (SWEEP,))
  spec = sharding.PartitionSpec(SWEEP)
  filled = np.minimum(np.arange(count + -count % len(grid)), count - 1)
  shared = jax.tree.map(lambda leaf: np.asarray(leaf)[filled], arguments)

  def checked(*own):
    result = function(*own)
    for leaf in jax.tree.leaves(result):
      if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        raise ValueError(
          "function must return numbers, got random keys; return"
          " jax.random.key_data of them."
        )
    return result

  run = jax.shard_map(
    jax.vmap(checked),
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    # Scans start from values that are the same on all devices.
    check_vma=False,
  )
  found = jax.jit(run)(*mesh_lib.put(shared, mesh, spec))
  return jax.tree.map(lambda leaf: leaf[:count], mesh_lib.fetch(found, mesh))
