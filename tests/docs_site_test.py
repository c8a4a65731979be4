"""The documentation site: it builds, and has every public name."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parents[1]
_DIRECTIVE = re.compile(r"^\.\. auto(?:class|function):: (\S+)", re.MULTILINE)
# Packages whose public names are what their __init__.py imports for others.
_PACKAGES = tuple(
  f"pbp_jax{part}" for part in ("", ".schedules", ".models", ".devices")
)
# What other modules need from there, and no user.
_INTERNAL = {
  f"pbp_jax.schedules.{name}"
  for name in ("CONSISTENCIES", "check_count", "check_schedule")
}


def _public_names():
  """Names imported as themselves, and functions, of the packages."""
  for package in _PACKAGES:
    source = _ROOT / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(source.read_text()).body:
      if isinstance(node, ast.ImportFrom) and node.module != "pbp_jax":
        for alias in node.names:
          if alias.asname == alias.name:
            yield f"{package}.{alias.name}"
      elif isinstance(node, ast.FunctionDef) and node.name[0] != "_":
        yield f"{package}.{node.name}"


class DocsSiteTest(parameterized.TestCase):
  def test_reference_has_every_public_name(self):
    names = set(_public_names())
    self.assertGreater(len(names), 60)
    pages = (_ROOT / "docs" / "api").glob("*.rst")
    documented = _DIRECTIVE.findall("\n".join(p.read_text() for p in pages))
    self.assertEmpty(names - set(documented) - _INTERNAL)

  def test_builds_without_a_warning(self):
    for tool in ("sphinx", "myst_parser", "furo"):
      if importlib.util.find_spec(tool) is None:
        raise unittest.SkipTest(f"{tool} is not installed: the extra `docs`.")
    with tempfile.TemporaryDirectory() as folder:
      options = ["-W", "--keep-going", "-q", "-b", "html"]
      places = ["-d", f"{folder}/trees", str(_ROOT / "docs"), f"{folder}/site"]
      done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, *places],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
      )
      self.assertEqual(done.returncode, 0, done.stderr)
      site = pathlib.Path(folder, "site")
      for page in ("index", "delays", "api/quadratic", "api/links"):
        self.assertTrue((site / f"{page}.html").is_file(), page)
      formulas = (site / "api" / "quadratic.html").read_text()
      self.assertIn('class="math notranslate nohighlight"', formulas)
      self.assertIn("mathjax", formulas.lower())


if __name__ == "__main__":
  absltest.main()
