"""Checkpoints: where a family of arms is in its training, on disk.

A checkpoint is a folder named by the samples seen. It is written beside its
place and then renamed, so it is there whole or not at all:

    checkpoints/family_0/000000005000/
      arrays/         the pipelines' states, in flight, by Orbax
      progress.json   the run it belongs to, the curves so far
      manifest.json   the SHA-256 of each of these files

Reading believes a checkpoint only if every file has its digest and the
progress names this run, these arms and this place.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
from typing import Any

from absl import logging
import numpy as np

from experiments import interruption, results

_DAMAGED_NAME = "damaged"
_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_ARRAYS = "arrays"

_DIGITS = 12

# Names begin with a point while a folder is not, or no longer, a checkpoint.
_PART, _GONE = ".part", ".gone"


class CheckpointError(results.WorkdirError):
  """A run can't go on from its checkpoints, or can't write them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """When to save, and how much to keep.

  Attributes:
    minutes: Minutes between checkpoints; 0 for none by time.
    samples: Samples between checkpoints; 0 for none by samples.
    kept: How many of the last ones stay.
    is_interrupted: Whether the run was asked to end: it then saves and raises
      `interruption.Interrupted`.
  """

  minutes: float = 10.0
  samples: int = 0
  kept: int = 2
  is_interrupted: Callable[[], bool] = lambda: False


