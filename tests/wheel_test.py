"""The wheel: it builds, is whole, and works outside the repository."""

from importlib import metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = ("pbp_jax", "experiments")
_SETUPTOOLS = 77  # what pyproject.toml builds with


def _modules(folder):
  return {
    path.relative_to(folder).as_posix()
    for package in _PACKAGES
    for path in (folder / package).rglob("*.py")
  }


class WheelTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    version = metadata.version("setuptools")
    if int(version.split(".")[0]) < _SETUPTOOLS:
      raise unittest.SkipTest(
        f"setuptools is {version}; the wheel needs {_SETUPTOOLS} (extra"
        " `tests`)."
      )
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    source = cls.folder / "source"
    for package in _PACKAGES:
      ignored = shutil.ignore_patterns("results", "__pycache__")
      shutil.copytree(_ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
      shutil.copy(_ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(cls.folder), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = cls.folder.glob("*.whl")
    cls.installed = cls.folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
      archive.extractall(cls.installed)

  def _run(self, code):
    env = {**os.environ, "PYTHONPATH": str(self.installed)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
      command, cwd=self.folder, env=env, capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout

  def test_has_every_module(self):
    self.assertNotEmpty(_modules(self.installed))
    self.assertEqual(_modules(self.installed), _modules(_ROOT))

  def test_readme_example_runs_with_it(self):
    example = re.search(
      r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL
    )
    assert example is not None
    printed = self._run(example[1] + "\nprint(pbp.__file__)")
    self.assertIn("accuracy", printed)
    self.assertIn(str(self.installed), printed)


if __name__ == "__main__":
  absltest.main()
