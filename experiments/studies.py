"""The paper's studies of delay and its mitigations, one by one.

`--list_studies` lists them with the claims they test (Kosson et al., arXiv
2003.11666); `study_list` holds what each varies. All train by the parts of
`train`.

Command: python -m experiments.studies --study=constant_delay --workdir=DIR
Hardware, time and numbers: experiments/README.md.

`--workdir` gets `results.json`, with an entry under `arms` for each line and
point, `STUDY.png`, and both as a page, `README.md`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

from absl import app, flags
import rich
from rich import table as rich_table

from experiments import (
  checkpoints,
  config_flags,
  reporting,
  results,
  resumable,
  runner,
  study_list,
  study_page,
  study_settings,
  train,
)
import pbp_jax as pbp
from pbp_jax import data, plotting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which study, how large and where.

  Attributes:
    study: Name of the study; --list_studies lists them.
    scale: "smoke" for a test of seconds, "cpu" for minutes on two cores,
      "paper" for the paper's recipe on a GPU.
    smoke: Short for --scale=smoke.
    seeds: Number of seeds a setting; 0 is the study's own.
    workdir: Folder for results.json and the picture; empty or absent at first.
    data_dir: Folder of prepared tensorflow-datasets; empty is its default.
  """

  study: str = "constant_delay"
  scale: str = "cpu"
  smoke: bool = False
  seeds: int = 0
  workdir: str = ""
  data_dir: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """The configuration as `results.json` keeps it.

  Attributes:
    workdir: As in `Config`.
    data_dir: As in `Config`.
    study: As in `Config`.
    scale: As in `Config`.
    claim: The claim tested.
    grid: What was run.
  """

  workdir: str
  data_dir: str
  study: str
  scale: str
  claim: str
  grid: study_list.Grid


class Point(NamedTuple):
  """One line at one point.

  Attributes:
    line: The line.
    x: The point.
    setting: What is run there.
  """

  line: str
  x: study_list.Place
  setting: study_settings.Setting


@dataclasses.dataclass(frozen=True)
class Job:
  """All that a study needs, checked before anything is written.

  Attributes:
    study: The study.
    points: What is run, by the label under which `results.json` keeps it.
    dataset: The images.
    workdir: The folder.
  """

  study: study_list.Study
  points: Mapping[str, Point]
  dataset: data.Images
  workdir: results.Workdir


def prepare(config: Config) -> Job:
  """Makes what a study needs; writes nothing.

  Args:
    config: The study.

  Returns:
    The job.

  Raises:
    ValueError: If a name is unknown, data isn't prepared, or the folder is
      missing or holds something else.
  """
  if config.study not in study_list.STUDIES:
    raise ValueError(
      f"study must be one of {', '.join(study_list.STUDIES)}, got"
      f" {config.study!r}."
    )
  study = study_list.STUDIES[config.study]
  scale = "smoke" if config.smoke else config.scale
  if scale not in study.grids:
    raise ValueError(
      f"scale must be one of {', '.join(study.grids)}, got {scale!r}."
    )
  if not config.workdir:
    raise ValueError("workdir must name a folder, got ''.")
  grid = study.grids[scale]
  if config.seeds:
    base = dataclasses.replace(grid.base, seeds=config.seeds)
    grid = dataclasses.replace(grid, base=base)
  workdir = results.Workdir.claim(
    config.workdir,
    Recorded(
      workdir=config.workdir,
      data_dir=config.data_dir,
      study=config.study,
      scale=scale,
      claim=study.claim,
      grid=grid,
    ),
  ).resumed()
  points = {
    f"{line} @ {x}": Point(line, x, setting)
    for (line, x), setting in grid.settings().items()
  }
  dataset = data.load(grid.base.dataset, config.data_dir or None)
  return Job(study, points, dataset, workdir)


def execute(
  job: Job,
  on_progress: runner.OnProgress = lambda task, done, total: None,
  is_interrupted: Callable[[], bool] = lambda: False,
) -> Mapping[str, Any]:
  """Trains all settings and writes the results; a finished run is only read.

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
  workdir = job.workdir
  if workdir.finished is not None:
    return workdir.finished
  ended = resumable.train(
    [_make_part(job, labels) for labels in _by_task(job)],
    workdir,
    checkpoints.Policy(is_interrupted=is_interrupted),
    on_progress,
  )
  in_order = {label: ended[label] for label in job.points}
  name = f"{workdir.config['study']}.png"
  _draw(job, in_order).savefig(workdir.path / name)
  found = workdir.write("done", in_order)
  (workdir.path / study_page.FILE_NAME).write_text(study_page.page(found))
  return found


def run(config: Config) -> Mapping[str, Any]:
  """Prepares and executes a study; returns the contents of `results.json`."""
  return execute(prepare(config))


def _by_task(job: Job) -> Iterable[list[str]]:
  """Labels of the settings, together where one task trains them."""
  key = lambda label: repr(job.points[label].setting.task_key)
  for _, labels in itertools.groupby(sorted(job.points, key=key), key):
    yield list(labels)


def _make_part(
  job: Job, labels: Sequence[str]
) -> tuple[runner.Task, list[pbp.presets.Arm]]:
  """The task of these settings, and their arms."""
  setting = job.points[labels[0]].setting
  stages = study_settings.make_stages(setting, job.dataset.num_classes)
  num_examples = job.dataset.num_train
  plan = train.make_plan(setting, num_examples)
  arms = [
    study_settings.make_arm(
      label,
      job.points[label].setting,
      len(stages),
      num_examples,
      plan.total_samples,
    )
    for label in labels
  ]
  return runner.Task(stages, job.dataset, plan, setting.augment), arms


def _draw(job: Job, ended: Mapping[str, results.ArmResult]) -> Any:
  """The study's picture, a matplotlib figure."""
  lines: dict[str, dict[Any, Any]] = {}
  for label, point in job.points.items():
    lines.setdefault(point.line, {})[point.x] = {
      "loss": ended[label].final_loss,
      "accuracy": ended[label].final_accuracy,
    }
  seeds = {point.setting.seeds for point in job.points.values()}
  return plotting.settings_chart(
    lines,
    x_label=job.study.x_label,
    title=f"{job.workdir.config['study']}, {job.dataset.name}: each of"
    f" {max(seeds)} seeds, and their median",
    chance_loss=math.log(job.dataset.num_classes),
  )


def studies_table() -> rich_table.Table:
  """What studies there are, and the claims they test."""
  table = rich_table.Table(title="Studies")
  table.add_column("study")
  table.add_column("claim tested")
  for name, study in study_list.STUDIES.items():
    table.add_row(name, study.claim)
  return table


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the program's flags; called under its guard, never at import."""
  config_flags.define(Config, flag_values)
  flags.DEFINE_bool(
    "list_studies",
    False,
    "List the studies and exit.",
    flag_values=flag_values,
  )


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  if len(argv) > 1:
    raise app.UsageError(f"Arguments must be flags, got {argv[1:]}.")
  if flags.FLAGS.list_studies:
    rich.print(studies_table())
    return
  train.use_this_machine()
  try:
    job = prepare(config_flags.from_flags(Config))
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  found = train.attend(execute, job)
  base = found["config"]["grid"]["base"]
  rich.print(reporting.results_table({**found, "config": base}))
  print(f"{job.workdir.path / study_page.FILE_NAME}: the table and the picture")


if __name__ == "__main__":
  define_flags()
  app.run(main)
