"""What a person sees of a run: the progress bar and the table."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

from experiments import runner
import pbp_jax as pbp


@contextlib.contextmanager
def progress_bar() -> Iterator[runner.OnProgress]:
  """A bar for each task; yields what to tell it."""
  with rich_progress.Progress(
    rich_progress.TextColumn("{task.description}"),
    rich_progress.BarColumn(),
    rich_progress.TextColumn("{task.completed}/{task.total} samples"),
    rich_progress.TimeElapsedColumn(),
    rich_progress.TimeRemainingColumn(),
    console=rich_console.Console(stderr=True),
  ) as bars:
    tasks: dict[str, rich_progress.TaskID] = {}

    def on_progress(task: str, done: int, total: int) -> None:
      if task not in tasks:
        tasks[task] = bars.add_task(task, total=total)
      bars.update(tasks[task], completed=done)

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
    f" {config['seeds']} seeds",
    caption="Arms trained side by side share their time.",
  )
  table.add_column("arm")
  table.add_column("test accuracy (%)", justify="right")
  table.add_column("final loss", justify="right")
  table.add_column("time", justify="right")
  for name, arm in results["arms"].items():
    together = len(arm["trained_with"])
    table.add_row(
      name,
      _mean_and_std(arm["accuracy_mean"], arm["accuracy_std"], 100, 1),
      _mean_and_std(arm["loss_mean"], arm["loss_std"], 1, 4),
      f"{arm['train_seconds']:.1f} s"
      + (f" ({together} arms)" if together > 1 else ""),
    )
    diverged = [
      (at, stage)
      for at, stage in zip(
        arm["diverged_at"], arm["diverged_stage"], strict=True
      )
      if at is not None
    ]
    if diverged:
      first, stage = min(diverged)
      table.add_row(
        "",
        f"[red]{len(diverged)} of {len(arm['diverged_at'])} seeds diverged[/]",
        f"[red]from sample {first}[/]",
        f"[red]stage {stage}[/]",
      )
  return table


def arms_table() -> rich_table.Table:
  """What arms there are, and what their words mean."""
  table = rich_table.Table(title="Words of an arm's name, joined by +")
  for column in ("word", "meaning", "source"):
    table.add_column(column)
  for row in pbp.presets.describe_arms():
    table.add_row(*row)
  table.caption = "Common arms: " + ", ".join(pbp.presets.list_arms())
  return table


def _mean_and_std(
  mean: float | None, deviation: float | None, scale: float, digits: int
) -> str:
  if mean is None or deviation is None:
    return "diverged"
  return f"{mean * scale:.{digits}f} ± {deviation * scale:.{digits}f}"
