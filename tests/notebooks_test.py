"""Notebooks that can't rot: each runs from an empty kernel, and shows outputs.

Sizes are small here; what was committed was run at full size.
"""

import os
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import nbclient
import nbformat

from tests import xla

_FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
_PATHS = sorted(_FOLDER.glob("*.ipynb"))
_CASES = [(path.stem, path) for path in _PATHS]
_ABSOLUTE = re.compile(r"(?<![\w.:/~])/(?:home|root|tmp|usr|work|Users)/")
_MAX_LINES = 30  # of a cell
_MAX_BYTES = 1 << 20
_LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def _read(path):
  return nbformat.read(path, as_version=4)


def _code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


class NotebooksTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.compiled = cls.enterClassContext(tempfile.TemporaryDirectory())

  def test_they_are_in_reading_order(self):
    numbers = [int(path.name.split("_")[0]) for path in _PATHS]
    self.assertNotEmpty(numbers)
    self.assertEqual(numbers, list(range(1, len(numbers) + 1)))

  @parameterized.named_parameters(_CASES)
  def test_runs_from_an_empty_kernel(self, path):
    small = {
      "PBP_NOTEBOOK_SMALL": "1",
      "JAX_PLATFORMS": "cpu",
      # Small runs are compiled for longer than they take: quickly, and no
      # program twice.
      "XLA_FLAGS": xla.QUICKLY,
      "JAX_COMPILATION_CACHE_DIR": self.compiled,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    client = nbclient.NotebookClient(
      _read(path),
      timeout=300,
      kernel_name="python3",
      resources={"metadata": {"path": str(_FOLDER)}},
    )
    with mock.patch.dict(os.environ, small):
      client.execute()

  def test_install_themselves_by_one_and_the_same_cell(self):
    cells = {_code_cells(_read(path))[0].source for path in _PATHS}
    self.assertLen(cells, 1)
    self.assertIn("%pip install", cells.pop())

  @parameterized.named_parameters(_CASES)
  def test_is_committed_as_it_ran_from_top_to_bottom(self, path):
    cells = _code_cells(_read(path))
    counts = [cell.execution_count for cell in cells]
    self.assertEqual(counts, list(range(1, len(cells) + 1)))

  @parameterized.named_parameters(_CASES)
  def test_shows_figures_and_nothing_that_went_wrong(self, path):
    outputs = [out for cell in _code_cells(_read(path)) for out in cell.outputs]
    figures = [out for out in outputs if "image/png" in out.get("data", {})]
    self.assertGreaterEqual(len(figures), 2)
    for output in outputs:
      self.assertNotEqual(output.output_type, "error")
      self.assertNotEqual(output.get("name"), "stderr", output.get("text"))

  @parameterized.named_parameters(_CASES)
  def test_asserts_what_its_prose_says(self, path):
    sources = "\n".join(cell.source for cell in _code_cells(_read(path)))
    asserts = re.findall(r"^\s*(?:assert\b|np\.testing)", sources, re.MULTILINE)
    self.assertGreaterEqual(len(asserts), 3)

  @parameterized.named_parameters(_CASES)
  def test_is_small_and_names_no_place_on_a_disk(self, path):
    text = path.read_text()
    self.assertLess(len(text), _MAX_BYTES)
    self.assertIsNone(_ABSOLUTE.search(text))
    for cell in _code_cells(_read(path)):
      self.assertLessEqual(len(cell.source.splitlines()), _MAX_LINES)

  @parameterized.named_parameters(_CASES)
  def test_links_inside_the_project_lead_somewhere(self, path):
    for cell in _read(path).cells:
      if cell.cell_type == "markdown":
        for target in _LINK.findall(cell.source):
          if not target.startswith("http"):
            self.assertTrue((path.parent / target).exists(), target)


if __name__ == "__main__":
  absltest.main()
