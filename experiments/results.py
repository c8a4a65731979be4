"""Results of a run: their form, their numbers, and the folder they live in.

`results.json` is written at the run's start with `"status": "incomplete"` and
at its end with `"done"`. It never holds NaN: what a diverged seed has no number
for is null, and its arm's status is `"diverged"`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
import statistics
from typing import Any, Protocol

import numpy as np

from experiments import versions as versions_lib

FILE_NAME = "results.json"

# Being written; left behind where a program was killed.
_PART_NAME = FILE_NAME + ".part"

# What says where and how safely a run works, not what it computes.
_NOT_OF_THE_NUMBERS = frozenset({
  "workdir", "data_dir", "checkpoint_minutes", "checkpoint_samples",
  "checkpoints_kept", "resume", "resume_anyway",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ArmResult:
  """What became of one arm, one entry for each seed.

  Attributes:
    final_accuracy: On the test split, of the newest weights at the end; None
      if the seed diverged.
    final_loss: Mean over the training split, likewise.
    diverged_at: Index of the sample whose loss, or whose update's weights,
      were the first not to be finite; None if all were.
    diverged_stage: The stage where that showed: the last one if it was the
      loss, else the one nearest to the loss whose weights weren't finite.
    curve: `samples` seen and the mean training `loss` over the samples since
      the entry before, `[seed][entry]`; `accuracy_samples` and test
      `accuracy`, `[seed][entry]`.
    train_seconds: Seconds of training, compilation included, of the program
      that trained this arm.
    trained_with: The arms that this one program trained, side by side.
  """

  final_accuracy: Sequence[float | None]
  final_loss: Sequence[float | None]
  diverged_at: Sequence[int | None]
  diverged_stage: Sequence[int | None]
  curve: Mapping[str, Any]
  train_seconds: float
  trained_with: Sequence[str]

  def as_json(self) -> dict[str, Any]:
    """The arm's entry in `results.json`."""
    accuracy_mean, accuracy_std = mean_and_std(self.final_accuracy)
    loss_mean, loss_std = mean_and_std(self.final_loss)
    is_diverged = any(index is not None for index in self.diverged_at)
    return {
      "status": "diverged" if is_diverged else "done",
      "final_accuracy": list(self.final_accuracy),
      "final_loss": list(self.final_loss),
      "accuracy_mean": accuracy_mean,
      "accuracy_std": accuracy_std,
      "loss_mean": loss_mean,
      "loss_std": loss_std,
      "diverged_at": list(self.diverged_at),
      "diverged_stage": list(self.diverged_stage),
      "curve": dict(self.curve),
      "train_seconds": round(self.train_seconds, 3),
      "trained_with": list(self.trained_with),
    }

  @classmethod
  def from_json(cls, entry: Mapping[str, Any]) -> "ArmResult":
    """The result whose `as_json` is this."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: entry[name] for name in names})


class WorkdirError(ValueError):
  """A folder that can't be written, or whose files can't be used."""


class Entry(Protocol):
  """What can stand under `arms` in `results.json`."""

  def as_json(self) -> dict[str, Any]:
    """The entry, of what JSON can hold."""
    ...


def mean_and_std(
  values: Sequence[float | None],
) -> tuple[float | None, float | None]:
  """Mean and sample standard deviation over seeds; None if a seed has none.

  The deviation of a single seed is 0.

  Example:
    >>> mean_and_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    >>> mean_and_std([1.0, None])
    (None, None)
  """
  known = [value for value in values if value is not None]
  if len(known) < len(values) or not known:
    return None, None
  deviation = statistics.stdev(known) if len(known) > 1 else 0.0
  return statistics.fmean(known), deviation


def finite_or_none(array: Any) -> Any:
  """Nested lists of an array's numbers, None for those that aren't finite.

  Example:
    >>> finite_or_none([[1.0, float("nan")]])
    [[1.0, None]]
  """
  if np.ndim(array):
    return [finite_or_none(item) for item in array]
  number = float(array)
  return number if math.isfinite(number) else None


@dataclasses.dataclass(frozen=True)
class Workdir:
  """The folder of one run; it holds this run and nothing else.

  Attributes:
    path: The folder.
    config: The run's configuration as JSON would give it back.
    finished: The results, if the run has ended before; else None.
    unfinished: The results so far, if the run was broken off; else None.
    versions: What runs, as of the claim: the checkout may move on meanwhile.
      `earlier` holds others that parts of the run were computed by.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  finished: Mapping[str, Any] | None = None
  unfinished: Mapping[str, Any] | None = None
  versions: Mapping[str, Any] = dataclasses.field(
    default_factory=versions_lib.here
  )

  @classmethod
  def claim(cls, path: str | os.PathLike, config: Any) -> "Workdir":
    """Takes a folder for a run; nothing is written yet.

    Args:
      path: A folder that is absent, empty, or holds this very run, whether
        finished or broken off.
      config: The run's configuration, a dataclass.

    Returns:
      The folder.

    Raises:
      ValueError: If the path is no folder, can't be written, or holds anything
        else.
    """
    path = pathlib.Path(path)
    own = json.loads(json.dumps(dataclasses.asdict(config)))
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
      raise ValueError(f"workdir must be a folder, got the file {str(path)!r}.")
    if not os.access(nearest, os.W_OK | os.X_OK):
      raise ValueError(
        f"workdir must be writable, {str(nearest)!r} is not. Nothing was"
        " written; name another folder."
      )
    if nearest != path or {p.name for p in path.iterdir()} <= {_PART_NAME}:
      return cls(path, own)
    found = _read(path / FILE_NAME)
    if found is None:
      raise ValueError(
        f"workdir={str(path)!r} holds something that isn't a run of this"
        " program. Nothing was written; name a new or an empty folder."
      )
    differences = versions_lib.differences(
      of_the_numbers(found["config"]), of_the_numbers(own)
    )
    if differences:
      raise ValueError(
        f"workdir={str(path)!r} holds another run: {'; '.join(differences)}."
        " Nothing was written; name a new or an empty folder."
      )
    if found["status"] == "done":
      return cls(path, own, finished=found)
    return cls(path, own, unfinished=found)

  def resumed(self, anyway: bool = False) -> "Workdir":
    """The folder of the unfinished run, to go on with; writes nothing.

    Args:
      anyway: Whether to go on where other versions began; the results then
        name both.

    Returns:
      The folder. Its versions are those that the run began with.

    Raises:
      ValueError: If other versions began, which may change numbers.
    """
    if self.unfinished is None or not (
      self.unfinished["arms"] or self.checkpoints_path.exists()
    ):
      return self  # nothing was computed yet
    before = self.unfinished["versions"]
    differences = versions_lib.differences(
      versions_lib.of_the_numbers(before),
      versions_lib.of_the_numbers(self.versions),
    )
    if not differences:
      return dataclasses.replace(self, versions=before)
    if not anyway:
      raise ValueError(
        f"workdir={str(self.path)!r} holds a run that other versions began:"
        f" {'; '.join(differences)}. Going on could change its numbers. Nothing"
        " was written; name a new folder, or go on with --resume_anyway."
      )
    begun = {k: v for k, v in before.items() if k != "earlier"}
    earlier = [*before.get("earlier", []), begun]
    return dataclasses.replace(
      self, versions={**self.versions, "earlier": earlier}
    )

  @property
  def checkpoints_path(self) -> pathlib.Path:
    """The folder of the run's checkpoints."""
    return self.path / "checkpoints"

  @property
  def ended(self) -> dict[str, ArmResult]:
    """The arms of an unfinished run that have ended."""
    arms = self.unfinished["arms"] if self.unfinished else {}
    try:
      return {name: ArmResult.from_json(arm) for name, arm in arms.items()}
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(
        f"{str(self.path / FILE_NAME)!r} is damaged: an arm's entry lacks"
        f" {error}. Nothing was written; name a new folder."
      ) from error

  def write(self, status: str, arms: Mapping[str, Entry]) -> dict[str, Any]:
    """Writes `results.json`, whole or not at all.

    Args:
      status: "incomplete", or "done" when every arm has ended.
      arms: Results of the arms that have ended.

    Returns:
      What was written.

    Raises:
      WorkdirError: If the folder can't be written.
      ValueError: If there is a number that JSON does not have.
    """
    results = {
      "status": status,
      "config": dict(self.config),
      "versions": dict(self.versions),
      "arms": {name: arm.as_json() for name, arm in arms.items()},
    }
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      part = self.path / _PART_NAME
      with part.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
      part.replace(self.path / FILE_NAME)
    except OSError as error:
      raise WorkdirError(
        f"workdir={str(self.path)!r} must be writable: {error}. What stood"
        " there before still does."
      ) from error
    return json.loads(text)


def of_the_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
  """The part of a configuration that says what is computed."""
  return {
    name: value
    for name, value in config.items()
    if name not in _NOT_OF_THE_NUMBERS
  }


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """A results file of this program; None if it is anything else."""
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError):
    return None
  known = {"status", "config", "versions", "arms"}
  if not isinstance(found, dict) or set(found) != known:
    return None
  return found
