"""The program that runs pipelines on devices."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from absl.testing import absltest, parameterized
import jax
import numpy as np

from experiments import device_figures, device_pipeline, tiny_transformer
from pbp_jax import network
from tests.devices import forced_devices

_ROOT = pathlib.Path(__file__).parents[2]

# A run that is killed when it has saved the first of its parts.
_BROKEN = """
import os, sys
from experiments import device_pipeline
train, calls = device_pipeline._train, []
def train_once(*arguments):
  if calls:
    os._exit(3)
  calls.append(0)
  return train(*arguments)
device_pipeline._train = train_once
device_pipeline.run(
  device_pipeline.Config(smoke=True, workdir=sys.argv[1]))
"""


class ProgramTest(absltest.TestCase):
  def _call(self, *arguments):
    environment = {
      **os.environ,
      "XLA_FLAGS": forced_devices.xla_flags(8),
      "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
      [sys.executable, *arguments],
      cwd=_ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "run"

  def _results(self):
    return json.loads((self.folder / "results.json").read_text())

  def _smoke(self):
    called = self._call(
      "-m", "experiments.device_pipeline", "--smoke",
      f"--workdir={self.folder}",
    )  # fmt: skip
    self.assertEqual(called.returncode, 0, called.stderr)
    return called.stdout

  def test_smoke_run_is_the_simulators(self):
    self.assertIn("part_2_on_2_devices: 14 ticks", self._smoke())
    self.assertTrue((self.folder / "timelines.png").exists())
    self.assertFalse((self.folder / "checkpoints").exists())
    found = self._results()
    self.assertEqual(found["status"], "done")
    parts = found["arms"]
    self.assertEqual(
      parts["part_2_on_2_devices"]["busy"],
      ["FFXXXXXXXXXXBB", ".XXXXXXXXXXXX."],
    )
    self.assertLen(parts, 2)
    for part in parts.values():
      self.assertTrue(part["ticks_as_in_the_timetable"])
      for what in ("loss_differs_from_the_simulators_by", "weights_differ_by",
                   "optimizer_states_differ_by"):  # fmt: skip
        self.assertLess(part[what], 1e-10)

  @unittest.skipUnless("PBP_LONG" in os.environ, "PBP_LONG=1 runs it")
  def test_killed_run_goes_on_from_its_last_part(self):
    broken = self._call("-c", _BROKEN, self.folder)
    self.assertEqual(broken.returncode, 3, broken.stderr)
    before = self._results()
    self.assertEqual(before["status"], "incomplete")
    self.assertEqual(list(before["arms"]), ["part_1_on_1_devices"])
    self._smoke()
    gone_on = self._results()["arms"]
    self.assertEqual(
      gone_on["part_1_on_1_devices"], before["arms"]["part_1_on_1_devices"]
    )
    self.folder = self.folder.with_name("unbroken")
    self._smoke()
    for name, part in self._results()["arms"].items():
      self.assertEqual(gone_on[name]["loss_by_quarters"],
                       part["loss_by_quarters"])  # fmt: skip


class ConfigTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("devices", {"devices": (2, 0)}, "devices must be.*(2, 0)"),
    ("samples", {"samples": 7, "update_interval": 2}, "multiple.*2, got 7"),
  )
  def test_refuses(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      device_pipeline.Config(**settings)


class TinyTransformerTest(parameterized.TestCase):
  def test_blocks_are_one_stage_and_images_become_logits(self):
    stages = tiny_transformer.tiny_transformer(num_stages=6, width=4)
    self.assertLen(stages, 6)
    self.assertLen(set(stages), 4)
    images = np.zeros((2, 8, 8, 1), "f")
    logits = jax.eval_shape(
      lambda key: network.apply(
        stages, *(network.init(stages, key, images)[0],) * 2,
        (None,) * 6, images,
      )[0],
      jax.random.key(0),
    )  # fmt: skip
    self.assertEqual(logits.shape, (2, 10))

  @parameterized.parameters(
    ({"num_stages": 3}, "at least 4"), ({"width": 5}, "even")
  )
  def test_refuses(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      tiny_transformer.tiny_transformer(**sizes)


class FiguresTest(absltest.TestCase):
  def test_long_runs_are_shown_at_both_ends(self):
    line = "F" * 30 + "X" * 60 + "B" * 30
    row = {
      "busy": [line], "stages_of_devices": [3], "utilization": 0.75,
      "utilization_of_the_timetable": 0.75, "balance_by_operations": 1.0,
    }  # fmt: skip
    axes = device_figures.timelines({"part": row}).axes[0]
    codes = axes.collections[0].get_array()
    np.testing.assert_array_equal(
      np.ravel(codes), [2] * 30 + [3] * 20 + [1] * 30
    )


if __name__ == "__main__":
  absltest.main()
