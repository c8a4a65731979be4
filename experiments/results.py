"""Results of a run: their form, their numbers, and the folder they live in.

`results.json` is written at the run's start with `"status": "incomplete"` and
at its end with `"done"`. It never holds NaN: what a diverged seed has no number
for is null.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
from typing import Any, Protocol

import jax
import numpy as np

FILE_NAME = "results.json"

# What says where a run is or works, not what it computes.
_PLACES = ("workdir", "data_dir")

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "pbp_jax")


@dataclasses.dataclass(frozen=True)
class ArmResult:
  """What became of one arm, one entry for each seed.

  Attributes:
    final_accuracy: On the test split, of the newest weights at the end; None
      if the seed diverged.
    final_loss: Mean over the training split, likewise.
    diverged_at: Index of the sample whose loss, or whose update's weights,
      were the first not to be finite; None if all were.
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
  curve: Mapping[str, Any]
  train_seconds: float
  trained_with: Sequence[str]

  def as_json(self) -> dict[str, Any]:
    """The arm's entry in `results.json`."""
    accuracy_mean, accuracy_std = mean_and_std(self.final_accuracy)
    loss_mean, loss_std = mean_and_std(self.final_loss)
    return {
      "final_accuracy": list(self.final_accuracy),
      "final_loss": list(self.final_loss),
      "accuracy_mean": accuracy_mean,
      "accuracy_std": accuracy_std,
      "loss_mean": loss_mean,
      "loss_std": loss_std,
      "diverged_at": list(self.diverged_at),
      "curve": dict(self.curve),
      "train_seconds": round(self.train_seconds, 3),
      "trained_with": list(self.trained_with),
    }


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
    versions: What runs, as of the claim: the checkout may move on meanwhile.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  finished: Mapping[str, Any] | None = None
  versions: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: versions()
  )

  @classmethod
  def claim(cls, path: str | os.PathLike, config: Any) -> "Workdir":
    """Takes a folder for a run; nothing is written yet.

    Args:
      path: A folder that is absent, empty, or holds this very run, whether
        finished or broken off (which then starts again).
      config: The run's configuration, a dataclass.

    Returns:
      The folder.

    Raises:
      ValueError: If the path is no folder, or holds anything else.
    """
    path = pathlib.Path(path)
    own = json.loads(json.dumps(dataclasses.asdict(config)))
    if not path.exists():
      return cls(path, own)
    if not path.is_dir():
      raise ValueError(f"workdir must be a folder, got the file {str(path)!r}.")
    if not any(path.iterdir()):
      return cls(path, own)
    found = _read(path / FILE_NAME)
    if found is None:
      raise ValueError(
        f"workdir={str(path)!r} holds something that isn't a run of this"
        " program. Nothing was written; name a new or an empty folder."
      )
    differences = [
      f"{name}={found['config'].get(name)!r} there, {own.get(name)!r} here"
      for name in sorted({*found["config"], *own})
      if name not in _PLACES and found["config"].get(name) != own.get(name)
    ]
    if differences:
      raise ValueError(
        f"workdir={str(path)!r} holds another run: {'; '.join(differences)}."
        " Nothing was written; name a new or an empty folder."
      )
    return cls(path, own, found if found["status"] == "done" else None)

  def write(self, status: str, arms: Mapping[str, Entry]) -> dict[str, Any]:
    """Writes `results.json`, whole or not at all.

    Args:
      status: "incomplete", or "done" when every arm has ended.
      arms: Results of the arms that have ended.

    Returns:
      What was written.
    """
    results = {
      "status": status,
      "config": dict(self.config),
      "versions": dict(self.versions),
      "arms": {name: arm.as_json() for name, arm in arms.items()},
    }
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    self.path.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
      "w", dir=self.path, prefix=FILE_NAME, suffix=".part", delete=False
    ) as f:
      f.write(text)
    os.chmod(f.name, 0o644)
    os.replace(f.name, self.path / FILE_NAME)
    return json.loads(text)


def versions() -> dict[str, Any]:
  """What the numbers depend on besides the configuration."""
  devices = jax.devices()
  return {
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in _PACKAGES},
    "device": f"{len(devices)} x {devices[0].device_kind}",
    "commit": _commit(),
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


def _commit() -> str | None:
  """The checkout's commit, with "+" if files differ from it."""
  git = ["git", "-C", str(pathlib.Path(__file__).parent)]
  try:
    commit, changes = (
      subprocess.run(
        [*git, *command], capture_output=True, text=True, check=True
      ).stdout.strip()
      for command in (
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "--untracked-files=no"),
      )
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return commit + ("+" if changes else "")
