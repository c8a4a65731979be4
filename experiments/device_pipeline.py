"""The pipeline for real: stages on devices, resumed on another number of them.

Claims tested: what `pbp.Simulator` computes is what a pipeline of devices
computes; the devices work when the timetable says; a run that goes on with
more or fewer devices is the simulator's of the new groups of stages.

For each number in `--devices` the run trains on the next `--samples` images at
batch one, from fill to drain, with as many groups of stages as devices; in
between it goes through a checkpoint. Forced CPU devices share the cores: what
is measured here is who works when, and equality, not speed.

Command: python -m experiments.device_pipeline --workdir=runs/device_pipeline
Hardware, time and numbers: experiments/README.md.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import sys
from typing import Any

from absl import app, flags, logging
import jax
import jax.numpy as jnp
import numpy as np

from experiments import (
  checkpoints,
  config_flags,
  device_figures,
  figure_program,
  plans,
  replicas,
  results,
  tiny_transformer,
  versions,
)
import pbp_jax as pbp
from pbp_jax import data

Timelines = dict[str, pbp.devices.Timeline]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run on devices.

  Attributes:
    model: tiny_transformer, or the name of a network (residual_mlp, resnet20).
    num_stages: Stages of residual_mlp and tiny_transformer, cut into groups;
      0 is the model's own default.
    width: Width of the model; 0 is the model's own default.
    arm: Name of an arm whose schedule devices can follow.
    devices: On how many devices to train, one number after the other.
    samples: Images for each number of devices.
    update_interval: Samples an update (micro-batches of one sample).
    learning_rate: Learning rate at the reference batch size.
    momentum: Momentum at the reference batch size.
    reference_batch_size: Batch size that rate and momentum are given for.
    seed: Of the weights and of the order of the images.
    x64: Whether to compute in float64, which tells errors from rounding.
    workdir: Folder for results.json, the picture and checkpoints. A run that
      was broken off goes on by the same command.
    resume_anyway: Whether to go on although other versions began.
    smoke: Whether to shrink the run to a few seconds.
  """

  model: str = "residual_mlp"
  num_stages: int = 0
  width: int = 0
  arm: str = "pb+lwpvd+scd"
  devices: tuple[int, ...] = (4, 2, 8)
  samples: int = 240
  update_interval: int = 1
  learning_rate: float = 0.1
  momentum: float = 0.9
  reference_batch_size: int = 128
  seed: int = 0
  x64: bool = True
  workdir: str = "runs/device_pipeline"
  resume_anyway: bool = False
  smoke: bool = False

  def __post_init__(self):
    if not self.devices or min(self.devices) < 1:
      raise ValueError(
        f"devices must be one or more numbers >= 1, got {self.devices}."
      )
    if min(self.samples, self.update_interval) < 1 or (
      self.samples % self.update_interval
    ):
      raise ValueError(
        "samples must be a multiple >= 1 of update_interval,"
        f" {self.update_interval}, got {self.samples}: a checkpoint holds whole"
        " updates."
      )


