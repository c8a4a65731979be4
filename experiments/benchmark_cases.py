"""What `benchmark` times in one process: one network, its contenders in turn.

Run by `benchmark`: `python -m experiments.benchmark_cases '{...}'` with the
fields of `Case` prints its measurements as one line of JSON.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import os
import resource
import sys
import tempfile
import time
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import replicas
import pbp_jax as pbp
from pbp_jax import data

LEARNING_RATE, MOMENTUM = 0.001, 0.99

# Lets XLA on a CPU compile a loop into one kernel, however large. Only loops
# that it has code for become one: none that calls a library, as products of
# matrices do.
ONE_KERNEL = (
  "--xla_backend_extra_options="
  f"xla_cpu_small_while_loop_byte_threshold={10**15}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One process's work.

  Attributes:
    model: A network's name; "<network>/replicas" for seeds side by side,
      "<network>/one_kernel" for a loop that is compiled into one kernel.
    contenders: Arms' names, with "@8" for eight times the arm's delay, with
      ":bfloat16" for old weights kept so; "naive" for stock Flax, "torch"; of
      replicas, numbers of seeds.
    samples: Samples a timing.
    repeats: Timings of each contender, in turn.
    threads: Cores the process may use.
    first_core: The first of them.
    num_stages: Stages of residual_mlp; 0 for its own number.
  """

  model: str
  contenders: tuple[str, ...]
  samples: int
  repeats: int
  threads: int
  first_core: int = 0
  num_stages: int = 0

  @property
  def network(self) -> str:
    """The network's name."""
    return self.model.partition("/")[0]

  @property
  def variant(self) -> str:
    """What follows the network's name."""
    return self.model.partition("/")[2]


def example_of(model: str) -> np.ndarray:
  """A sample's shape: digits for the MLP, CIFAR-10 otherwise."""
  side, channels = (8, 1) if model == "residual_mlp" else (32, 3)
  return np.zeros((1, side, side, channels), np.float32)


def measure(case: Case) -> dict[str, dict[str, Any]]:
  """Times every contender in turn, so that all meet the same noise.

  Args:
    case: The case.

  Returns:
    For each contender `ms`, the timings a sample, and what else is known:
    `draw_s`, the seconds that drawing the weights took, once for all, with what
    it compiles; `lower_s` and `compile_s`, those of a run's first start,
    `second_start_s`, those of both from JAX's cache on disk; `temporary_bytes`,
    `state_bytes`; `is_one_kernel`, whether XLA made one of the loop.
  """
  make: Callable[[Case, str], Any] = _chunk_of_one
  if case.variant == "replicas":
    make = _chunk_of_replicas
  elif "torch" in case.contenders:
    from experiments import torch_baseline

    make = lambda case, _: (
      torch_baseline.make_chunk(
        case.network, example_of(case.network), case.samples, case.threads
      ),
      {},
    )
  chunks, known = {}, {}
  for contender in case.contenders:
    chunks[contender], known[contender] = make(case, contender)
  times: dict[str, list[float]] = {name: [] for name in chunks}
  for repeat in range(case.repeats + 1):
    for name, chunk in chunks.items():
      began = time.perf_counter()
      chunk()
      if repeat:  # the first one warms up
        seconds = time.perf_counter() - began
        times[name].append(1e3 * seconds / case.samples)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {
    name: {"ms": times[name], "process_peak_bytes": peak, **known[name]}
    for name in chunks
  }


def _samples(case: Case) -> tuple[jax.Array, jax.Array]:
  shape = (case.samples, *example_of(case.network).shape)
  inputs = jax.random.normal(jax.random.key(1), shape)
  return inputs, jnp.arange(case.samples)[:, None] % 10


def _chunk_of_one(
  case: Case, contender: str
) -> tuple[Callable[[], None], dict[str, Any]]:
  """A compiled run of one replica, and what its compilation says."""
  known: dict[str, Any] = {}
  if contender == "naive":
    step, state = naive(case.network)
    run = lambda state, *samples: jax.lax.scan(step, state, samples)
  else:
    simulator = make_simulator(case.network, contender, case.num_stages)
    params, known["draw_s"] = _initial_params(case.network, case.num_stages)
    starting = dataclasses.replace(
      simulator, stages=pbp.with_params(simulator.stages, params)
    )
    state = starting.init(jax.random.key(0), example_of(case.network))
    run = simulator.run
  samples = _samples(case)
  compiled, lower_s, compile_s = _compile(run, state, *samples)
  _, *second_start = _compile(run, state, *samples)
  memory = compiled.memory_analysis()
  assert memory is not None  # on CPU, GPU and TPU it is known
  known |= {
    "lower_s": lower_s,
    "compile_s": compile_s,
    "second_start_s": sum(second_start),
    "temporary_bytes": memory.temp_size_in_bytes,
    "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    "is_one_kernel": is_one_kernel(compiled.as_text() or ""),
  }
  holder = [state]

  def chunk():
    holder[0], metrics = compiled(holder[0], *samples)
    jax.block_until_ready(metrics)

  return chunk, known


def is_one_kernel(program: str) -> bool:
  """Whether the program has its loop over the samples inside a kernel."""
  main = program[program.find("ENTRY ") :]
  return "xla_cpu_small_call" in main and " while(" not in main


