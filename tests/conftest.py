"""What holds for every test: CPU, strict broadcasting, no network.

Programs are compiled quickly, and none twice by one process, which takes two
thirds off the time of the suite; `PBP_LONG=1` leaves XLA as it is elsewhere.
"""

import os
import socket
import tempfile

from absl import flags
import jax
import pytest

from tests import xla

# One for each process: JAX does not write it in a way that others may read.
_COMPILED = tempfile.TemporaryDirectory()
if "PBP_LONG" not in os.environ:
  os.environ.setdefault("XLA_FLAGS", xla.QUICKLY)
  jax.config.update("jax_compilation_cache_dir", _COMPILED.name)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Ask for another platform by JAX_PLATFORMS=cuda. Tests that need float64 open
# `jax.enable_x64(True)` for themselves: it is no global switch.
if "JAX_PLATFORMS" not in os.environ:
  jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

# pytest parses the command line in place of absl.app.
flags.FLAGS.mark_as_parsed()


@pytest.fixture(autouse=True, scope="session")
def no_network():
  """Lets sockets reach this machine only (notebook kernels need that)."""
  connect = socket.socket.connect

  def connect_locally(self, address):
    is_remote = self.family in (socket.AF_INET, socket.AF_INET6) and (
      address[0] not in ("127.0.0.1", "::1", "localhost")
    )
    if is_remote:
      raise RuntimeError(f"Tests must not use the network: {address}.")
    return connect(self, address)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(socket.socket, "connect", connect_locally)
    yield


def pytest_unconfigure():
  _COMPILED.cleanup()
