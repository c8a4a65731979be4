"""The house: who may import whom, and what importing costs."""

import ast
import pathlib
import subprocess
import sys
import tomllib

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = _ROOT / "pbp_jax"

# From the ground up: a room may import those before it and itself.
_ROOMS = (
  "materialization",
  "op_by_op",
  "ring_buffers",
  "timetables",
  "schedules",
  "backward_state",
  "stages",
  "tree_forms",
  "two_version_interpreter",
  "two_version_vjp",
  "transforms",
  "hyperparameters",
  "mitigations",
  "presets",
  "network",
  "pipeline_state",
  "weight_history",
  "diagnostics",
  "argument_checks",
  "simulator",
  "devices",
  "quadratic",
  "models",
  "prepared_data",
  "imagenet",
  "data",
  "plotting",
)
# Never needed to import the package.
_HEAVY = ("matplotlib", "tensorflow_datasets", "orbax", "sklearn")


def _room(path):
  parts = path.relative_to(_PACKAGE).with_suffix("").parts
  return parts[0]


def _imports(path):
  """Modules named by the imports at any level of a file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


_FILES = sorted(
  path for path in _PACKAGE.rglob("*.py") if path != _PACKAGE / "__init__.py"
)


class ImportsTest(parameterized.TestCase):
  def test_every_room_is_on_the_map(self):
    self.assertEqual({_room(path) for path in _FILES}, set(_ROOMS))

  @parameterized.named_parameters(
    (str(path.relative_to(_PACKAGE)), path) for path in _FILES
  )
  def test_imports_point_one_way(self, path):
    own = _room(path)
    for name in _imports(path):
      parts = name.split(".")
      if parts[0] == "experiments":
        self.fail(f"{path.name} imports {name}")
      if parts[0] == "pbp_jax" and len(parts) > 1 and parts[1] in _ROOMS:
        self.assertLessEqual(
          _ROOMS.index(parts[1]), _ROOMS.index(own), f"{path.name}: {name}"
        )

  @parameterized.named_parameters(
    (str(path.relative_to(_PACKAGE)), path) for path in _FILES
  )
  def test_no_flags_are_read(self, path):
    self.assertFalse([n for n in _imports(path) if n.startswith("absl.flags")])
    self.assertNotIn("absl.app", set(_imports(path)))

  @parameterized.named_parameters(
    (str(path.relative_to(_PACKAGE)), path)
    for path in _FILES
    if _room(path) in ("schedules", "timetables")
  )
  def test_time_is_plain_numpy(self, path):
    for name in _imports(path):
      self.assertNotIn(name.split(".")[0], ("jax", "flax", "optax"))

  def test_importing_pulls_in_nothing_heavy(self):
    code = (
      f"import sys, pbp_jax;print([n for n in {_HEAVY} if n in sys.modules])"
    )
    done = subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      check=True,
      cwd=_ROOT,
    )
    self.assertEqual(done.stdout.strip(), "[]")

  def test_files_stay_small(self):
    long = [
      str(path.relative_to(_ROOT))
      for path in _FILES
      if len(path.read_text().splitlines()) > 500
    ]
    self.assertEqual(long, [])


class PackagingTest(absltest.TestCase):
  def test_requirements_are_the_one_list_of_dependencies(self):
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    self.assertEqual(
      project["tool"]["setuptools"]["dynamic"]["dependencies"],
      {"file": ["requirements.txt"]},
    )
    self.assertIn("dependencies", project["project"]["dynamic"])
    lines = (_ROOT / "requirements.txt").read_text().splitlines()
    names = [x for x in lines if x and not x.startswith("#")]
    for name in ("jax", "flax", "optax", "chex", "absl-py"):
      self.assertTrue(any(x.startswith(f"{name}>=") for x in names), name)


if __name__ == "__main__":
  absltest.main()
