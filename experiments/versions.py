"""What a run's numbers depend on besides its configuration."""

from collections.abc import Mapping
import hashlib
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

import jax

import pbp_jax as pbp

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "pbp_jax")

# What may change numbers. The commit is not among them: the code's digest says
# more, since a commit may touch other files, and a checkout differ from it.
_OF_THE_NUMBERS = (*_PACKAGES, "device", "x64", "code")


def here() -> dict[str, Any]:
  """Versions of what runs here."""
  devices = jax.devices()
  return {
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in _PACKAGES},
    "device": f"{len(devices)} x {devices[0].device_kind}",
    "x64": bool(jax.config.read("jax_enable_x64")),
    "code": _code(),
    "commit": _commit(),
  }


def of_the_numbers(versions: Mapping[str, Any]) -> dict[str, Any]:
  """The part of some versions that may change numbers."""
  return {name: versions.get(name) for name in _OF_THE_NUMBERS}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
  """How two mappings differ, a phrase for each key.

  Example:
    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
    ['b=2 there, 3 here']
  """
  return [
    f"{name}={there.get(name)!r} there, {here.get(name)!r} here"
    for name in sorted({*there, *here})
    if there.get(name) != here.get(name)
  ]


def _code() -> str:
  """A digest of the source files of both packages."""
  digest = hashlib.sha256()
  for module in (__file__, pbp.__file__):
    folder = pathlib.Path(module).parent
    for path in sorted(folder.rglob("*.py")):
      digest.update(f"{path.relative_to(folder.parent)}\n".encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


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
