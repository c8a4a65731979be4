"""The pipeline over two processes of two devices each, on this machine."""

import pathlib
import socket
import subprocess
import sys
import time

from absl.testing import absltest
from jaxlib import _jax

from tests.devices import forced_devices, worker

_ROOT = pathlib.Path(__file__).parents[2]
_NUM_PROCESSES, _VICTIM = 2, 1


def _free_port():
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def _start(address, process):
  return subprocess.Popen(
    [
      sys.executable,
      "-m",
      "tests.devices.worker",
      address,
      str(_NUM_PROCESSES),
      str(process),
      str(_VICTIM),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=_ROOT,
    env=forced_devices.environment(2),
  )


class SeveralProcessesTest(absltest.TestCase):
  """One start of the processes serves all tests: they take their time."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not hasattr(_jax, "make_gloo_tcp_collectives"):
      raise absltest.SkipTest("This jaxlib has no gloo for CPU collectives.")
    address = f"localhost:{_free_port()}"
    processes = [_start(address, i) for i in range(_NUM_PROCESSES)]
    victim = processes[_VICTIM]
    survivors = [p for p in processes if p is not victim]
    try:
      cls.victim_output = "\n".join(victim.communicate(timeout=240))
      killed = time.monotonic()
      cls.outputs = ["\n".join(p.communicate(timeout=120)) for p in survivors]
      cls.seconds_left_alone = time.monotonic() - killed
    finally:
      for process in processes:
        process.kill()
        process.wait()
    cls.exit_codes = [p.returncode for p in survivors]

  def test_losses_weights_and_optimizer_states_are_the_simulators(self):
    for output in [self.victim_output, *self.outputs]:
      for name in worker.SETTINGS:
        self.assertIn(f"EQUAL {name}", output)

  def test_runs_of_a_sweep_are_the_runs_one_by_one(self):
    for output in [self.victim_output, *self.outputs]:
      self.assertIn("EQUAL sweep", output)

  def test_a_killed_process_ends_the_others_with_an_error(self):
    self.assertIn("KILLED", self.victim_output)
    for output, exit_code in zip(self.outputs, self.exit_codes, strict=True):
      self.assertNotEqual(exit_code, 0)
      self.assertIn("another task died", output)

  def test_a_killed_process_ends_the_others_in_time(self):
    self.assertLess(
      self.seconds_left_alone, 2 * worker.HEARTBEAT_TIMEOUT_SECONDS + 5
    )


if __name__ == "__main__":
  absltest.main()
