"""Trains a deep pipeline on images at batch one, by several arms and seeds.

Claim tested (Kosson et al., arXiv 2003.11666): pipelined backpropagation at
batch one (`pb`) trains worse than SGD with momentum (`sgdm`), since its
gradients are delayed and its two passes meet different weights; spike
compensation (`scd`) and weight prediction (`lwpvd`) give most of it back, and
together nearly all.

Command: python -m experiments.train --workdir=runs/digits
Hardware, time and numbers: experiments/README.md.

`--workdir` gets `results.json`, `curves.png` and `arms.png`. Rate and momentum
are given for a reference batch size and scaled to the samples of one update.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
import pathlib
import sys
from typing import Any

from absl import app, flags, logging
import jax
import optax
import rich

from experiments import (
  checkpoints,
  config_flags,
  interruption,
  plans,
  reporting,
  results,
  resumable,
  runner,
)
import pbp_jax as pbp
from pbp_jax import data, hyperparameters, plotting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run of several arms.

  Attributes:
    dataset: digits, mnist, cifar10 or imagenet2012.
    model: Name of a network, such as residual_mlp, resnet20 or vgg11.
    num_stages: Stages of residual_mlp, whose depth is free; 0 is the model's
      own default. Other models have the stages their name says.
    width: Width of the model; 0 is the model's own default.
    arms: Names of arms; --list_arms lists them.
    seeds: Number of seeds an arm.
    first_seed: The first of the seeds; the others follow it.
    epochs: Passes over the training split.
    max_samples: Most samples each replica trains on; 0 for no limit.
    learning_rate: Learning rate at the reference batch size.
    momentum: Momentum at the reference batch size.
    weight_decay: Weight decay, not scaled; enters before the momentum.
    reference_batch_size: Batch size that rate and momentum are given for.
    update_interval: Samples an update (micro-batches of one sample).
    decay_epochs: Epochs after which the rate is multiplied by decay_factor.
    decay_factor: See decay_epochs.
    augment: Whether to pad, crop and mirror training images at random.
    chunk_samples: Samples a dispatch, a point of the loss curve; 0 chooses.
    accuracy_points: Most points of the accuracy curve, evenly spaced.
    accuracy_images: Test images for a point of the accuracy curve.
    final_images: Images of each split that the final loss and accuracy are
      measured on; 0 for all, which is what the results are defined by.
    workdir: Folder for results.json, pictures and checkpoints; empty or absent
      at first. A run that was broken off goes on by the same command.
    checkpoint_minutes: Minutes between checkpoints, which are written at the
      end of a chunk; 0 for none by time.
    checkpoint_samples: Samples between checkpoints; 0 for none by samples.
    checkpoints_kept: How many of the last checkpoints stay.
    resume: Whether to go on with an unfinished run in workdir; else such a
      workdir is refused.
    resume_anyway: Whether to go on although other versions began, or other
      code; the results will name both.
    data_dir: Folder of prepared tensorflow-datasets; empty is its default.
    smoke: Whether to shrink the run to a few seconds.
  """

  dataset: str = "digits"
  model: str = "residual_mlp"
  num_stages: int = 0
  width: int = 0
  arms: tuple[str, ...] = ("sgdm", "pb", "pb+scd", "pb+lwpvd", "pb+lwpvd+scd")
  seeds: int = 5
  first_seed: int = 0
  epochs: int = 10
  max_samples: int = 0
  learning_rate: float = 0.1
  momentum: float = 0.9
  weight_decay: float = 0.0
  reference_batch_size: int = 128
  update_interval: int = 1
  decay_epochs: tuple[float, ...] = ()
  decay_factor: float = 0.1
  augment: bool = False
  chunk_samples: int = 0
  accuracy_points: int = 15
  accuracy_images: int = 500
  final_images: int = 0
  workdir: str = "runs/train"
  checkpoint_minutes: float = 10.0
  checkpoint_samples: int = 0
  checkpoints_kept: int = 2
  resume: bool = True
  resume_anyway: bool = False
  data_dir: str = ""
  smoke: bool = False

  def __post_init__(self):
    for name, minimum in (
      ("num_stages", 0),
      ("width", 0),
      ("seeds", 1),
      ("epochs", 1),
      ("max_samples", 0),
      ("update_interval", 1),
      ("chunk_samples", 0),
      ("accuracy_points", 1),
      ("accuracy_images", 1),
      ("final_images", 0),
      ("checkpoint_minutes", 0),
      ("checkpoint_samples", 0),
      ("checkpoints_kept", 1),
    ):
      if getattr(self, name) < minimum:
        raise ValueError(
          f"{name} must be at least {minimum}, got {getattr(self, name)}."
        )
    if not self.arms or len(set(self.arms)) < len(self.arms):
      raise ValueError(
        f"arms must name at least one arm, none twice, got {self.arms}."
      )


