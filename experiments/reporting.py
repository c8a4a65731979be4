"""What a person sees of a run: the progress bar and the table."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any

from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

from experiments import runner
import pbp_jax as pbp


@contextlib.contextmanager
def progress_bar() -> Iterator[runner.OnProgress]:
  """A bar for each family of arms; yields what to tell it."""
  with rich_progress.Progress(
    rich_progress.TextColumn("{task.description}"),
    rich_progress.BarColumn(),
    rich_progress.TextColumn("{task.completed}/{task.total} samples"),
    rich_progress.TimeElapsedColumn(),
    rich_progress.TimeRemainingColumn(),
    console=rich_console.Console(stderr=True),
  ) as bars:
    tasks: dict[tuple[str, ...], rich_progress.TaskID] = {}

    def on_progress(names: Sequence[str], samples: int, total: int) -> None:
      key = tuple(names)
      if key not in tasks:
        tasks[key] = bars.add_task(", ".join(names), total=total)
      bars.update(tasks[key], completed=samples)

    yield on_progress


def results_table(results: Mapping[str, Any]) -> rich_table.Table:
  """The table of a finished run, one arm a line.

  Args:
    results: The contents of `results.json`.

  Returns:
    A table for `rich.print`.
  """
  config = results["config"]
  table = rich_table.Table(
    title=f"{config['dataset']}, {config['model']}: mean ± sd over"
    f" {config['seeds']} seeds"
  )
  table.add_column("arm")
  table.add_column("test accuracy (%)", justify="right")
  table.add_column("final training loss", justify="right")
  table.add_column("time (s)", justify="right")
  table.add_column("", style="dim")
  for name, arm in results["arms"].items():
    diverged = [at for at in arm["diverged_at"] if at is not None]
    notes = []
    if len(arm["trained_with"]) > 1:
      notes.append(f"{len(arm['trained_with'])} arms side by side")
    if diverged:
      notes.append(
        f"{len(diverged)} of {len(arm['diverged_at'])} seeds diverged, the"
        f" first at sample {min(diverged)}"
      )
    table.add_row(
      name,
      _mean_and_std(arm["accuracy_mean"], arm["accuracy_std"], 100, 1),
      _mean_and_std(arm["loss_mean"], arm["loss_std"], 1, 4),
      f"{arm['train_seconds']:.1f}",
      "; ".join(notes),
    )
  return table


def arms_table() -> rich_table.Table:
  """What arms there are, and what their words mean."""
  table = rich_table.Table(title="Words of an arm's name, joined by +")
  table.add_column("word")
  table.add_column("meaning")
  for name, base in pbp.presets.BASES.items():
    table.add_row(name, base.description)
  table.add_section()
  for name, meaning in pbp.presets.CONSISTENCIES.items():
    table.add_row(f"+{name}", meaning)
  for name, mitigation in pbp.presets.MITIGATIONS.items():
    table.add_row(f"+{name}", mitigation.formula)
  table.caption = "Common arms: " + ", ".join(pbp.presets.list_arms())
  return table


def _mean_and_std(
  mean: float | None, deviation: float | None, scale: float, digits: int
) -> str:
  if mean is None or deviation is None:
    return "diverged"
  return f"{mean * scale:.{digits}f} ± {deviation * scale:.{digits}f}"