class Checkpoints:
  """The checkpoints of one family of arms."""

  def __init__(
    self,
    folder: pathlib.Path,
    run: Mapping[str, Any],
    versions: Sequence[Mapping[str, Any]],
    policy: Policy,
  ):
    """Names them; writes nothing.

    Args:
      folder: Where they are.
      run: What they belong to, as JSON would give it back; the same for every
        checkpoint of the family and for no other's.
      versions: The versions that may have written them, those of here first.
      policy: When to save.
    """
    self._folder = folder
    self._run = run
    self._versions = versions
    self._policy = policy
    self._last_samples = 0
    self._last_time = time.monotonic()

  # ---- Reading.

  def exist(self) -> bool:
    """Whether there is any, good or not."""
    return bool(self._paths())

  def load(
    self, like: Sequence[Any]
  ) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Reads the newest good checkpoint; sets newer, damaged ones aside.

    Args:
      like: Arrays, or their shapes and dtypes, that it has to hold.

    Returns:
      The arrays and the progress given to `save`.

    Raises:
      CheckpointError: If none is good.
    """
    problems = {}
    for path in reversed(self._paths()):
      try:
        arrays, progress = self._read(path, like)
      except _DamagedError as error:
        problems[path] = str(error)
        continue
      for damaged, problem in problems.items():
        logging.warning(
          "The checkpoint %s is damaged (%s); going on from sample %d.",
          damaged,
          problem,
          progress["samples"],
        )
        self._set_aside(damaged)
      self._restart_clock(progress["samples"])
      return arrays, progress
    raise CheckpointError(
      "No checkpoint is good: "
      + "; ".join(f"{path}: {what}" for path, what in problems.items())
      + ". Nothing was overwritten; to start again, name a new folder."
    )

  def _paths(self) -> list[pathlib.Path]:
    """All checkpoints, the oldest first."""
    if not self._folder.is_dir():
      return []
    return sorted(self._folder.glob("[0-9]" * _DIGITS))

  def _read(
    self, path: pathlib.Path, like: Sequence[Any]
  ) -> tuple[list[np.ndarray], dict[str, Any]]:
    for name, digest in _manifest(path).items():
      if _digest(path / name) != digest:
        raise _DamagedError(f"{name} is not what was written")
    saved = json.loads((path / _PROGRESS).read_text())
    progress = saved["progress"]
    if saved["run"] != self._run or saved["versions"] not in self._versions:
      raise _DamagedError("it belongs to another run")
    if path.name != _name(progress["samples"]):
      raise _DamagedError(f"it is of sample {progress['samples']}")
    arrays = _read_arrays(path / _ARRAYS, like)
    for array, expected in zip(arrays, like, strict=True):
      if array.shape != expected.shape or array.dtype != expected.dtype:
        raise _DamagedError(
          f"an array is {array.dtype}{array.shape}, not"
          f" {expected.dtype}{expected.shape}"
        )
    return arrays, progress

  def _set_aside(self, path: pathlib.Path) -> None:
    """Moves what can't be used out of the way, without losing it."""
    aside = self._folder.parent / _DAMAGED_NAME
    aside.mkdir(exist_ok=True)
    count = len(list(aside.iterdir()))
    path.rename(aside / f"{self._folder.name}_{path.name}_{count}")

  # ---- Writing.

  def is_due(self, samples: int) -> bool:
    """Whether to save now that so many samples were seen."""
    policy = self._policy
    seen = samples - self._last_samples
    minutes = (time.monotonic() - self._last_time) / 60
    return (
      policy.is_interrupted()
      or bool(policy.samples and seen >= policy.samples)
      or bool(policy.minutes and minutes >= policy.minutes)
    )

  def save(
    self, arrays: Sequence[np.ndarray], progress: Mapping[str, Any]
  ) -> None:
    """Writes a checkpoint, whole or not at all.

    What goes wrong with the disk is only a warning: training needs no disk.

    Args:
      arrays: Arrays on the host.
      progress: The rest, of what JSON can hold; NaN may be in it. `samples`
        names the checkpoint.

    Raises:
      interruption.Interrupted: If the run was asked to end.
    """
    samples = progress["samples"]
    outcome = "was saved"
    if samples != self._last_samples:
      try:
        self._write(arrays, progress)
      except Exception as error:  # Orbax has many
        shutil.rmtree(self._folder / _PART, ignore_errors=True)
        outcome = "could not be saved; the checkpoint before it still stands"
        logging.warning(
          "The checkpoint of sample %d could not be written (%s: %s).",
          samples,
          type(error).__name__,
          error,
        )
    self._restart_clock(samples)
    if self._policy.is_interrupted():
      raise interruption.Interrupted(
        f"sample {samples} of {' and '.join(self._run['arms'])} {outcome}"
      )

  def remove(self) -> None:
    """Removes them all: the family has ended."""
    _remove(self._folder)
    if self._folder.parent.is_dir() and not any(self._folder.parent.iterdir()):
      self._folder.parent.rmdir()

  def check_room(self, size: int) -> None:
    """Raises a CheckpointError if the disk can't hold checkpoints.

    Args:
      size: Bytes that each will hold.
    """
    needed = size * (self._policy.kept + 1)
    place = next(p for p in self._folder.absolute().parents if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
      raise CheckpointError(
        f"workdir must have room for {self._policy.kept + 1} checkpoints of"
        f" {size / 1e6:.1f} MB each, {str(place)!r} has {free / 1e6:.1f} MB"
        " left. Nothing was trained."
      )

  def _write(
    self, arrays: Sequence[np.ndarray], progress: Mapping[str, Any]
  ) -> None:
    part = self._folder / _PART
    _remove(part)
    part.mkdir(parents=True)
    _write_arrays(part / _ARRAYS, arrays)
    saved = {
      "run": self._run,
      "versions": self._versions[0],
      "progress": progress,
    }
    (part / _PROGRESS).write_text(json.dumps(saved))
    files = [path for path in sorted(part.rglob("*")) if path.is_file()]
    manifest = {
      path.relative_to(part).as_posix(): _digest(path, sync=True)
      for path in files
    }
    (part / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    _digest(part / _MANIFEST, sync=True)
    part.rename(self._folder / _name(progress["samples"]))
    for old in self._paths()[: -self._policy.kept]:
      _remove(old)

  def _restart_clock(self, samples: int) -> None:
    self._last_samples = samples
    self._last_time = time.monotonic()


class _DamagedError(Exception):
  """A checkpoint that is not what was written, or not of this run."""


def _name(samples: int) -> str:
  return f"{samples:0{_DIGITS}d}"


def _manifest(path: pathlib.Path) -> dict[str, str]:
  """The digests of a checkpoint's files, which must be all it can't miss."""
  try:
    manifest = json.loads((path / _MANIFEST).read_bytes())
  except FileNotFoundError:
    raise _DamagedError(f"{_MANIFEST} is missing") from None
  except (OSError, ValueError) as error:
    raise _DamagedError(f"{_MANIFEST} can't be read: {error}") from error
  if not isinstance(manifest, dict) or _PROGRESS not in manifest:
    raise _DamagedError(f"{_MANIFEST} lists no {_PROGRESS}")
  return manifest


def _digest(path: pathlib.Path, sync: bool = False) -> str:
  """The SHA-256 of a file, which is on the disk for good with sync."""
  try:
    with path.open("rb") as f:
      if sync:
        os.fsync(f.fileno())
      return hashlib.file_digest(f, "sha256").hexdigest()
  except OSError as error:
    raise _DamagedError(f"{path.name} can't be read: {error}") from error


def _remove(folder: pathlib.Path) -> None:
  """Removes a folder, which is first renamed: never half of it stays."""
  gone = folder.with_name(_GONE)
  shutil.rmtree(gone, ignore_errors=True)
  if folder.exists():
    folder.rename(gone)
    shutil.rmtree(gone)


def _write_arrays(path: pathlib.Path, arrays: Sequence[np.ndarray]) -> None:
  """Writes arrays; those of size 0, which Orbax does not take, are skipped."""
  import orbax.checkpoint as ocp  # it takes a second to import

  tree = {f"{i:06d}": array for i, array in enumerate(arrays) if array.size}
  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
    checkpointer.save(path.absolute(), args=ocp.args.StandardSave(tree))


def _read_arrays(path: pathlib.Path, like: Sequence[Any]) -> list[np.ndarray]:
  """Reads what `_write_arrays` wrote."""
  import orbax.checkpoint as ocp

  with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
    tree = checkpointer.restore(
      path.absolute(), args=ocp.args.StandardRestore()
    )
  blank = {f"{i:06d}": np.zeros(x.shape, x.dtype) for i, x in enumerate(like)}
  names = [name for name, array in blank.items() if array.size]
  if sorted(tree) != names:
    raise _DamagedError(f"it holds {len(tree)} arrays, not {len(names)}")
  return [np.asarray(array) for array in {**blank, **tree}.values()]
