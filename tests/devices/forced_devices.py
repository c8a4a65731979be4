"""The environment of processes with several devices on a CPU."""

import os

# What is tested are numbers, not speed: to compile quickly saves half the time.
# XLA ends a process that gives it a flag which it does not know any more.
_QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=0"


def xla_flags(num_devices):
  """What gives a process so many devices."""
  return f"--xla_force_host_platform_device_count={num_devices} {_QUICKLY}"


def environment(num_devices):
  """This process's environment, for one with so many devices and float64."""
  return {
    **os.environ,
    "XLA_FLAGS": xla_flags(num_devices),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
  }
