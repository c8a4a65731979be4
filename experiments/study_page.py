"""A study's results as a page: what was asked, how, the picture, the table."""

from collections.abc import Iterable, Mapping, Sequence
import statistics
from typing import Any

FILE_NAME = "README.md"

# What of the settings a reader wants to know, where all points share it.
_SHOWN = (
  "dataset", "model", "num_stages", "width", "epochs", "max_samples",
  "learning_rate", "momentum", "reference_batch_size", "weight_decay",
)  # fmt: skip


def page(results: Mapping[str, Any]) -> str:
  """The page of a finished study.

  Args:
    results: The contents of its `results.json`.

  Returns:
    Markdown. Each cell of its table has the median final training loss of the
    seeds and the mean and sample standard deviation of their test accuracies;
    seeds that diverged are counted, and then there is no mean.
  """
  config, versions = results["config"], results["versions"]
  grid, study = config["grid"], config["study"]
  lines, points = list(grid["lines"]), list(grid["points"])
  varied = {
    name
    for changes in (*grid["lines"].values(), *grid["points"].values())
    for name in changes
  }
  base = ", ".join(
    f"{name} {grid['base'][name]}"
    for name in _SHOWN
    if name not in varied and grid["base"][name]
  )
  rows = [
    [line, *(_cell(results["arms"][f"{line} @ {x}"]) for x in points)]
    for line in lines
  ]
  return "\n".join([
    f"# {study}, scale `{config['scale']}`",
    "",
    f"Claim tested (Kosson et al., arXiv 2003.11666, as recalled):"
    f" {config['claim']}",
    "",
    f"`python -m experiments.studies --study={study} --scale={config['scale']}"
    f" --workdir={config['workdir']}`, {grid['base']['seeds']} seeds (0 to"
    f" {grid['base']['seeds'] - 1}), commit {versions['commit']},"
    f" {_minutes(results['arms'].values()):.1f} min of training with"
    f" compilation, {versions['device']}. All else in"
    " [results.json](results.json).",
    "",
    f"The same for all: {base}.",
    "",
    f"![{study}]({study}.png)",
    "",
    "Median final training loss; test accuracy in %, mean ± sample standard"
    " deviation over seeds.",
    "",
    *_table(["", *map(str, points)], rows),
    "",
  ])  # fmt: skip


def _table(
  header: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterable[str]:
  for row in (header, ["---"] * len(header), *rows):
    yield f"| {' | '.join(row)} |"


def _cell(arm: Mapping[str, Any]) -> str:
  diverged = sum(at is not None for at in arm["diverged_at"])
  if diverged:
    return f"{diverged} of {len(arm['diverged_at'])} diverged"
  return (
    f"{statistics.median(arm['final_loss']):.3f};"
    f" {100 * arm['accuracy_mean']:.1f} ± {100 * arm['accuracy_std']:.1f}"
  )


def _minutes(arms: Iterable[Mapping[str, Any]]) -> float:
  """Training, of arms trained side by side once."""
  seconds = {tuple(arm["trained_with"]): arm["train_seconds"] for arm in arms}
  return sum(seconds.values()) / 60
