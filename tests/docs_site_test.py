"""The documentation site: it builds, is whole, and has every public name."""

import ast
import html.parser
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.parse

from absl.testing import absltest
from docutils.utils.math import latex2mathml

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


class _Page(html.parser.HTMLParser):
  """What a page links to, loads, can be linked to at, and has in TeX."""

  def __init__(self, path):
    super().__init__()
    self.links, self.loaded, self.anchors, self.formulas = [], [], set(), []
    self._in_formula = False
    self.feed(path.read_text())

  def handle_starttag(self, tag, attrs):
    values = dict(attrs)
    self.anchors.add(values.get("id"))
    self.links += [values[key] for key in ("href", "src") if values.get(key)]
    if tag in ("script", "link", "img"):
      self.loaded.append(values.get("src", values.get("href")))
    self._in_formula = "math" in (values.get("class") or "").split()

  def handle_endtag(self, tag):
    self._in_formula = False

  def handle_data(self, data):
    if self._in_formula:
      self.formulas.append(data)


class ReferenceTest(absltest.TestCase):
  def test_reference_has_every_public_name(self):
    names = set(_public_names())
    self.assertGreater(len(names), 60)
    pages = (_ROOT / "docs" / "api").glob("*.rst")
    documented = _DIRECTIVE.findall("\n".join(p.read_text() for p in pages))
    self.assertEmpty(names - set(documented) - _INTERNAL)


class SiteTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.site = folder / "site"
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    places = ["-d", folder / "trees", _ROOT / "docs", cls.site]
    cls.build = subprocess.run(
      [sys.executable, "-m", "sphinx", *options, *places],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )
    cls.pages = {path: _Page(path) for path in cls.site.rglob("*.html")}

  def test_builds_without_a_warning(self):
    self.assertEqual(self.build.returncode, 0, self.build.stderr)
    for page in ("index", "delays", "api/quadratic", "api/links"):
      self.assertIn(self.site / f"{page}.html", self.pages)

  def test_links_and_scripts_lead_somewhere_inside(self):
    num_links = 0
    for path, page in self.pages.items():
      for link in page.links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc:
          self.assertNotIn(link, page.loaded)  # the site needs no network
          continue
        num_links += 1
        place = f"{link} on {path.relative_to(self.site)}"
        target = (path.parent / urllib.parse.unquote(url.path)).resolve()
        target = target if url.path else path
        self.assertTrue(target.exists(), place)
        if url.fragment and target in self.pages:
          self.assertIn(
            urllib.parse.unquote(url.fragment),
            self.pages[target].anchors,
            place,
          )
    self.assertGreater(num_links, 500)

  def test_formulas_are_tex_that_can_be_set(self):
    formulas = [tex for page in self.pages.values() for tex in page.formulas]
    self.assertGreater(len(formulas), 50)
    for tex in formulas:
      body = re.sub(r"\\(?:begin|end)\{split\}", "", tex.strip()[2:-2])
      latex2mathml.tex2mathml(body, as_block=True)  # raises on an error
    mathjax = self.site / "_static" / "mathjax" / "tex-chtml.js"
    quadratic = self.pages[self.site / "api" / "quadratic.html"]
    self.assertIn("../_static/mathjax/tex-chtml.js", quadratic.loaded)
    self.assertTrue(mathjax.is_file())


if __name__ == "__main__":
  absltest.main()
