"""Runs the tests in `on_eight_devices/`, in a process that has so many."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

from tests.devices import forced_devices

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = pathlib.Path(__file__).parent / "on_eight_devices"


class OnEightDevicesTest(absltest.TestCase):
  def test_all_pass(self):
    done = subprocess.run(
      [
        sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider",
        _FOLDER,
      ],
      capture_output=True,
      text=True,
      cwd=_ROOT,
      env={**forced_devices.environment(8), "PBP_NUM_DEVICES": "8"},
    )  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"\d+ passed")


if __name__ == "__main__":
  absltest.main()
