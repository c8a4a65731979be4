"""The pipeline for real: stages on the devices of a mesh.

`Pipeline` takes what `Simulator` takes and computes the same numbers on JAX's
own distributed runtime, every device one forward and one backward a tick.
docs/devices.md tells how to run it on several hosts.
"""

from pbp_jax.devices.costs import count_costs as count_costs
from pbp_jax.devices.costs import measure_costs as measure_costs
from pbp_jax.devices.mesh import make_mesh as make_mesh
from pbp_jax.devices.partitions import Partition as Partition
from pbp_jax.devices.partitions import partition as partition
from pbp_jax.devices.pipeline import Pipeline as Pipeline
from pbp_jax.devices.regrouping import Gathered as Gathered
from pbp_jax.devices.state import State as State
from pbp_jax.devices.sweeps import sweep as sweep
from pbp_jax.devices.timeline import Timeline as Timeline
from pbp_jax.devices.timeline import record as record
