"""Reading sets of images that tensorflow-datasets has prepared.

Sets prepared as array_record files are read without TensorFlow; preparing them
needs it, once, by `prepare_command`.
"""

from collections.abc import Sequence
import hashlib
import os
import pathlib
import tempfile
from typing import Any
import zipfile

import numpy as np

# A split is a pair (images, labels).
Split = tuple[np.ndarray, np.ndarray]


def read(
  name: str, data_dir: str | os.PathLike | None = None
) -> tuple[Split, Split]:
  """Reads the training and the test split of a prepared set.

  Decoding the PNG images of 60,000 examples takes a quarter of a minute, so
  they are kept decoded in the user's cache folder
  (`$XDG_CACHE_HOME/pbp_jax`, by default `~/.cache/pbp_jax`), under a name that
  changes with the prepared files.

  Args:
    name: What tensorflow-datasets calls the set.
    data_dir: Folder of prepared sets; None is that package's default,
      `~/tensorflow_datasets`.

  Returns:
    Two pairs: uint8 images `[num_images, H, W, C]` and int32 labels.

  Raises:
    ValueError: If the set isn't prepared under `data_dir`; the message holds
      the command that prepares it.
  """
  splits = sources(name, data_dir, ("train", "test"))
  path = _cache_path(name, splits[0].dataset_info.data_dir)
  if path is not None and path.is_file():
    try:
      with path.open("rb") as raw, np.load(raw) as f:
        return (
          (f["train_images"], f["train_labels"]),
          (f["test_images"], f["test_labels"]),
        )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
      pass  # a damaged cache file is made anew
  train, test = map(_decoded, splits)
  if path is not None:
    _write_cache(path, train, test)
  return train, test


def sources(
  name: str, data_dir: str | os.PathLike | None, splits: Sequence[str]
) -> list[Any]:
  """Opens splits of a prepared set.

  Args:
    name: What tensorflow-datasets calls the set.
    data_dir: As in `read`.
    splits: Names of splits.

  Returns:
    For each split a sequence of records, decoded when one is asked for.

  Raises:
    ValueError: As `read`.
  """
  try:
    import tensorflow_datasets as tfds
  except ImportError as error:
    raise ValueError(
      f"name={name!r} is read with tensorflow-datasets, which isn't installed."
      " Install the project's requirements: pip install -e ."
    ) from error

  try:
    return [
      tfds.data_source(name, split=split, data_dir=data_dir, download=False)
      for split in splits
    ]
  except (AssertionError, NotImplementedError, KeyError, OSError) as error:
    # By its version and by what lies there, tfds raises any of these if there
    # is nothing, or only TFRecord files, which need TensorFlow to read.
    where = "~/tensorflow_datasets" if data_dir is None else os.fspath(data_dir)
    raise ValueError(
      f"name={name!r} isn't prepared in array_record form under data_dir="
      f"{where!r}. Prepare it once, with TensorFlow and a network:\n"
      f"  {prepare_command(name, data_dir)}"
    ) from error


def prepare_command(
  name: str, data_dir: str | os.PathLike | None = None
) -> str:
  """The command that prepares a set of tensorflow-datasets for `read`.

  Args:
    name: What tensorflow-datasets calls the set.
    data_dir: Where to put it; None is that package's default.

  Returns:
    One line of shell, for the project's folder. It installs TensorFlow, which
    nothing else here needs, by the extra `prepare`.

  Example:
    >>> from pbp_jax import prepared_data
    >>> install, prepare = prepared_data.prepare_command("mnist").split(" && ")
    >>> install
    'sh .ci/setup prepare'
  """
  place = "" if data_dir is None else f" data_dir={os.fspath(data_dir)!r},"
  # Not `tfds build`: that program needs Apache Beam besides.
  return (
    "sh .ci/setup prepare && .venv/bin/python -c"
    ' "import tensorflow_datasets as tfds;'
    f" tfds.builder({name!r},{place} file_format='array_record')"
    '.download_and_prepare()"'
  )


def _decoded(source: Any) -> Split:
  records = [source[i] for i in range(len(source))]
  return (
    np.stack([record["image"] for record in records]),
    np.asarray([record["label"] for record in records], np.int32),
  )


def _cache_path(name: str, prepared: str | os.PathLike) -> pathlib.Path | None:
  """Where the decoded files belong, None if there are none to recognise."""
  try:
    files = sorted(pathlib.Path(prepared).glob("*.array_record*"))
    marks = [(str(f.resolve()), *_size_and_time(f)) for f in files]
  except OSError:
    return None
  if not marks:
    return None
  digest = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
  root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  folder = pathlib.Path(root).expanduser() / "pbp_jax"
  return folder / f"{name}-{digest}.npz"


def _size_and_time(path: pathlib.Path) -> tuple[int, int]:
  status = path.stat()
  return status.st_size, status.st_mtime_ns


def _write_cache(path: pathlib.Path, train: Split, test: Split) -> None:
  """Writes whole or not at all; a read-only home is no reason to fail."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
      np.savez(
        f,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
      )
    os.replace(f.name, path)
  except OSError:
    pass