def smoke_version(config: Config) -> Config:
  """The same run, shrunk: a few stages, samples and seeds."""
  small = {"seeds": min(config.seeds, 3), "max_samples": 300}
  if config.model == "residual_mlp":
    small.update(num_stages=6, width=8)
  return dataclasses.replace(config, **small)


@dataclasses.dataclass(frozen=True)
class Job:
  """All that a run needs, made and checked before anything is written."""

  config: Config
  workdir: results.Workdir
  task: runner.Task
  arms: list[pbp.presets.Arm]


def prepare(config: Config) -> Job:
  """Makes what a run needs; writes nothing.

  Args:
    config: The run.

  Returns:
    The job.

  Raises:
    ValueError: If a name is unknown, data isn't prepared, or the folder holds
      something else.
  """
  if config.smoke:
    config = smoke_version(config)
  workdir = results.Workdir.claim(config.workdir, config)
  if workdir.unfinished and not config.resume:
    raise ValueError(
      f"workdir={config.workdir!r} holds an unfinished run, and resume is off."
      " Nothing was written; name a new folder."
    )
  workdir = workdir.resumed(config.resume_anyway)
  stages = make_stages(config)
  dataset = data.load(config.dataset, config.data_dir or None)
  num_train = dataset.num_train
  plan = make_plan(config, num_train)
  arms = make_arms(config, len(stages), num_train, plan.total_samples)
  task = runner.Task(stages, dataset, plan, config.augment)
  return Job(config, workdir, task, arms)


def execute(
  job: Job,
  on_progress: runner.OnProgress = lambda task, done, total: None,
  is_interrupted: Callable[[], bool] = lambda: False,
) -> Mapping[str, Any]:
  """Trains all arms and writes the results; a finished run is only read.

  Args:
    job: From `prepare`.
    on_progress: Told how far it is.
    is_interrupted: Asked at the end of each chunk whether to end there.

  Returns:
    The contents of `results.json`.

  Raises:
    results.WorkdirError: If the folder can't be written, or holds checkpoints
      none of which is good.
    interruption.Interrupted: If the run was asked to end; it is saved.
  """
  config, workdir = job.config, job.workdir
  if workdir.finished is not None:
    return workdir.finished
  policy = checkpoints.Policy(
    minutes=config.checkpoint_minutes,
    samples=config.checkpoint_samples,
    kept=config.checkpoints_kept,
    is_interrupted=is_interrupted,
  )
  parts = [(job.task, job.arms)]
  in_order = resumable.train(parts, workdir, policy, on_progress)
  figure = plotting.training_curves(
    {name: arm.curve for name, arm in in_order.items()},
    title=f"{config.dataset}, {config.model}, {len(job.task.stages)} stages:"
    f" median and range of {config.seeds} seeds",
    chance_loss=math.log(job.task.dataset.num_classes),
  )
  figure.savefig(workdir.path / "curves.png")
  plotting.arms_chart(
    {
      name: {"loss": arm.final_loss, "accuracy": arm.final_accuracy}
      for name, arm in in_order.items()
    },
    title=f"{config.dataset}, {config.model}: final values of {config.seeds}"
    " seeds",
  ).savefig(workdir.path / "arms.png")
  return workdir.write("done", in_order)


def run(config: Config) -> Mapping[str, Any]:
  """Prepares and executes a run; returns the contents of `results.json`."""
  return execute(prepare(config))


