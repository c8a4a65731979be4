"""What holds for every test: CPU, strict broadcasting, no network."""

import os
import socket

from absl import flags
import jax
import pytest

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
