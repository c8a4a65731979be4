"""The environment of processes with several devices on a CPU."""

import os

from tests import xla


def xla_flags(num_devices):
  """What gives a process so many devices."""
  return f"--xla_force_host_platform_device_count={num_devices} {xla.QUICKLY}"


def environment(num_devices):
  """This process's environment, for one with so many devices and float64."""
  return {
    **os.environ,
    "XLA_FLAGS": xla_flags(num_devices),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
  }
