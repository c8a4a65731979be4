"""The program, killed at random and asked to end, over and over.

`PBP_KILLS=30 pytest tests/experiments/fault_test.py` is the long form.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest

from experiments import interruption

_ROOT = pathlib.Path(__file__).parents[2]
_KILLS = int(os.environ.get("PBP_KILLS", "1"))
_ARMS = "sgdm,pb" if _KILLS > 1 else "pb"


class FaultTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.random = random.Random(0)
    self.while_writing = 0

  def _start(self, name):
    """Starts the program, which saves after every chunk."""
    arguments = [
      "--num_stages=3", "--width=4", f"--arms={_ARMS}", "--seeds=1",
      f"--max_samples={200 * (_KILLS + 1)}", "--chunk_samples=20",
      "--checkpoint_samples=20", "--update_interval=3", "--final_images=50",
      "--accuracy_points=3", "--accuracy_images=50",
      f"--workdir={self.folder / name}",
    ]  # fmt: skip
    # Every process compiles the same once: it is not what is tested.
    environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XDG_CACHE_HOME": str(self.folder / "cache"),
    }
    return subprocess.Popen(
      [sys.executable, "-m", "experiments.train", *arguments],
      cwd=_ROOT, env=environment, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

  def _samples_saved(self):
    names = [p.name for p in (self.folder / "broken").glob("*/family_?/0*")]
    return max(map(int, names), default=0)

  def _strike(self, number):
    """Starts the program and sends it a signal while it trains."""
    process = self._start("broken")
    before = self._samples_saved()
    while process.poll() is None and self._samples_saved() in (0, before):
      time.sleep(0.01)
    time.sleep(self.random.uniform(0, 0.5))
    process.send_signal(number)
    output, _ = process.communicate()
    self.while_writing += any((self.folder / "broken").glob("*/*/.part"))
    return process.returncode, output

  def _numbers(self, name):
    found = json.loads((self.folder / name / "results.json").read_text())
    self.assertEqual(found["status"], "done")
    for arm in found["arms"].values():
      del arm["train_seconds"]
    return json.dumps(found["arms"])

  def test_killed_run_ends_in_the_very_same_numbers(self):
    output, _ = (whole := self._start("whole")).communicate()
    self.assertEqual(whole.returncode, 0, output)
    for _ in range(_KILLS):
      returncode, output = self._strike(signal.SIGKILL)
      self.assertEqual(returncode, -signal.SIGKILL, output)
    returncode, output = self._strike(signal.SIGTERM)
    self.assertEqual(returncode, interruption.EXIT_CODE, output)
    self.assertRegex(output, "Ended as asked: sample .* was saved")
    self.assertNotIn("Traceback", output)
    output, _ = (last := self._start("broken")).communicate()
    self.assertEqual(last.returncode, 0, output)
    self.assertEqual(self._numbers("broken"), self._numbers("whole"))
    print(
      f"{_KILLS} kills, {self.while_writing} while a checkpoint was written"
    )


if __name__ == "__main__":
  absltest.main()