def smoke_version(config: Config) -> Config:
  """The same run, shrunk: few stages, devices and samples."""
  return dataclasses.replace(
    config, num_stages=4, width=4, devices=(1, 2), samples=12
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """The training on one number of devices.

  Attributes:
    partition: The groups of stages.
    simulator: What is to come out.
    pipeline: What runs on the devices.
  """

  partition: pbp.devices.Partition
  simulator: pbp.Simulator
  pipeline: pbp.devices.Pipeline

  def start(self, key: jax.Array) -> pbp.devices.Gathered:
    """The weights and states to begin with."""
    return _gathered(self.simulator.init(key, self.pipeline.example[0]))

  def simulate(
    self,
    key: jax.Array,
    start: pbp.devices.Gathered,
    inputs: jax.Array,
    targets: jax.Array,
  ) -> tuple[np.ndarray, pbp.devices.Gathered]:
    """Losses and end of a simulated run from given weights and states."""
    simulator = dataclasses.replace(
      self.simulator,
      stages=pbp.with_params(self.simulator.stages, start.params),
      optimizer=self.simulator.optimizer._replace(
        init=lambda params: start.opt_state
      ),
    )
    state = simulator.init(key, inputs[0])
    state = dataclasses.replace(state, stage_state=start.stage_state)
    state, metrics = simulator.run(state, inputs, targets)
    return np.asarray(metrics["loss"]), _gathered(state)


def run(config: Config) -> Mapping[str, Any]:
  """Trains on each number of devices; a finished run is only read.

  Args:
    config: The run.

  Returns:
    The contents of `results.json`.

  Raises:
    ValueError: If a name is unknown, there are too few devices, or the folder
      holds something else.
  """
  if config.smoke:
    config = smoke_version(config)
  with jax.enable_x64(True) if config.x64 else contextlib.nullcontext():
    return _run(config)


def _run(config: Config) -> Mapping[str, Any]:
  workdir = results.Workdir.claim(config.workdir, config)
  if workdir.finished is not None:
    return workdir.finished
  workdir = workdir.resumed(config.resume_anyway)
  dataset = data.load("digits")
  stages = _make_stages(config)
  example = _micro_batches(dataset, np.zeros(1, int))
  parts = [
    _make_part(config, stages, example, number) for number in config.devices
  ]
  order = plans.SampleOrder([config.seed], dataset.num_train)
  key = jax.random.key(config.seed)
  kept = [_checkpoints(workdir, i) for i in range(len(parts))]

  begun = max((i for i, each in enumerate(kept) if each.exist()), default=-1)
  rows = _load(kept[begun], parts[begun])[1] if begun >= 0 else {}
  _write(workdir, "incomplete", rows)
  for i in range(begun + 1, len(parts)):
    part, fed = parts[i], i * config.samples
    indices = order(fed, fed + config.samples)[0]
    if i == 0:
      state = part.pipeline.restore(key, part.start(key), 0)
    else:
      saved, _ = _load(kept[i - 1], parts[i - 1])
      optimizer = parts[i - 1].pipeline.optimizer
      state = part.pipeline.restore(key, saved, fed, optimizer)
    row, gathered = _train(part, state, *_micro_batches(dataset, indices))
    rows[f"part_{i + 1}_on_{config.devices[i]}_devices"] = row
    kept[i].save(
      _leaves(gathered), {"samples": fed + config.samples, "rows": rows}
    )
    _write(workdir, "incomplete", rows)
  device_figures.timelines(rows).savefig(workdir.path / "timelines.png")
  finished = _write(workdir, "done", rows)
  for each in kept:
    each.remove()
  return finished


def _train(
  part: Part, state: pbp.devices.State, inputs: jax.Array, targets: jax.Array
) -> tuple[dict[str, Any], pbp.devices.Gathered]:
  """Trains a part; returns its row of results, and where it ended."""
  pipeline, partition = part.pipeline, part.partition
  start = pipeline.gather(state)
  key = state.key
  state, metrics, timeline = pbp.devices.record(
    pipeline, state, inputs, targets
  )
  gathered = pipeline.gather(state)
  losses, expected = part.simulate(key, start, inputs, targets)
  found = np.asarray(metrics["loss"])
  costs = pbp.devices.measure_costs(pipeline.stages, inputs[0])
  quarters = np.array_split(found, min(4, len(found)))
  row = {
    "stages_of_devices": partition.sizes.tolist(),
    "delays": pipeline.schedule.delay.tolist(),
    "compiled_stages": pipeline.num_programs,
    "balance_by_operations": partition.balance,
    "speedup_at_most": partition.speedup,
    "balance_by_time": float(costs.mean() / costs.max()),
    "ticks": len(timeline.busy),
    "ticks_of_the_timetable": len(timeline.predicted),
    "utilization": timeline.utilization,
    "utilization_of_the_timetable": timeline.predicted_utilization,
    "ticks_as_in_the_timetable": bool(
      (timeline.busy == timeline.predicted).all()
    ),
    "seconds": timeline.seconds,
    "share_of_time_in_passes": timeline.busy_time(costs.tolist()),
    "megabytes_of_devices": [
      round(float(size) / 1e6, 4)
      for size in sum(pipeline.memory().values(), np.zeros(1))
    ],
    "loss_by_quarters": [float(quarter.mean()) for quarter in quarters],
    "loss_differs_from_the_simulators_by": _largest_difference(found, losses),
    "weights_differ_by": _largest_difference(gathered.params, expected.params),
    "optimizer_states_differ_by": _largest_difference(
      gathered.opt_state, expected.opt_state
    ),
    "busy": ["".join(line) for line in device_figures.letters(timeline.busy)],
  }
  return row, gathered


def _make_stages(config: Config) -> tuple[pbp.Stage, ...]:
  sizes = {"num_stages": config.num_stages, "width": config.width}
  given = {name: size for name, size in sizes.items() if size}
  if config.model == "tiny_transformer":
    return _in_precision(tiny_transformer.tiny_transformer(**given))
  if config.model != "residual_mlp":
    given.pop("num_stages", None)
  return _in_precision(pbp.models.get(config.model, **given))


def _in_precision(stages: Sequence[pbp.Stage]) -> tuple[pbp.Stage, ...]:
  """Stages whose weights are drawn in the precision that is on."""

  def drawn(stage, key, x):
    return jax.tree.map(lambda leaf: leaf.astype(float), stage.init(key, x))

  made = {
    stage: dataclasses.replace(stage, init=functools.partial(drawn, stage))
    for stage in dict.fromkeys(stages)
  }
  return tuple(made[stage] for stage in stages)


def _make_part(
  config: Config,
  stages: Sequence[pbp.Stage],
  example: tuple[jax.Array, jax.Array],
  num_devices: int,
) -> Part:
  """Cuts the stages for so many devices, and makes both kinds of run."""
  inputs, targets = (leaf[0] for leaf in example)
  costs = pbp.devices.count_costs(stages, inputs)
  partition = pbp.devices.partition(costs, num_devices)
  scaled: Any = pbp.scale_hyperparameters(
    config.learning_rate,
    config.momentum,
    reference_batch_size=config.reference_batch_size,
    batch_size=config.update_interval,
  )
  arm = pbp.presets.make_arm(
    config.arm,
    num_devices,
    learning_rate=scaled.learning_rate,
    momentum=scaled.momentum,
    update_interval=config.update_interval,
    num_updates=config.samples * len(config.devices) // config.update_interval,
  )
  simulator = pbp.Simulator(
    partition.merge(stages),
    replicas.cross_entropy,
    arm.optimizer,
    arm.schedule,
    backward=arm.backward,
  )
  pipeline = pbp.devices.Pipeline(
    simulator.stages,
    simulator.loss_fn,
    simulator.optimizer,
    simulator.schedule,
    example=(inputs, targets),
    backward=simulator.backward,
  )
  return Part(partition, simulator, pipeline)


def _micro_batches(
  dataset: data.Images, indices: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Training images one at a time, `[count, 1, ...]`, and their labels."""
  arrays, positions = dataset.read(indices)
  look_up = dataset.batch_function(jax.tree.map(jnp.asarray, arrays))
  images, labels = look_up(jax.random.key(0), positions, positions)
  return images[:, None].astype(float), labels[:, None]


# ---- Checkpoints: what `gather` returns, as the leaves in their order.


def _checkpoints(
  workdir: results.Workdir, number: int
) -> checkpoints.Checkpoints:
  accepted = [workdir.versions, *workdir.versions.get("earlier", [])]
  return checkpoints.Checkpoints(
    workdir.checkpoints_path / f"part_{number + 1}",
    run={"config": results.of_the_numbers(workdir.config), "part": number},
    versions=[versions.of_the_numbers(each) for each in accepted],
    policy=checkpoints.Policy(),
  )


def _load(
  kept: checkpoints.Checkpoints, part: Part
) -> tuple[pbp.devices.Gathered, dict[str, Any]]:
  """Where a part has ended, and the rows so far."""
  like = jax.eval_shape(part.start, jax.random.key(0))
  leaves, progress = kept.load(jax.tree.leaves(like))
  gathered = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return gathered, progress["rows"]


def _leaves(gathered: pbp.devices.Gathered) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(gathered)]


def _gathered(state: pbp.PipelineState) -> pbp.devices.Gathered:
  return pbp.devices.Gathered(state.params, state.opt_state, state.stage_state)


def _largest_difference(a: Any, b: Any) -> float:
  differences = [
    np.abs(np.asarray(x, float) - np.asarray(y, float)).max(initial=0.0)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  ]
  return float(max(differences, default=0.0))


def _write(
  workdir: results.Workdir, status: str, rows: Mapping[str, Any]
) -> dict[str, Any]:
  return workdir.write(
    status, {name: figure_program.Row(row) for name, row in rows.items()}
  )


# ---- The program.


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the program's flags; called under its guard, never at import."""
  config_flags.define(Config, flag_values)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  if len(argv) > 1:
    raise app.UsageError(f"Arguments must be flags, got {argv[1:]}.")
  logging.set_verbosity(logging.WARNING)
  try:
    config = config_flags.from_flags(Config)
    jax.config.update("jax_num_cpu_devices", max(config.devices))
    found = run(config)
  except results.WorkdirError as error:
    sys.exit(str(error))
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  print(device_figures.table(found["arms"]))
  print(f"{config.workdir}: results.json, timelines.png")


if __name__ == "__main__":
  define_flags()
  app.run(main)
