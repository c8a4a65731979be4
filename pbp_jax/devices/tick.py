"""One tick of all devices, in their own view of the mesh."""

import dataclasses
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import optax

from pbp_jax import ring_buffers
from pbp_jax.devices import mesh, packing, passes, tick_tables
from pbp_jax.stages import PyTree


@struct.dataclass
class Held:
  """What a device holds between two ticks.

  On the mesh every leaf has two more axes in front, `[replicas, devices]`.

  Attributes:
    params: The newest raw weights.
    opt_state: The optimizer's state.
    stage_state: The stage's state.
    input_wire: What the device before has sent.
    error_wire: What the device behind has sent.
    inputs: A ring of inputs, from their arrival to their backward.
    stage_states: A ring of the states that their forwards met.
    errors: A ring of errors that wait for their backward.
    weights: A ring of the versions that forwards met; None if none is needed.
    targets: A ring of targets that wait for the loss.
    gradients: The sum of the gradients since the last update; None if every
      micro-batch makes an update.
    stale_params: The same sum of the weights that the forwards met; None if
      the optimizer does not read them.
  """

  params: packing.Packed
  opt_state: packing.Packed
  stage_state: packing.Packed
  input_wire: packing.Packed
  error_wire: packing.Packed
  inputs: packing.Packed
  stage_states: packing.Packed
  errors: packing.Packed
  weights: packing.Packed | None
  targets: PyTree
  gradients: packing.Packed | None = None
  stale_params: packing.Packed | None = None


class Done(NamedTuple):
  """What a device has done in a tick.

  Attributes:
    loss: The loss, on the last device if it did a forward; else 0.
    forward: Whether the forward was computed, 0 or 1.
    backward: Whether the backward was computed.
  """

  loss: jax.Array
  forward: jax.Array
  backward: jax.Array


class Clock(NamedTuple):
  """What is the same on all devices in a tick.

  Attributes:
    key: The run's random key.
    entering: The micro-batch that enters the pipeline, or `tick_tables.NONE`.
    inputs: Its inputs.
    targets: Its targets.
  """

  key: jax.Array
  entering: jax.Array
  inputs: PyTree
  targets: PyTree


def tick(
  work: passes.Passes,
  held: Held,
  clock: Clock,
  now: Any,
) -> tuple[Held, Done]:
  """Does a tick of this device; to be called inside `jax.shard_map`.

  Args:
    work: The passes.
    held: What the device holds.
    clock: What is common to all devices.
    now: What this device has to do: a `tick_tables.TickTables` of scalars.

  Returns:
    What it holds then, and what it did.
  """
  size = len(work.stages)
  device = jax.lax.axis_index(mesh.STAGE)
  is_first, is_last = device == 0, device == size - 1
  busy_forward = now.forward >= 0
  busy_backward = now.backward >= 0
  activations = work.layout.activations

  # What arrives.
  entering = activations.pack(clock.inputs, 0)
  arrived = _where(is_first, entering, held.input_wire)
  inputs = _put(held.inputs, arrived, now.arriving_input)
  targets = _put(held.targets, clock.targets, clock.entering)

  # The forward, on the newest weights as forwards see them.
  see = lambda which: _view(work, which, device, held.params, held.opt_state)
  params_fwd = see("forward")
  stage_states = _put(held.stage_states, held.stage_state, now.forward)
  y, stage_state, did_forward = work.forwards.choose(
    device,
    busy_forward,
    lambda params, state, x, key: (activations.zeros(), state, 0),
    params_fwd,
    held.stage_state,
    _get(inputs, now.forward),
    _key(clock.key, now.forward, device),
  )
  no_loss = jnp.zeros([], work.loss_shape.dtype)
  loss, dy = work.losses.choose(
    jnp.zeros_like(device),
    is_last & busy_forward,
    lambda y, targets: (no_loss, activations.zeros()),
    y,
    _get(targets, now.forward),
  )

  # The backward, on the newest weights or on those of its forward.
  errors = _put(
    held.errors, _where(is_last, dy, held.error_wire), now.arriving_error
  )
  weights = held.weights
  if weights is not None:
    weights = jax.tree.map(
      lambda ring, leaf: ring_buffers.write(ring, leaf, now.version),
      weights,
      params_fwd,
    )
    params_fwd = jax.tree.map(
      lambda ring: ring_buffers.read(ring, now.met_version), weights
    )
  gradients, dx, stage_state, did_backward = work.backwards.choose(
    device,
    busy_backward,
    lambda *operands: (
      work.layout.params.zeros(),
      activations.zeros(),
      stage_state,
      0,
    ),
    params_fwd,
    see("backward"),
    _get(stage_states, now.backward),
    stage_state,
    _get(inputs, now.backward),
    _key(clock.key, now.backward, device),
    _get(errors, now.backward),
  )
  gradients = jax.lax.pmean(gradients, mesh.REPLICA)

  held = dataclasses.replace(
    held,
    stage_state=stage_state,
    inputs=inputs,
    stage_states=stage_states,
    errors=errors,
    weights=weights,
    targets=targets,
    input_wire=_send(y, [(p, p + 1) for p in range(size - 1)]),
    error_wire=_send(dx, [(p + 1, p) for p in range(size - 1)]),
  )
  held = _update(work, held, device, gradients, params_fwd, now.backward)
  return held, Done(loss, did_forward, did_backward)