def make_stages(config: Config, **options: Any) -> tuple[pbp.Stage, ...]:
  """The pipeline; options are further arguments of the network's function."""
  sizes = {"num_stages": config.num_stages, "width": config.width}
  given = {name: size for name, size in sizes.items() if size}
  if config.num_stages and config.model != "residual_mlp":
    raise ValueError(
      f"num_stages must be 0 with model={config.model!r}, whose name says its"
      f" depth, got {config.num_stages}."
    )
  return pbp.models.get(config.model, **given, **options)


def make_arms(
  config: Config, num_stages: int, num_examples: int, total_samples: int
) -> list[pbp.presets.Arm]:
  """The arms, their hyperparameters scaled to the samples of one update."""
  scaled = scaled_hyperparameters(config)
  return [
    pbp.presets.make_arm(
      name,
      num_stages,
      learning_rate=decaying_rate(config, scaled.learning_rate, num_examples),
      momentum=scaled.momentum,
      weight_decay=config.weight_decay,
      update_interval=config.update_interval,
      num_updates=total_samples // config.update_interval,
    )
    for name in config.arms
  ]


def scaled_hyperparameters(config: Config) -> hyperparameters.Hyperparameters:
  """Rate and momentum for the samples of one update."""
  return pbp.scale_hyperparameters(
    config.learning_rate,
    config.momentum,
    reference_batch_size=config.reference_batch_size,
    batch_size=config.update_interval,
  )


def decaying_rate(
  config: Config, learning_rate: Any, num_examples: int
) -> optax.ScalarOrSchedule:
  """The scaled rate, or the schedule by which it drops after some epochs."""
  if not config.decay_epochs:
    return learning_rate
  updates_an_epoch = num_examples / config.update_interval
  return optax.piecewise_constant_schedule(
    learning_rate,
    {
      round(epoch * updates_an_epoch): config.decay_factor
      for epoch in config.decay_epochs
    },
  )


def make_plan(config: Config, num_examples: int) -> plans.Plan:
  """How long to train and when to look."""
  total = config.epochs * num_examples
  if config.max_samples:
    total = min(total, config.max_samples)
  chunk = config.chunk_samples
  if not chunk:
    # Equal chunks compile once: 20 to 39 of them, more if they'd be long.
    counts = range(20, 40)
    count = next((n for n in counts if total % n == 0), 20)
    chunk = min(math.ceil(total / count), 5000)
  return plans.Plan(
    num_seeds=config.seeds,
    first_seed=config.first_seed,
    total_samples=total,
    chunk_samples=chunk,
    accuracy_points=config.accuracy_points,
    accuracy_images=config.accuracy_images,
    final_images=config.final_images,
  )


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the program's flags; called under its guard, never at import."""
  config_flags.define(Config, flag_values)
  flags.DEFINE_bool(
    "list_arms", False, "List the arms and exit.", flag_values=flag_values
  )


def use_this_machine() -> None:
  """One CPU device a core, so replicas spread; programs compiled once."""
  logging.set_verbosity(logging.WARNING)
  jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  cache = cache.expanduser() / "pbp_jax" / "xla"
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def attend(execute: Callable[..., Mapping[str, Any]], job: Any) -> Any:
  """Executes a job under a progress bar; ends the program if it can't.

  Args:
    execute: Takes the job, whom to tell and whom to ask, as `execute` here.
    job: The job.

  Returns:
    What it returns.
  """
  with (
    interruption.Interruption() as is_interrupted,
    reporting.progress_bar() as on_progress,
  ):
    try:
      return execute(job, on_progress, is_interrupted)
    except results.WorkdirError as error:
      sys.exit(str(error))
    except interruption.Interrupted as reached:
      print(f"Ended as asked: {reached}. The same command goes on from there.")
      sys.exit(interruption.EXIT_CODE)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  if len(argv) > 1:
    raise app.UsageError(f"Arguments must be flags, got {argv[1:]}.")
  if flags.FLAGS.list_arms:
    rich.print(reporting.arms_table())
    return
  use_this_machine()
  try:
    job = prepare(config_flags.from_flags(Config))
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  finished = attend(execute, job)
  rich.print(reporting.results_table(finished))
  print(f"{job.workdir.path}: results.json, curves.png, arms.png")


if __name__ == "__main__":
  define_flags()
  app.run(main)
