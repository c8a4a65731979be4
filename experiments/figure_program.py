"""What the programs have in common that draw without training.

They write the same `results.json` as those that train: what would be an arm
there is a row of numbers here.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any, cast

from absl import app
from matplotlib import figure as figures

from experiments import config_flags, results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
  """Where the run goes and how large it is.

  Attributes:
    workdir: Folder for results.json and the pictures.
    scale: "smoke" for a test of seconds, "cpu" for the pictures as committed,
      "paper" the same, as nothing here needs more.
    smoke: Short for --scale=smoke.
  """

  workdir: str = ""
  scale: str = "cpu"
  smoke: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """The configuration as `results.json` keeps it.

  Attributes:
    workdir: As in `Flags`.
    scale: As in `Flags`.
    sizes: What the program computed.
  """

  workdir: str
  scale: str
  sizes: Any


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of results; takes the place of a trained arm's.

  Attributes:
    numbers: What JSON can hold.
  """

  numbers: Mapping[str, Any]

  def as_json(self) -> dict[str, Any]:
    """The row's entry in `results.json`."""
    return dict(self.numbers)


# Numbers by row, and pictures by name.
Output = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, figures.Figure]]


def run_in_workdir(
  flags: Flags, scales: Mapping[str, Any], run: Callable[[Any], Output]
) -> dict[str, Any]:
  """Runs a program into its folder.

  Args:
    flags: Where and how large.
    scales: The program's sizes, a dataclass for each scale.
    run: Takes sizes, returns numbers and pictures.

  Returns:
    What `results.json` holds. A folder that holds this run, finished, is left
    as it is.

  Raises:
    ValueError: If the scale is unknown, or the folder is missing or holds
      something else.
  """
  scale = "smoke" if flags.smoke else flags.scale
  if scale not in scales:
    raise ValueError(
      f"scale must be one of {', '.join(scales)}, got {scale!r}."
    )
  if not flags.workdir:
    raise ValueError("workdir must name a folder, got ''.")
  folder = results.Workdir.claim(
    flags.workdir,
    Recorded(workdir=flags.workdir, scale=scale, sizes=scales[scale]),
  )
  if folder.finished:
    return dict(folder.finished)
  folder.write("incomplete", {})
  rows, pictures = run(scales[scale])
  for name, picture in pictures.items():
    picture.savefig(pathlib.Path(folder.path) / f"{name}.png", dpi=110)
  # `write` asks no more of an arm than as_json.
  arms = cast(Any, {name: Row(numbers) for name, numbers in rows.items()})
  return folder.write("done", arms)


def main(scales: Mapping[str, Any], run: Callable[[Any], Output]) -> None:
  """Runs a program by its command line.

  Args:
    scales: The program's sizes, a dataclass for each scale.
    run: Takes sizes, returns numbers and pictures.
  """
  config_flags.define(Flags)

  def with_flags(_):
    flags = config_flags.from_flags(Flags)
    try:
      found = run_in_workdir(flags, scales, run)
    except ValueError as error:
      raise app.UsageError(str(error)) from error
    print(f"{len(found['arms'])} rows and the pictures are in {flags.workdir}")

  app.run(with_flags)
