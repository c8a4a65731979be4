"""Documents that can't rot: their code runs, their commands exist."""

import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

from absl import flags
from absl.testing import absltest, parameterized

from experiments import config_flags, figure_program
from tests.devices import forced_devices

_ROOT = pathlib.Path(__file__).parents[1]
_DOCUMENTS = [
  _ROOT / "README.md",
  _ROOT / "experiments" / "README.md",
  *sorted((_ROOT / "docs").glob("*.md")),
]
_FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
_MODULE = re.compile(r"python3? -m ([\w.]+)((?:\s+--[^\s`|]+)*)")
_LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")
# Each block has names of its own; all have the imports of one process.
_RUN_BLOCKS = """
import sys
for i, body in enumerate(sys.argv[1:]):
  exec(compile(body, f"<block {i}>", "exec"), {"__name__": "__main__"})
"""


def _blocks(language):
  return [
    (f"{path.parent.name}_{path.stem}_{i}", body)
    for path in _DOCUMENTS
    for i, (name, body) in enumerate(_FENCE.findall(path.read_text()))
    if name == language
  ]


def _python_documents():
  found = {}
  for name, body in _blocks("python"):
    found.setdefault(name.rpartition("_")[0], []).append(body)
  return list(found.items())


def _commands():
  found = [
    (module, arguments)
    for path in _DOCUMENTS
    for module, arguments in _MODULE.findall(path.read_text())
  ]
  return sorted(set(found))


class DocumentsTest(parameterized.TestCase):
  @parameterized.named_parameters(_python_documents())
  def test_python_blocks_run(self, bodies):
    # Four devices, for the document on pipelines that run on several.
    subprocess.run(
      [sys.executable, "-c", _RUN_BLOCKS, *bodies],
      check=True,
      cwd=_ROOT,
      env={**os.environ, "XLA_FLAGS": forced_devices.xla_flags(4)},
    )

  @parameterized.named_parameters(_blocks("sh"))
  def test_shell_blocks_are_one_line_each_and_parse(self, body):
    self.assertLen(body.strip().splitlines(), 1)
    subprocess.run(["sh", "-n", "-c", body], check=True)
    for part in re.split(r"&&|\|", body):
      words = shlex.split(part)
      if words[0] == "sh":
        self.assertTrue((_ROOT / words[1]).is_file(), words[1])

  @parameterized.named_parameters(
    (f"{module} {arguments}", module, arguments)
    for module, arguments in _commands()
  )
  def test_commands_name_modules_and_flags_that_exist(self, module, arguments):
    if not module.startswith("experiments."):
      importlib.import_module(module)
      return
    program = importlib.import_module(module)
    values = flags.FlagValues()
    if hasattr(program, "define_flags"):
      program.define_flags(values)
    else:
      config_flags.define(figure_program.Flags, values)
    values([module, *shlex.split(arguments)])

  def test_something_was_found(self):
    self.assertNotEmpty(_blocks("python"))
    self.assertGreaterEqual(len(_blocks("sh")), 3)
    self.assertGreaterEqual(len(_commands()), 3)

  @parameterized.named_parameters(
    (str(path.relative_to(_ROOT)), path)
    for path in [*_DOCUMENTS, _ROOT / "WORKSPACE.md"]
  )
  def test_links_inside_the_project_lead_somewhere(self, path):
    for target in _LINK.findall(path.read_text()):
      if not target.startswith("http"):
        self.assertTrue((path.parent / target).exists(), target)


if __name__ == "__main__":
  absltest.main()