def _view(work, which, device, params, opt_state):
  """The weights as a pass sees them."""
  if not work.predicts:
    return params
  return work.sights(which).choose(
    device,
    jnp.array(True),
    lambda params, opt_state: params,
    params,
    opt_state,
  )


def _update(work, held, device, gradients, params_fwd, micro_batch):
  """Counts a micro-batch's gradients in, and updates when it is time."""
  interval = work.schedule.update_interval
  is_due = (micro_batch >= 0) & ((micro_batch + 1) % interval == 0)
  stale = params_fwd if work.reads_stale_params else None
  if interval > 1:
    gradients = optax.tree.add(held.gradients, gradients)
    if stale is not None:
      # Nothing is summed up where there was no backward.
      stale = _where(micro_batch >= 0, stale, optax.tree.zeros_like(stale))
      stale = optax.tree.add(held.stale_params, stale)
    sums = gradients, stale
    keep = lambda total: jnp.where(is_due, jnp.zeros_like(total), total)
    kept_gradients, kept_stale = jax.tree.map(keep, sums)
    held = dataclasses.replace(
      held, gradients=kept_gradients, stale_params=kept_stale
    )
    gradients, stale = jax.tree.map(lambda total: total / interval, sums)
  params, opt_state = work.updates.choose(
    device,
    is_due,
    lambda params, opt_state, gradients, stale: (params, opt_state),
    held.params,
    held.opt_state,
    gradients,
    stale,
  )
  return dataclasses.replace(held, params=params, opt_state=opt_state)


def empty(work: passes.Passes, slots: tick_tables.Slots) -> Held:
  """What a device holds in an empty pipeline, but for its own state.

  Args:
    work: The passes.
    slots: The entries of the rings.

  Returns:
    Zeros, and nothing in the places of weights and states.
  """
  layout = work.layout
  accumulates = work.schedule.update_interval > 1
  zeros = layout.params.zeros()
  return Held(
    params=(),
    opt_state=(),
    stage_state=(),
    input_wire=layout.activations.zeros(),
    error_wire=layout.activations.zeros(),
    inputs=_new_ring(layout.activations.form, slots.inputs),
    stage_states=_new_ring(layout.stage_state.form, slots.inputs),
    errors=_new_ring(layout.activations.form, slots.errors),
    weights=_new_ring(layout.params.form, slots.versions)
    if work.keeps_weights
    else None,
    targets=_new_ring(layout.targets, slots.targets),
    gradients=zeros if accumulates else None,
    stale_params=zeros if accumulates and work.reads_stale_params else None,
  )


def _new_ring(form: Any, slots: int) -> Any:
  """A ring of zeros, with one more slot for what no micro-batch owns.

  Args:
    form: A tree of shapes and dtypes.
    slots: Entries that are held at a time.

  Returns:
    A tree of rings, `[slots + 1, ...]`.
  """
  return jax.tree.map(
    lambda leaf: jnp.zeros((slots + 1, *leaf.shape), leaf.dtype), form
  )


def _slot(ring: jax.Array, micro_batch: jax.Array) -> jax.Array:
  slots = ring.shape[0] - 1
  return jnp.where(micro_batch >= 0, micro_batch % slots, slots)


def _put(rings: Any, leaves: Any, micro_batch: jax.Array) -> Any:
  return jax.tree.map(
    lambda ring, leaf: ring_buffers.write(ring, leaf, _slot(ring, micro_batch)),
    rings,
    leaves,
  )


def _get(rings: Any, micro_batch: jax.Array) -> Any:
  return jax.tree.map(
    lambda ring: ring_buffers.read(ring, _slot(ring, micro_batch)), rings
  )


def _where(condition: jax.Array, a: Any, b: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _send(leaves: Any, pairs: list[tuple[int, int]]) -> Any:
  return jax.tree.map(
    lambda leaf: jax.lax.ppermute(leaf, mesh.STAGE, pairs), leaves
  )


def _key(key: jax.Array, micro_batch: jax.Array, device: jax.Array):
  """The key of a stage and micro-batch; replicas have noise of their own."""
  key = jax.random.fold_in(key, micro_batch)
  key = jax.random.fold_in(key, device)
  if jax.lax.axis_size(mesh.REPLICA) > 1:
    key = jax.random.fold_in(key, jax.lax.axis_index(mesh.REPLICA))
  return key
