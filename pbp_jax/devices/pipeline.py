"""The pipeline on a mesh of devices, one stage a device.

Every tick each device does one forward and one backward, of different
micro-batches, and sends the results to its neighbours by `jax.lax.ppermute`.
The program is one `jax.shard_map` of one `lax.scan` over ticks; with
`jax.distributed` it runs over the devices of several processes as it is.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np
import optax

from pbp_jax import argument_checks, schedules
from pbp_jax import stages as stages_lib
from pbp_jax.devices import layout as layout_lib
from pbp_jax.devices import (
  merging,
  passes,
  program,
  regrouping,
  stacking,
  tick_tables,
)
from pbp_jax.devices import mesh as mesh_lib
from pbp_jax.devices import state as state_lib
from pbp_jax.devices import tick as tick_lib
from pbp_jax.devices.regrouping import Gathered
from pbp_jax.devices.state import State
from pbp_jax.stages import PyTree
from pbp_jax.transforms import stale_params


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
  """Trains a pipeline of stages, each on a device of its own.

  Takes what `Simulator` takes and computes the same numbers, as far as a
  device can know them: a link that couples stages (clipping by the global
  norm) sees the weights of its own device only. To put several stages on one
  device, merge them first (`pbp.devices.partition`); the delays are then those
  of the merged stages.

  Stages that are one and the same object, on inputs of one shape, share one
  compiled program; others are branches of a `lax.switch`, and what differs in
  shape from device to device travels in vectors as long as the longest.

  Attributes:
    stages: The pipeline, input first, one stage a device.
    loss_fn: `loss_fn(outputs, targets) -> scalar`, computed on the last device.
    optimizer: Any optax optimizer of the tuple of all stages' weights, with
      values for each stage where it takes them. Each device runs it on its own
      weights.
    schedule: A schedule with a timetable whose forwards meet the newest weights
      of their device: `pipelined_backprop`, `one_f_one_b`, `pipemare`,
      `fill_drain`, `synchronous`, `from_timetable`; stashed or not.
    example: One micro-batch of inputs and targets, arrays or their shapes; all
      others must have these shapes and dtypes.
    backward: "saved" or "recompute", as in `Simulator`. Recomputation keeps the
      inputs of stages only. "saved" keeps the weights that forwards met as
      well, and makes its activations anew on them: the numbers are those of
      saved activations, time and memory are not.
    mesh: A mesh with the axes "replica" and "stage"; by default `make_mesh`
      of as many devices as there are stages. Replicas share each micro-batch
      along its first axis and average their gradients and losses.

  Raises:
    ValueError: If an argument is not of the kind described.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> import pbp_jax as pbp
    >>> from flax import linen as nn
    >>> x = jax.random.normal(jax.random.key(1), (300, 1, 4))
    >>> y = x.sum(-1, keepdims=True)
    >>> pipeline = pbp.devices.Pipeline(
    ...   pbp.as_stages([nn.Dense(1)]), lambda y, t: jnp.mean((y - t) ** 2),
    ...   optax.sgd(0.05), pbp.schedules.pipelined_backprop(1),
    ...   example=(x[0], y[0]))
    >>> state = pipeline.init(jax.random.key(0))
    >>> state, metrics = pipeline.run(state, x, y)
    >>> state, _ = pipeline.drain(state)
    >>> params = pipeline.gather(state).params
    >>> bool(metrics["loss"][-50:].mean() < 0.1 * metrics["loss"][:50].mean())
    True
  """

  stages: tuple[stages_lib.Stage, ...]
  loss_fn: Callable[..., Any]
  optimizer: optax.GradientTransformation
  schedule: schedules.Schedule
  example: tuple[PyTree, PyTree]
  backward: str = "saved"
  mesh: sharding.Mesh | None = None

  def __post_init__(self):
    object.__setattr__(self, "stages", stages_lib.as_stages(self.stages))
    size = len(self.stages)
    schedules.check_schedule(self.schedule, size)
    if self.backward not in ("saved", "recompute"):
      raise ValueError(
        f'backward must be "saved" or "recompute", got {self.backward!r}.'
      )
    if not callable(self.loss_fn):
      raise ValueError(f"loss_fn must be a function, got {self.loss_fn!r}.")
    argument_checks.check_optimizer(self.optimizer)
    tick_tables.check_runs_on_devices(self.schedule)
    if self.mesh is None:
      object.__setattr__(self, "mesh", mesh_lib.make_mesh(size))
    mesh_lib.check_mesh(self._mesh, size)
    layout_lib.shapes_of_example(self.example)

  # ---- The public functions.

  def init(self, key: jax.Array) -> State:
    """The state before the first micro-batch, as `Simulator.init` draws it.

    Every process draws the weights of all stages and keeps those of its own
    devices.

    Args:
      key: A random key, the same on all processes.

    Returns:
      The state.

    Raises:
      ValueError: If that is no random key.
    """
    argument_checks.check_key(key)
    key_init, key_run = jax.random.split(key)
    params, stage_state = layout_lib.init_network(
      self.stages, key_init, self._example[0]
    )
    opt_states = [
      self._optimizer.init(layout_lib.alone(own, p, len(params)))
      for p, own in enumerate(params)
    ]
    return self._place(key_run, params, opt_states, stage_state, 0)

  def run(
    self,
    state: State,
    inputs: PyTree,
    targets: PyTree,
    *,
    drain: bool = False,
    donate: bool = False,
  ) -> tuple[State, dict[str, Any]]:
    """Works until the last of these micro-batches has entered.

    What is in flight stays in flight: running two chunks is running their
    concatenation.

    Args:
      state: The state to go on from.
      inputs: The micro-batches' inputs, stacked along a leading axis; the same
        on all processes. They are copied to every device.
      targets: Their targets, likewise.
      drain: Whether to work on until nothing is in flight, as `drain` does.
      donate: Whether the memory of `state` may be reused; it can't be used
        afterwards.

    Returns:
      The state, and as metrics of these ticks "loss", the losses of the
      micro-batches that reached the last device, in their order;
      "micro_batch", which ones those are; "busy", `[ticks, S, 2]`, whether each
      device computed a forward and a backward.

    Raises:
      ValueError: If the micro-batches have other shapes or dtypes, as JAX has
        them, than `example`, their numbers differ, or the schedule ends before.
    """
    state_lib.check_is_state(state)
    count = stacking.count_micro_batches(inputs, targets, self._micro_batch)
    since = state.fed + count - state.first
    end = self.schedule.num_micro_batches
    if end is not None and since > end:
      raise ValueError(
        f"{self.schedule.name} ends after {end} micro-batches; got {since}"
        f" since micro-batch {state.first}."
      )
    filling = self._filling(since, state.first)
    return self._run(state, filling, inputs, targets, drain, donate)

  def drain(self, state: State) -> tuple[State, dict[str, Any]]:
    """Works until no micro-batch is in flight.

    Afterwards the weights are those of `Simulator` after as many micro-batches.
    A run that goes on fills the pipeline anew: its first micro-batches meet
    newer weights than in a run that was never drained.

    Args:
      state: A state in which micro-batches have entered since it was empty.

    Returns:
      The state, and metrics as `run` returns them.

    Raises:
      ValueError: If the pipeline is empty.
    """
    state_lib.check_is_state(state)
    if state.fed == state.first:
      raise ValueError(
        "state must have micro-batches in flight, got that of an empty"
        f" pipeline after {state.fed} micro-batches."
      )
    filling = self._filling(state.fed - state.first, state.first)
    nothing = jax.tree.map(
      lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype),
      self._micro_batch,
    )
    return self._run(state, filling, *nothing, drain=True, donate=False)

  def gather(self, state: State) -> Gathered:
    """Brings weights and states of all devices to every process.

    Args:
      state: The state, drained. With micro-batches in flight the stages have
        made different numbers of updates, and what is returned has no place for
        them. To look at the weights of a run that goes on, drain and gather
        its state and go on from the state before.

    Returns:
      What the state of a `Simulator` has in the fields of these names.

    Raises:
      ValueError: If micro-batches are in flight.
    """
    state_lib.check_is_state(state)
    state_lib.check_held(state, self._held)
    in_flight = self._num_in_flight(state)
    if in_flight:
      raise ValueError(
        f"state must be drained, got one with {in_flight} micro-batches in"
        " flight: gather(drain(state)[0]) has what they do to the weights, and"
        " the state given can go on."
      )
    layout, held = self._layout, state.held
    params, opt_states, stage_state = (
      packing.unstack(tuple(array[0] for array in arrays))
      for packing, arrays in zip(
        (layout.params, layout.opt_state, layout.stage_state),
        mesh_lib.fetch(
          (held.params, held.opt_state, held.stage_state), self._mesh
        ),
        strict=True,
      )
    )
    whole = jax.eval_shape(self._optimizer.init, params)
    return Gathered(params, merging.merge(opt_states, whole), stage_state)

  def restore(
    self,
    key: jax.Array,
    gathered: Gathered,
    fed: int,
    optimizer: optax.GradientTransformation | None = None,
  ) -> State:
    """The state of an empty pipeline that goes on from given weights.

    With the `optimizer` of the run that `gathered` comes from, the same stages
    may have been grouped in another way, on more or fewer devices. Weights,
    states of stages and what the optimizer keeps for each weight stay. What
    follows from the grouping is this pipeline's: leaves in which the two
    optimizers start differently from the same weights, such as horizons for
    each stage; histories as long as the delays start anew. The run then is that
    of a `Simulator` of these groups from the same weights and states.

    Args:
      key: The run's key, `state.key`.
      gathered: What `gather` returned, or the simulator's state holds.
      fed: How many micro-batches that was after, `state.fed`; whole updates.
      optimizer: The optimizer of the groups that `gathered` is of; None if they
        are those of this pipeline.

    Returns:
      The state.

    Raises:
      ValueError: If `gathered` is not of these stages, all of them, in their
        shapes and dtypes; if `fed` is no int >= 0, or ends in the middle of an
        update, whose gradients `gathered` does not hold; if `key` is no random
        key.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> import pbp_jax as pbp
      >>> from flax import linen as nn
      >>> stages = pbp.as_stages([nn.Dense(3), nn.Dense(3)])
      >>> optimizer = optax.sgd(0.1, momentum=0.9)
      >>> loss_fn = lambda y, t: jnp.sum((y - t) ** 2)
      >>> schedule = pbp.schedules.pipelined_backprop
      >>> two = pbp.Simulator(stages, loss_fn, optimizer, schedule(2)).init(
      ...   jax.random.key(0), jnp.ones((1, 3)))
      >>> both = pbp.devices.Partition(np.ones(2), np.array([0]))
      >>> one = pbp.devices.Pipeline(
      ...   both.merge(stages), loss_fn, optimizer, schedule(1),
      ...   example=(jnp.ones((1, 3)), jnp.ones((1, 3))))
      >>> state = one.restore(
      ...   two.key, pbp.devices.Gathered(
      ...     two.params, two.opt_state, two.stage_state), 0, optimizer)
      >>> jax.tree.map(jnp.shape, one.gather(state).params)
      (({'bias': (3,), 'kernel': (3, 3)}, {'bias': (3,), 'kernel': (3, 3)}),)
    """
    argument_checks.check_key(key)
    fed = schedules.check_count("fed", fed, minimum=0)
    interval = self.schedule.update_interval
    if fed % interval:
      raise ValueError(
        f"fed must be a multiple of the update interval, {interval}, got {fed}."
      )
    gathered = regrouping.fitted(
      gathered, optimizer, self._optimizer, self._layout
    )
    opt_states = [
      merging.take(gathered.opt_state, part)
      for part in self._layout.opt_state.shapes()
    ]
    return self._place(
      key, gathered.params, opt_states, gathered.stage_state, fed
    )

  def memory(self) -> dict[str, np.ndarray]:
    """Bytes that each device needs for what it holds, by kind.

    Without padding. Rings have as many slots on every device as the one has
    that needs most.

    Returns:
      For each kind `[S]` ints.
    """
    layout, slots = self._layout, self._slots
    count = lambda packing, shift=0: np.array(
      [packing.num_bytes(p + shift) for p in range(len(self.stages))]
    )
    params, inputs = count(layout.params), count(layout.activations)
    return {
      "params": params,
      "opt_state": count(layout.opt_state),
      "inputs": inputs * slots.inputs,
      "errors": count(layout.activations, 1) * slots.errors,
      "weights": params * slots.versions * self._passes.keeps_weights,
    }

  @property
  def num_programs(self) -> int:
    """How many stages are compiled; equal ones are compiled once."""
    return len(self._passes.forwards.functions)

  # ---- What is known before anything runs.

  @property
  def _mesh(self) -> sharding.Mesh:
    assert self.mesh is not None
    return self.mesh

  @functools.cached_property
  def _optimizer(self) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(self.optimizer)

  @functools.cached_property
  def _micro_batch(self) -> tuple[PyTree, PyTree]:
    """The shapes of a micro-batch."""
    return layout_lib.shapes_of_example(self.example)

  @functools.cached_property
  def _example(self) -> tuple[PyTree, PyTree]:
    """The shapes of what one replica gets of a micro-batch."""
    return layout_lib.part_of_replica(
      self._micro_batch, self._mesh.shape[mesh_lib.REPLICA]
    )

  @functools.cached_property
  def _layout(self) -> layout_lib.Layout:
    return layout_lib.of(self.stages, self._optimizer, self._example)

  @functools.cached_property
  def _passes(self) -> passes.Passes:
    params = self._layout.params.shapes()
    return passes.Passes(
      stages=self.stages,
      loss_fn=self.loss_fn,
      optimizer=self._optimizer,
      schedule=self.schedule,
      backward=self.backward,
      layout=self._layout,
      reads_stale_params=stale_params.is_read(
        self._optimizer, params, jax.eval_shape(self._optimizer.init, params)
      ),
    )

  @functools.cached_property
  def _slots(self) -> tick_tables.Slots:
    count = tick_tables.num_sample_micro_batches(self.schedule)
    return self._filling(count, 0).slots

  def _filling(self, count: int, first: int) -> tick_tables.Filling:
    return tick_tables.Filling(
      self.schedule.timetable(count), self.schedule.update_interval, first
    )

  @functools.cached_property
  def _held(self) -> tick_lib.Held:
    """The shapes and dtypes of what the devices hold."""
    grid = tuple(self._mesh.shape.values())
    return state_lib.held_shapes(self._passes, self._slots, grid)

  def _num_in_flight(self, state: State) -> int:
    """How many micro-batches a device has not brought back yet."""
    if state.fed == state.first:
      return 0
    filling = self._filling(state.fed - state.first, state.first)
    waits = filling.timetable.backward_tick >= state.tick
    return int(waits.any(axis=0).sum())

  # ---- What runs.

  def _place(self, key, params, opt_states, stage_state, fed) -> State:
    """Puts onto each device what it is to hold."""
    layout, mesh = self._layout, self._mesh
    grid = tuple(mesh.shape.values())
    params, opt_state, stage_state = (
      mesh_lib.put(
        tuple(
          np.broadcast_to(array, (grid[0], *array.shape))
          for array in packing.stack(trees)
        ),
        mesh,
        mesh_lib.BY_DEVICE,
      )
      for packing, trees in (
        (layout.params, params),
        (layout.opt_state, opt_states),
        (layout.stage_state, stage_state),
      )
    )
    empty = jax.jit(
      lambda: jax.tree.map(
        lambda leaf: jnp.zeros((*grid, *leaf.shape), leaf.dtype),
        tick_lib.empty(self._passes, self._slots),
      ),
      out_shardings=sharding.NamedSharding(mesh, mesh_lib.BY_DEVICE),
    )()
    held = dataclasses.replace(
      empty, params=params, opt_state=opt_state, stage_state=stage_state
    )
    return State(first=fed, fed=fed, tick=0, key=key, held=held)

  def _run(self, state, filling, inputs, targets, drain, donate):
    """Runs ticks; micro-batches from `state.fed` on enter."""
    state_lib.check_held(state, self._held)
    timetable = filling.timetable
    stop = int(timetable.forward_tick[0, -1]) + 1
    if drain:
      stop = timetable.num_ticks
    tables = filling.tables.between(state.tick, stop)
    entering = tables.forward[:, 0]
    on_mesh = lambda tree, spec: mesh_lib.put(tree, self._mesh, spec)
    run = self._donating_program if donate else self._program
    held, loss, busy = run(
      state.held,
      *on_mesh((inputs, targets), program.data_spec(self._mesh)),
      on_mesh(tables, program.BY_COLUMN),
      *on_mesh(
        (
          jax.random.key_data(state.key),
          entering,
          np.maximum(entering - state.fed, 0),
        ),
        mesh_lib.EVERYWHERE,
      ),
    )
    (reached,) = np.nonzero(tables.forward[:, -1] != tick_tables.NONE)
    metrics = {
      "loss": loss[reached],
      "micro_batch": tables.forward[reached, -1],
      "busy": busy,
    }
    fed = filling.first + timetable.num_micro_batches
    state = dataclasses.replace(state, fed=fed, tick=stop, held=held)
    if drain:
      state = dataclasses.replace(state, first=fed, tick=0)
    return state, metrics

  @functools.cached_property
  def _program(self):
    return program.make(self._passes, self._mesh, donate=False)

  @functools.cached_property
  def _donating_program(self):
    return program.make(self._passes, self._mesh, donate=True)
