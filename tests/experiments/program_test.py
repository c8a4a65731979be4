import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized
import numpy as np
import rich.console

from experiments import reporting, train
import pbp_jax as pbp

_ROOT = pathlib.Path(__file__).parents[2]


class ProgramTest(parameterized.TestCase):
  """The program as a person calls it."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp()) / "run"

  def _call(self, *arguments):
    environment = {
      **os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "80",
    }  # fmt: skip
    return subprocess.run(
      [sys.executable, "-m", "experiments.train", *arguments],
      cwd=_ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip

  def test_smoke_run_spread_over_the_cores_gives_what_one_device_gives(self):
    arguments = (
      "--smoke", "--arms=pb", "--seeds=3", f"--workdir={self.folder}",
    )  # fmt: skip
    called = self._call(*arguments)
    self.assertEqual(called.returncode, 0, called.stderr)
    self.assertIn("│ pb ", called.stdout)
    written = (self.folder / "results.json").read_bytes()
    again = self._call(*arguments)
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertEqual(again.stdout, called.stdout)
    self.assertEqual((self.folder / "results.json").read_bytes(), written)

    config = train.Config(
      smoke=True, arms=("pb",), seeds=3,
      workdir=str(self.folder.with_name("here")),
    )  # fmt: skip
    here = train.run(config)
    there = json.loads(written)
    self.assertStartsWith(there["versions"]["device"], f"{os.cpu_count()} x")
    for name in ("final_loss", "final_accuracy"):
      np.testing.assert_allclose(
        there["arms"]["pb"][name], here["arms"]["pb"][name], rtol=1e-3
      )

  def test_mistake_is_one_message_without_a_traceback(self):
    called = self._call("--arms=pd", f"--workdir={self.folder}")
    self.assertNotEqual(called.returncode, 0)
    self.assertIn("unknown word 'pd'", called.stderr + called.stdout)
    self.assertNotIn("Traceback", called.stderr)
    self.assertFalse(self.folder.exists())

  def test_list_arms_lists_them(self):
    text = io.StringIO()
    console = rich.console.Console(file=text, width=500)
    console.print(reporting.arms_table())
    for name in pbp.presets.list_arms():
      self.assertIn(name, text.getvalue())


if __name__ == "__main__":
  absltest.main()