def _compile(run: Callable[..., Any], *arguments: Any) -> Any:
  """A compiled run; the seconds of lowering it and of compiling it."""
  began = time.perf_counter()
  # A new function: one that was lowered before would be remembered.
  lowered = jax.jit(lambda *args: run(*args), donate_argnums=0).lower(
    *arguments
  )
  lowered_at = time.perf_counter()
  compiled = lowered.compile(compiler_options=replicas.compiler_options("cpu"))
  return compiled, lowered_at - began, time.perf_counter() - lowered_at


@functools.cache
def _initial_params(model: str, num_stages: int) -> tuple[Any, float]:
  """The same weights for all contenders, and the seconds of drawing them."""
  stages = make_simulator(model, "sgdm", num_stages).stages
  keys = jax.random.split(jax.random.key(0), 1)
  began = time.perf_counter()
  drawn = replicas.draw_params(stages, example_of(model), keys)
  seconds = time.perf_counter() - began
  return jax.tree.map(lambda leaf: leaf[0], drawn), seconds


def make_simulator(
  model: str, contender: str, num_stages: int = 0
) -> pbp.Simulator:
  """An arm on a network, as `Case` names it."""
  delayed_arm, _, history_dtype = contender.partition(":")
  name, _, factor = delayed_arm.partition("@")
  options = {"num_stages": num_stages} if num_stages else {}
  stages = pbp.models.get(model, **options)
  schedule = None
  if factor:
    delays = pbp.schedules.pipelined_backprop(len(stages)).delay
    schedule = pbp.schedules.from_delays([int(factor) * int(d) for d in delays])
  arm = pbp.presets.make_arm(
    name,
    len(stages),
    learning_rate=LEARNING_RATE,
    momentum=MOMENTUM,
    schedule=schedule,
  )
  return pbp.Simulator(
    stages=stages,
    loss_fn=replicas.cross_entropy,
    optimizer=arm.optimizer,
    schedule=arm.schedule,
    backward=arm.backward,
    history_dtype=history_dtype or None,
  )


def naive(model: str) -> tuple[Callable[..., Any], Any]:
  """Plain SGDM as one writes it first: stock Flax layers and `lax.conv`.

  Args:
    model: resnet20.

  Returns:
    A step for `lax.scan`, and its first carry.
  """
  if model != "resnet20":
    raise ValueError(f"naive is written for resnet20 only, got {model!r}.")
  network = _StockResNet20()
  optimizer = optax.sgd(LEARNING_RATE, MOMENTUM)
  params = network.init(jax.random.key(0), example_of(model))

  def step(carry, batch):
    params, opt_state = carry
    inputs, targets = batch
    loss, gradients = jax.value_and_grad(
      lambda params: replicas.cross_entropy(
        jnp.asarray(network.apply(params, inputs)), targets
      )
    )(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return step, (params, optimizer.init(params))


class _StockResNet20(nn.Module):
  """The network of `pbp.models.resnet(20)`, of nn.Conv and nn.GroupNorm."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def norm_relu(x):
      return nn.relu(nn.GroupNorm(num_groups=8)(x))

    def conv(features, size, strides, x):
      return nn.Conv(features, (size, size), strides, use_bias=False)(x)

    x = conv(16, 3, 1, x)
    for group in range(3):
      for block in range(3):
        features, strides = 16 * 2**group, 2 if group and not block else 1
        shortcut = x if strides == 1 else conv(features, 1, strides, x)
        x = conv(features, 3, strides, norm_relu(x))
        x = shortcut + conv(features, 3, 1, norm_relu(x))
    return nn.Dense(10)(norm_relu(x).mean((1, 2)))


def _chunk_of_replicas(
  case: Case, contender: str
) -> tuple[Callable[[], None], dict[str, Any]]:
  """A chunk of some seeds, one a core as far as there are cores."""
  simulator = make_simulator(case.network, "pb+lwpvd+scd", case.num_stages)
  example = example_of(case.network)
  keys = jax.random.split(jax.random.key(0), int(contender))
  runner = replicas.Replicas(
    stages=simulator.stages,
    make_simulator=lambda stages, numbers, batch_fn: dataclasses.replace(
      simulator, stages=stages, batch_fn=batch_fn
    ),
    num_replicas=int(contender),
    numbers={},
    dataset=_noise(example.shape[1:]),
    augment=False,
    devices=tuple(jax.devices()),
  )
  holder = [
    runner.init(keys, replicas.draw_params(simulator.stages, example, keys))
  ]
  order = np.tile(np.arange(case.samples) % 256, (int(contender), 1))

  def chunk():
    holder[0], trained = runner.train(holder[0], order)
    jax.block_until_ready(trained)

  return chunk, {}


def _noise(shape: Sequence[int]) -> data.Dataset:
  images = np.random.default_rng(0).normal(size=(256, *shape))
  images = images.astype(np.float32)
  labels = np.arange(256, dtype=np.int32) % 10
  return data.Dataset(
    name="noise",
    train_images=images,
    train_labels=labels,
    test_images=images[:1],
    test_labels=labels[:1],
    num_classes=10,
  )


def main(arguments: Sequence[str]) -> None:
  """Measures one case."""
  fields: Mapping[str, Any] = json.loads(arguments[1])
  case = Case(**{**fields, "contenders": tuple(fields["contenders"])})
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, cores[case.first_core :][: case.threads])
  if case.variant == "one_kernel":  # read when XLA first starts
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {ONE_KERNEL}"
  if case.variant == "replicas":
    jax.config.update("jax_num_cpu_devices", case.threads)
  with tempfile.TemporaryDirectory() as cache:
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    print(json.dumps(measure(case)))


if __name__ == "__main__":
  main(sys.argv)
