"""Training many replicas side by side: one program, spread over devices.

A replica is one seed of one arm. Replicas of one schedule differ in numbers
only (weights, noise, order of the data, coefficients), so one program trains
them all: `vmap` within a device, `shard_map` over devices.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import data, diagnostics

_AXIS = "replica"

# Images an evaluation takes at a time (larger batches leave a core's cache),
# and images a dispatch.
_EVALUATION_BATCH = {"cpu": 10, "gpu": 500, "tpu": 500}
_EVALUATION_BLOCK = 500

_COMPILER_OPTIONS = {
  "cpu": {
    # A pipeline is a large program of small loops: the compiler's last passes
    # over it take a third of the compilation, and give no speed.
    "xla_backend_optimization_level": 1,
    # Old weights are read from their ring when their stage needs them, not all
    # at the start of a step: a core has room for one stage's in its cache.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
  }
}


def compiler_options(platform: str) -> dict[str, Any] | None:
  """What XLA is told, on a platform, by programs that train."""
  return _COMPILER_OPTIONS.get(platform)


class Evaluation(NamedTuple):
  """Newest raw weights on some images; both `[replicas]`.

  Attributes:
    loss: Mean cross-entropy.
    accuracy: Share of images whose label has the largest output.
  """

  loss: jax.Array | np.ndarray
  accuracy: jax.Array | np.ndarray


class Chunk(NamedTuple):
  """What a chunk of training says about itself.

  Attributes:
    loss: `[replicas, count]`, the loss each micro-batch met.
    diverged_stage: `[replicas, count]` ints, -1 where the loss and the weights
      after the micro-batch are finite. Else the last stage if it is the loss
      that isn't, or the stage nearest to the loss whose weights aren't.
  """

  loss: jax.Array
  diverged_stage: jax.Array


def cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
  """Mean cross-entropy of a micro-batch, the loss that is trained."""
  losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
  return losses.mean()


def draw_params(
  stages: Sequence[pbp.Stage], example: Any, keys: jax.Array
) -> Any:
  """Draws weights to start from, which don't depend on the arm.

  Args:
    stages: The pipeline.
    example: One micro-batch of inputs.
    keys: Random keys `[count]`.

  Returns:
    The weights with a leading axis of keys, on the host: the very ones that
    `pbp.Simulator.init` draws from these keys.
  """
  simulator = pbp.Simulator(
    stages=tuple(stages),
    loss_fn=cross_entropy,
    optimizer=optax.identity(),
    schedule=pbp.schedules.fill_drain(len(stages), 1),
  )
  draw = jax.vmap(lambda key: simulator.init(key, example).params)
  return jax.device_get(draw(keys))


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
  """Compiled programs that start, train and evaluate replicas.

  All methods are pure: a state goes in and the next one comes out, so a state
  on disk and the position in the data are all that resuming takes.

  Attributes:
    stages: The pipeline.
    make_simulator: `make_simulator(stages, numbers, batch_fn)` makes a
      `pbp.Simulator` while tracing; `numbers` are one replica's.
    num_replicas: How many.
    numbers: A pytree with a leading axis of replicas: what differs between
      arms, such as prediction horizons; may be empty.
    dataset: The images, put on every device, all or as they are needed.
    augment: Whether training images are augmented.
    devices: The devices to spread over; as many are used as there are replicas.
  """

  stages: tuple[pbp.Stage, ...]
  make_simulator: Callable[..., pbp.Simulator]
  num_replicas: int
  numbers: Any
  dataset: data.Images
  augment: bool
  devices: tuple[Any, ...]  # jax.Device, no type to pyright

  def init(self, keys: jax.Array, params: Any) -> pbp.PipelineState:
    """States before the first sample.

    Args:
      keys: One a replica, `[replicas]`.
      params: The weights they start from, from `draw_params` with these keys.

    Returns:
      The states.
    """
    keys = self._put(jax.random.key_data(keys))
    return self._init(keys, self._put(params), self._numbers)

  def train(
    self, state: pbp.PipelineState, indices: np.ndarray
  ) -> tuple[pbp.PipelineState, Chunk]:
    """Trains on some samples, one a micro-batch; reuses the state's memory.

    Args:
      state: The replicas' states.
      indices: `[replicas, count]` ints, training images in the order of use.

    Returns:
      The next states, and the chunk; neither is waited for.
    """
    arrays, positions = self._read(indices)
    positions = self._put(positions.astype(np.int32))
    with jax.transfer_guard("disallow"):
      return self._train(state, self._numbers, positions, arrays)

  def evaluate(
    self, state: pbp.PipelineState, indices: np.ndarray
  ) -> Evaluation:
    """Evaluates the newest raw weights.

    Args:
      state: The replicas' states.
      indices: Ints, images to evaluate on: those of the training split from 0,
        then those of the test split.

    Returns:
      The evaluation; it is not waited for.
    """
    model = (state.params, state.stage_state)
    sums = []
    for start in range(0, len(indices), _EVALUATION_BLOCK):
      block = indices[start : start + _EVALUATION_BLOCK]
      blank = _EVALUATION_BLOCK - len(block)
      arrays, positions = self._read(np.pad(block, (0, blank), mode="edge"))
      batches = (
        positions.astype(np.int32),
        np.pad(np.ones(len(block), np.float32), (0, blank)),
      )
      batches = self._put(batches, shared=True)
      sums.append(self._evaluate(model, self._numbers, batches, arrays))
    return jax.tree.map(lambda *terms: sum(terms) / len(indices), *sums)

  def abstract_leaves(self) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `leaves` returns."""
    return jax.tree.leaves(jax.eval_shape(_without_keys, self._abstract_state))

  def leaves(self, state: pbp.PipelineState) -> list[np.ndarray]:
    """A state as arrays on the host, which `from_leaves` takes back."""
    bare = _without_keys(state)
    replicated = self.fetch(dataclasses.replace(bare, step=None))
    return jax.tree.leaves(
      dataclasses.replace(replicated, step=np.asarray(bare.step))
    )

  def from_leaves(self, leaves: Sequence[np.ndarray]) -> pbp.PipelineState:
    """The state whose `leaves` these are, on the devices."""
    like = self._abstract_state
    bare = jax.tree.unflatten(jax.tree.structure(like), leaves)
    step = self._put(bare.step, shared=True)
    bare = self._put(bare.replace(step=None)).replace(step=step)
    return jax.tree.map(
      lambda x, like: jax.random.wrap_key_data(x) if _is_key(like) else x,
      bare,
      like,
    )

  @functools.cached_property
  def _abstract_state(self) -> pbp.PipelineState:
    """Shapes and dtypes of a state."""

    def init(seeds, numbers):
      simulator = self.make_simulator(self.stages, numbers, None)
      return simulator.init(jax.random.key(seeds), self.dataset.example)

    axes = pbp.PipelineState.vmap_axes()
    seeds = np.zeros(self.num_replicas, np.int32)
    return jax.eval_shape(
      jax.vmap(init, (0, 0), axes), seeds, self._host_numbers
    )

  def fetch(self, tree: Any) -> Any:
    """Arrays on the host, without the replicas that only fill a device."""
    return jax.tree.map(lambda x: np.asarray(x)[: self.num_replicas], tree)

  # ---- Where things are. Replicas are padded to a multiple of the devices.

  @functools.cached_property
  def _mesh(self) -> jax.sharding.Mesh:
    devices = self.devices[: self.num_replicas]
    return jax.sharding.Mesh(np.asarray(devices), (_AXIS,))

  def _put(self, tree: Any, shared: bool = False) -> Any:
    """Puts arrays on the devices; the last replica fills up what is left."""
    num_padded = -self.num_replicas % self._mesh.size
    spec = jax.P() if shared else jax.P(_AXIS)
    sharding = jax.sharding.NamedSharding(self._mesh, spec)

    def put(x):
      if not shared:
        x = np.concatenate([x, np.repeat(x[-1:], num_padded, axis=0)])
      return jax.device_put(x, sharding)

    return jax.tree.map(put, tree)

  @functools.cached_property
  def _host_numbers(self) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), self.numbers)

  @functools.cached_property
  def _numbers(self) -> Any:
    return self._put(self._host_numbers)

  def _read(self, indices: np.ndarray) -> tuple[Any, np.ndarray]:
    """Arrays on every device that hold these images, and where in them."""
    if self.dataset.is_resident:
      return self._resident, indices
    arrays, positions = self.dataset.read(indices)
    return self._put(arrays, shared=True), positions

  @functools.cached_property
  def _resident(self) -> Any:
    return self._put(self.dataset.read(np.zeros(0, int))[0], shared=True)

  # ---- The compiled programs.

  def _jit(self, function: Callable[..., Any], **options) -> Any:
    platform = self.devices[0].platform
    return jax.jit(
      function, compiler_options=compiler_options(platform), **options
    )

  def _spread(self, function: Callable[..., Any], in_axes, out_axes):
    """Maps a function of one replica: vmapped here, sharded over devices."""
    to_spec = lambda axis: jax.P() if axis is None else jax.P(_AXIS)
    is_none = lambda axis: axis is None
    return jax.shard_map(
      jax.vmap(function, in_axes, out_axes),
      mesh=self._mesh,
      in_specs=jax.tree.map(to_spec, in_axes, is_leaf=is_none),
      out_specs=jax.tree.map(to_spec, out_axes, is_leaf=is_none),
      check_vma=False,
    )

  @functools.cached_property
  def _init(self):
    def init(key_data, params, numbers):
      key = jax.random.wrap_key_data(key_data)
      stages = pbp.with_params(self.stages, params)
      simulator = self.make_simulator(stages, numbers, None)
      return simulator.init(key, self.dataset.example)

    axes = pbp.PipelineState.vmap_axes()
    return self._jit(self._spread(init, (0, 0, 0), axes))

  @functools.cached_property
  def _train(self):
    def train(state, numbers, indices, arrays):
      batch_fn = self.dataset.batch_function(arrays, self.augment)
      simulator = dataclasses.replace(
        self.make_simulator(self.stages, numbers, batch_fn),
        diagnostics=("is_finite",),
      )
      indices = indices[:, None]  # micro-batches of one sample
      state, metrics = simulator.run(state, indices, indices)
      # Measured are the weights that a sample finds: those after the sample
      # before it.
      last = diagnostics.are_finite(state.params)
      is_finite = jnp.concatenate([metrics["is_finite"][1:], last[None]])
      stage = np.arange(len(self.stages))
      nearest = jnp.where(is_finite, -1, stage).max(1)
      is_loss_finite = jnp.isfinite(metrics["loss"])
      where = jnp.where(is_loss_finite, nearest, stage[-1])
      return state, Chunk(metrics["loss"], where)

    axes = pbp.PipelineState.vmap_axes()
    spread = self._spread(train, (axes, 0, 0, None), (axes, 0))
    return self._jit(spread, donate_argnums=0)

  @functools.cached_property
  def _evaluate(self):
    size = _EVALUATION_BATCH[self.devices[0].platform]

    def evaluate(model, numbers, block, arrays):
      params, stage_state = model
      simulator = self.make_simulator(self.stages, numbers, None)
      look_up = self.dataset.batch_function(arrays)

      def sums(batch):
        indices, weights = batch
        images, labels = look_up(jax.random.key(0), indices, indices)
        outputs = simulator.predict(params, images, stage_state)
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        correct = outputs.argmax(-1) == labels
        # Not by weights @ loss: images that fill up may have a loss of inf.
        return Evaluation(
          jnp.where(weights > 0, loss, 0).sum(), (weights * correct).sum()
        )

      batches = jax.tree.map(lambda x: x.reshape(-1, size), block)
      return jax.tree.map(lambda x: x.sum(), jax.lax.map(sums, batches))

    return self._jit(self._spread(evaluate, (0, 0, None, None), 0))


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(state: pbp.PipelineState) -> pbp.PipelineState:
  """A state with the data of its random keys in their place."""
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if _is_key(x) else x, state
  )
