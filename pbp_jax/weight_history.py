"""The last versions of the weights, and which of them a pass meets."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pbp_jax import materialization, ring_buffers
from pbp_jax.pipeline_state import PipelineState
from pbp_jax.stages import PyTree


def init(
  weights: Sequence[PyTree],
  max_lags: Iterable[int],
  dtype: DTypeLike | None = None,
) -> tuple[PyTree, ...]:
  """Rings all of whose slots hold version 0.

  Args:
    weights: Version 0 of each stage.
    max_lags: The largest lag of each stage.
    dtype: What floating-point weights are kept in; None for their own.

  Returns:
    For each stage a ring of `max_lag + 1` slots, its leaves `[slots, ...]`;
    None where there is no lag or there are no weights.
  """
  return tuple(
    _new_ring(stage, lag, dtype)
    for stage, lag in zip(weights, max_lags, strict=True)
  )


def on_rings(
  function: Callable[..., tuple[PipelineState, PyTree]],
  state: PipelineState,
  *args: PyTree,
) -> tuple[PipelineState, PyTree]:
  """Calls a function with a state that holds `Ring`s of its histories.

  Args:
    function: Takes a state and `args`, returns the next state and metrics.
    state: A state, whose histories are arrays.
    *args: What else it takes.

  Returns:
    What it returns, but for the state's histories, which are arrays again.
  """
  state = _with_histories(state, ring_buffers.Ring.of)
  state, metrics = function(state, *args)
  return _with_histories(state, lambda ring: ring.values), metrics


def _with_histories(
  state: PipelineState, change: Callable[[Any], Any]
) -> PipelineState:
  def changed(history):
    if history is None:
      return None
    return tuple(None if stage is None else change(stage) for stage in history)

  return dataclasses.replace(
    state,
    history=changed(state.history),
    raw_history=changed(state.raw_history),
  )


def meet(
  history: tuple[ring_buffers.Ring | None, ...],
  newest: Sequence[PyTree],
  version: jax.Array,
  lags: ArrayLike,
) -> tuple[tuple[PyTree, ...], tuple[ring_buffers.Ring | None, ...]]:
  """The weights that passes meet, and the rings that they are kept in.

  A ring is written before it is read: XLA then updates it in place. Version k
  is in slot k modulo the number of slots, which all held version 0 at first, so
  nothing special happens while the pipeline fills.

  Args:
    history: A ring for each stage, or None.
    newest: The weights of this version.
    version: How many updates made them.
    lags: How many versions older those are that are met, `[S]`.

  Returns:
    The weights met, and the rings.
  """
  # All slots at once: a division a stage costs more than a small stage's ring.
  # Nothing is negative, so a plain remainder will do: what the modulo does
  # about signs, XLA would compute again for every number that is read.
  num_slots = jnp.array(
    [1 if ring is None else ring.num_slots for ring in history], version.dtype
  )
  slots_written = jax.lax.rem(
    jnp.broadcast_to(version, num_slots.shape), num_slots
  )
  slots_read = jax.lax.rem(
    version + num_slots - jnp.asarray(lags, version.dtype), num_slots
  )
  met, rings = [], []
  for s, (ring, weights) in enumerate(zip(history, newest, strict=True)):
    if ring is not None:
      ring = ring.write(weights, slots_written[s])
      weights = jax.tree.map(
        lambda old, new: old.astype(new.dtype),
        _read(ring, slots_read, s),
        weights,
      )
    met.append(weights)
    rings.append(ring)
  return tuple(met), tuple(rings)


@materialization.materialized(static_argnums=2)
def _read(ring: ring_buffers.Ring, slots: jax.Array, s: int) -> PyTree:
  """Stage s's weights in slot `slots[s]` of its ring, copied by one call.

  The call picks the slot: picking it before would be a kernel of its own.
  """
  return ring.read(slots[s])


def _new_ring(weights: PyTree, max_lag: int, dtype: DTypeLike | None) -> PyTree:
  if max_lag == 0 or not jax.tree.leaves(weights):
    return None

  def ring(leaf):
    leaf = jnp.asarray(leaf)
    if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
      leaf = leaf.astype(dtype)
    return ring_buffers.full(leaf, int(max_lag) + 1)

  return jax.tree.map(ring, weights)
