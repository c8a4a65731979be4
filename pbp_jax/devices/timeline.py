"""What the devices of a real run did, tick by tick, and how long it took."""

from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from pbp_jax.devices import pipeline as pipeline_lib
from pbp_jax.devices import state as state_lib
from pbp_jax.stages import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
  """A run's ticks.

  Attributes:
    busy: `[ticks, S, 2]`, 1 where a device computed a forward and a backward.
    predicted: What the timetable says of it, likewise.
    seconds: What the run took, without compilation.
  """

  busy: np.ndarray
  predicted: np.ndarray
  seconds: float

  @property
  def seconds_per_tick(self) -> float:
    """The mean time of a tick."""
    return self.seconds / len(self.busy)

  @property
  def utilization(self) -> float:
    """The share of passes that were computed, of those there was room for."""
    return float(self.busy.mean())

  @property
  def predicted_utilization(self) -> float:
    """The same share by the timetable."""
    return float(self.predicted.mean())

  def busy_time(self, costs: Sequence[float]) -> float:
    """The share of the devices' time that went into passes.

    Args:
      costs: `[S]`, seconds of one forward and backward of each device
        (`measure_costs`).

    Returns:
      Seconds of all passes over seconds of all devices. Messages, updates and
      devices that share a processor make it smaller than the balance of the
      costs times `utilization`, which it would be at best.
    """
    passes = self.busy.mean(axis=-1).sum(axis=0)
    devices = self.busy.shape[1]
    return float(passes @ np.asarray(costs) / (self.seconds * devices))

  def __str__(self) -> str:
    signs = np.array([".", "B", "F", "X"])
    codes = self.busy @ np.array([2, 1])
    lines = [
      f"{len(self.busy)} ticks in {self.seconds:.3g} s; busy"
      f" {self.utilization:.1%}, by the timetable"
      f" {self.predicted_utilization:.1%}",
      "F forward, B backward, X both, . idle",
    ]
    return "\n".join(
      lines
      + [
        f"device {p} {''.join(signs[codes[:, p]])}"
        for p in range(codes.shape[1])
      ]
    )


def record(
  pipeline: pipeline_lib.Pipeline,
  state: state_lib.State,
  inputs: PyTree,
  targets: PyTree,
) -> tuple[state_lib.State, dict[str, Any], Timeline]:
  """Trains on micro-batches from fill to drain, twice, and times the second.

  The first time compiles; its results are thrown away.

  Args:
    pipeline: The pipeline.
    state: An empty pipeline.
    inputs: The micro-batches' inputs.
    targets: Their targets.

  Returns:
    The state and metrics of `pipeline.run` with `drain`, and the timeline.

  Raises:
    ValueError: If micro-batches are in flight.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> import pbp_jax as pbp
    >>> pipeline = pbp.devices.Pipeline(
    ...   pbp.as_stages([jnp.sin]), lambda y, t: jnp.sum((y - t) ** 2),
    ...   optax.sgd(0.1), pbp.schedules.pipelined_backprop(1),
    ...   example=(jnp.ones(3), jnp.ones(3)))
    >>> state = pipeline.init(jax.random.key(0))
    >>> *_, timeline = record(
    ...   pipeline, state, jnp.ones((5, 3)), jnp.ones((5, 3)))
    >>> print(str(timeline).splitlines()[-1], timeline.utilization)
    device 0 XXXXX 1.0
  """
  state_lib.check_is_state(state)
  if state.fed != state.first:
    raise ValueError(
      f"state must be an empty pipeline; {state.fed - state.first}"
      " micro-batches have entered since it was."
    )
  run = lambda: jax.block_until_ready(
    pipeline.run(state, inputs, targets, drain=True)
  )
  run()
  start = time.perf_counter()
  after, metrics = run()
  seconds = time.perf_counter() - start
  table = pipeline.schedule.timetable(after.fed - state.fed)
  predicted = np.zeros((table.num_ticks, table.num_stages, 2), int)
  for kind, ticks in enumerate((table.forward_tick, table.backward_tick)):
    device, _ = np.indices(ticks.shape)
    predicted[ticks, device, kind] = 1
  return (
    after,
    metrics,
    Timeline(np.asarray(metrics["busy"]), predicted, seconds),
  )
