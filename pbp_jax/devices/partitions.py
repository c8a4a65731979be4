"""Cutting a pipeline of many stages into as many groups as there are devices.

The slowest device sets the pace of a pipeline: a tick takes as long as the
largest group. So the cut into consecutive groups whose largest cost is smallest
is the best one, and what the other devices idle is known beforehand.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from pbp_jax import schedules
from pbp_jax import stages as stages_lib
from pbp_jax.stages import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
  """Consecutive groups of stages, one a device.

  Attributes:
    costs: `[S]`, the cost of each stage.
    starts: `[P]` ints, the first stage of each group.

  Raises:
    ValueError: If the groups are not a cut of the stages.

  Example:
    >>> import numpy as np
    >>> partition = Partition(np.array([1, 1, 2]), np.array([0, 2]))
    >>> partition.group_costs, partition.balance
    (array([2., 2.]), 1.0)
  """

  costs: np.ndarray
  starts: np.ndarray

  def __post_init__(self):
    costs = _checked(self.costs)
    starts = np.array(self.starts)
    if (
      starts.ndim != 1
      or starts.dtype.kind not in "iu"
      or not starts.size
      or starts[0] != 0
      or (np.diff(starts) <= 0).any()
      or starts[-1] >= len(costs)
    ):
      raise ValueError(
        "starts must be ints that rise from 0 and end before the number of"
        f" stages, {len(costs)}; got {self.starts!r}."
      )
    object.__setattr__(self, "costs", costs)
    object.__setattr__(self, "starts", starts)

  @property
  def num_groups(self) -> int:
    """Groups, so devices, P."""
    return len(self.starts)

  @property
  def sizes(self) -> np.ndarray:
    """`[P]` ints, the number of stages in each group."""
    return np.diff(self.starts, append=len(self.costs))

  @property
  def group_costs(self) -> np.ndarray:
    """`[P]`, the cost of each group."""
    return np.add.reduceat(self.costs, self.starts)

  @property
  def balance(self) -> float:
    """Mean cost of a group over the largest, in (0, 1].

    The utilization of the devices in the long run, if nothing but the costs
    takes time.
    """
    return float(self.group_costs.mean() / self.group_costs.max())

  @property
  def speedup(self) -> float:
    """How many times faster a full pipeline is than one device.

    `sum of costs / largest group = P balance`: an upper bound, without the time
    that messages take.
    """
    return float(self.costs.sum() / self.group_costs.max())

  def utilization(self, schedule: schedules.Schedule, count: int) -> float:
    """The share of the devices' time that is spent on passes.

    Args:
      schedule: The schedule of the groups.
      count: Micro-batches from the first fill to the last drain.

    Returns:
      `balance` times the timetable's share of busy ticks.

    Raises:
      ValueError: If the schedule is not of as many stages as there are groups.
    """
    schedules.check_schedule(schedule, self.num_groups)
    return self.balance * schedule.utilization(count)

  def merge(
    self, stages: Sequence[stages_lib.Stage]
  ) -> tuple[stages_lib.Stage, ...]:
    """The stages of each group as one stage.

    Args:
      stages: The S stages.

    Returns:
      P stages. The parameters of each are the tuple of its stages' parameters.
      Groups of the very same stages are the very same object.

    Raises:
      ValueError: If there are not S stages.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import pbp_jax as pbp
      >>> stages = pbp.as_stages([jnp.sin, jnp.cos, jnp.tanh])
      >>> merged = partition([1, 1, 2], num_groups=2).merge(stages)
      >>> [stage.name for stage in merged]
      ['sin..cos', 'tanh']
    """
    if len(stages) != len(self.costs):
      raise ValueError(
        f"stages must be {len(self.costs)} stages, as many as there are costs;"
        f" got {len(stages)}."
      )
    made: dict[Any, stages_lib.Stage] = {}
    merged = []
    for start, size in zip(self.starts, self.sizes, strict=True):
      group = tuple(stages[start : start + size])
      merged.append(made.setdefault(tuple(map(id, group)), _merged(group)))
    return tuple(merged)

  def split(self, merged: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """What each stage has, of what each group has.

    Args:
      merged: A tuple of its stages' parameters for each group.

    Returns:
      The parameters of each stage.

    Raises:
      ValueError: If these are not trees of so many stages in these groups.
    """
    sizes = [
      len(group) if isinstance(group, tuple | list) else type(group).__name__
      for group in merged
    ]
    if sizes != self.sizes.tolist():
      raise ValueError(
        "merged must have a tuple for each group, of lengths"
        f" {self.sizes.tolist()}; got {sizes}."
      )
    return tuple(own for group in merged for own in group)

  def __str__(self) -> str:
    rows = [("device", "stages", "cost", "share of the largest", "delay")]
    largest = self.group_costs.max()
    delays = schedules.pipelined_backprop(self.num_groups).delay
    for p, (start, size, cost) in enumerate(
      zip(self.starts, self.sizes, self.group_costs, strict=True)
    ):
      last = start + size - 1
      rows.append(
        (
          str(p),
          str(start) if size == 1 else f"{start}-{last}",
          f"{cost:.4g}",
          f"{cost / largest:.0%}",
          str(delays[p]),
        )
      )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
      [
        f"{len(self.costs)} stages on {self.num_groups} devices: balance"
        f" {self.balance:.1%}, at most {self.speedup:.2f} times as fast as one"
      ]
      + ["  ".join(map(str.rjust, row, widths)) for row in rows]
    )


def partition(costs: ArrayLike, num_groups: int) -> Partition:
  """Cuts stages into consecutive groups whose largest cost is smallest.

  By dynamic programming: the best cut of the first s stages into p groups ends
  with a group of stages r to s - 1 after the best cut of the first r into
  p - 1. Of several best cuts it is one with early groups small.

  Args:
    costs: `[S]` numbers >= 0, the cost of each stage (`count_costs`,
      `measure_costs`).
    num_groups: Groups P, at most S.

  Returns:
    The partition.

  Raises:
    ValueError: If the costs are no such numbers, or there are more groups than
      stages.

  Example:
    >>> print(partition([3, 1, 1, 1, 2], num_groups=3))
    5 stages on 3 devices: balance 88.9%, at most 2.67 times as fast as one
    device  stages  cost  share of the largest  delay
         0       0     3                  100%      4
         1     1-2     2                   67%      2
         2     3-4     3                  100%      0
  """
  known = _checked(costs)
  num_stages = len(known)
  num_groups = schedules.check_count("num_groups", num_groups, minimum=1)
  if num_groups > num_stages:
    raise ValueError(
      f"num_groups must be at most the number of stages, {num_stages}, got"
      f" {num_groups}."
    )
  total = np.concatenate([[0.0], np.cumsum(known)])
  # largest[s]: of the best cut of the first s stages into the groups so far.
  largest = np.where(np.arange(num_stages + 1) == 0, 0.0, np.inf)
  cuts = []
  for _ in range(num_groups):
    # [s, r]: the last group is r to s - 1.
    last = total[:, None] - total[None, :]
    candidates = np.maximum(largest[None, :], last)
    candidates[np.triu_indices(num_stages + 1)] = np.inf
    cuts.append(candidates.argmin(axis=1))
    largest = candidates.min(axis=1)
  starts, end = [], num_stages
  for cut in reversed(cuts):
    end = int(cut[end])
    starts.append(end)
  return Partition(known, np.array(starts[::-1]))


def _merged(group: tuple[stages_lib.Stage, ...]) -> stages_lib.Stage:
  """Consecutive stages as one; that of a single stage has tuples, too."""
  stochastic = any(stage.stochastic for stage in group)
  stateful = any(stage.init_state is not None for stage in group)
  names = [stage.name for stage in group]

  def walk(make, key, x):
    """What `make` gives for each stage, which may need the shape of its x."""
    made = []
    for j, stage in enumerate(group):
      key_params, key_state = jax.random.split(jax.random.fold_in(key, j))
      params = stage.init(key_params, x)
      state = stage.init_state and stage.init_state(key_state, x)
      made.append(make(params, state))
      x, _ = stage(params, state, x, None)
    return tuple(made)

  def apply(params, *rest):
    states = (None,) * len(group)
    if stateful:
      states, *rest = rest
    x, *keys = rest
    key = keys[0] if keys else None
    next_states = []
    for j, stage in enumerate(group):
      own_key = None if key is None else jax.random.fold_in(key, j)
      x, state = stage(params[j], states[j], x, own_key)
      next_states.append(state)
    return (x, tuple(next_states)) if stateful else x

  return stages_lib.Stage(
    init=lambda key, x: walk(lambda params, state: params, key, x),
    apply=apply,
    stochastic=stochastic,
    init_state=(lambda key, x: walk(lambda params, state: state, key, x))
    if stateful
    else None,
    name=names[0] if len(group) == 1 else f"{names[0]}..{names[-1]}",
  )


def _checked(costs: Any) -> np.ndarray:
  made = np.array(costs)
  if (
    made.ndim != 1
    or not made.size
    or made.dtype.kind not in "iuf"
    or not (np.isfinite(made).all() and (made >= 0).all() and made.any())
  ):
    raise ValueError(
      "costs must be a sequence of numbers >= 0, one a stage and not all zero,"
      f" got {costs!r}."
    )
  return made.astype(float)
