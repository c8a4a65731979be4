"""The compiled program: a scan over ticks, on every device of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax import sharding
import jax.numpy as jnp

from pbp_jax import ring_buffers
from pbp_jax.devices import mesh as mesh_lib
from pbp_jax.devices import passes
from pbp_jax.devices import tick as tick_lib

# Tables have one column a device.
BY_COLUMN = sharding.PartitionSpec(None, mesh_lib.STAGE)


def data_spec(mesh: sharding.Mesh) -> sharding.PartitionSpec:
  """How stacked micro-batches lie on a mesh: replicas share each of them."""
  if mesh.shape[mesh_lib.REPLICA] == 1:
    return mesh_lib.EVERYWHERE
  return sharding.PartitionSpec(None, mesh_lib.REPLICA)


def make(
  work: passes.Passes, mesh: sharding.Mesh, *, donate: bool
) -> Callable[..., Any]:
  """Compiles the program, for each number of ticks anew.

  Args:
    work: The passes.
    mesh: The mesh.
    donate: Whether the memory of what the devices hold is reused.

  Returns:
    `program(held, inputs, targets, tables, key_data, entering, index) ->
    (held, loss, busy)`: `tables` is a `TickTables`; `entering` and `index`
    say, for each tick, which micro-batch enters and where its data is. The
    losses are `[ticks]`, and `busy` is `[ticks, devices, 2]`.
  """

  def ticks(held, inputs, targets, tables, key_data, entering, index):
    key = jax.random.wrap_key_data(key_data)

    def body(held, now):
      row, entering, index = now
      read = lambda data: jax.tree.map(
        lambda leaf: ring_buffers.read(leaf, index), data
      )
      clock = tick_lib.Clock(key, entering, read(inputs), read(targets))
      row = jax.tree.map(lambda column: column[0], row)
      return tick_lib.tick(work, held, clock, row)

    held, done = jax.lax.scan(
      body,
      jax.tree.map(lambda leaf: leaf[0, 0], held),
      (tables, entering, index),
    )
    loss = jax.lax.psum(done.loss, mesh_lib.STAGE)
    busy = jnp.stack([done.forward, done.backward], axis=-1)
    return (
      jax.tree.map(lambda leaf: leaf[None, None], held),
      jax.lax.pmean(loss, mesh_lib.REPLICA),
      jax.lax.all_gather(busy, mesh_lib.STAGE, axis=1),
    )

  data, everywhere = data_spec(mesh), mesh_lib.EVERYWHERE
  sharded = jax.shard_map(
    ticks,
    mesh=mesh,
    in_specs=(
      mesh_lib.BY_DEVICE, data, data, BY_COLUMN,
      everywhere, everywhere, everywhere,
    ),
    out_specs=(mesh_lib.BY_DEVICE, everywhere, everywhere),
    # Devices take different branches, which the check can't follow.
    check_vma=False,
  )  # fmt: skip
  return jax.jit(sharded, donate_argnums=0 if donate else ())
