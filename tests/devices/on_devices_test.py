"""Runs the tests in `on_eight_devices/`, each file in a process of its own."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = sorted(
  (pathlib.Path(__file__).parent / "on_eight_devices").glob("*_test.py")
)


class OnEightDevicesTest(parameterized.TestCase):
  @parameterized.named_parameters((path.stem, path) for path in _FILES)
  def test_passes(self, path):
    done = subprocess.run(
      [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", path],
      capture_output=True,
      text=True,
      cwd=_ROOT,
      env={
        **os.environ,
        "PBP_NUM_DEVICES": "8",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
      },
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"\d+ passed")

  def test_there_are_some(self):
    self.assertNotEmpty(_FILES)


if __name__ == "__main__":
  absltest.main()
