"""One point of a study, and the arm that stands for it.

A point is a configuration of `train` and a few numbers more. Points that differ
in numbers only (rate, momentum, coefficients, horizons) become arms of one
family, which one compiled program trains side by side.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np
import optax

from experiments import train
import pbp_jax as pbp
from pbp_jax import schedules

# What arms of one task may differ in; all else is the task's own.
_OF_AN_ARM = frozenset({
    "arms", "arm", "learning_rate", "momentum", "weight_decay",
    "reference_batch_size", "update_interval", "decay_epochs", "decay_factor",
    "uniform_delay", "told_delay", "shrinking",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(train.Config):
  """A configuration of `train` for one arm, and what that can't say.

  Attributes:
    arm: The arm's name, in the place of `arms`.
    normalization: The network's normalisation; empty is its own default.
    group_size: Channels of a group at the first width; 0 is the default.
    uniform_delay: Delay of every stage in micro-batches, in the place of the
      arm's own schedule; None for that.
    told_delay: The delay that mitigations reckon with, as a multiple of the
      true one.
    shrinking: Factor of the gradient for each stage it has passed, in [0, 1].
  """

  arm: str = "pb"
  normalization: str = ""
  group_size: int = 0
  uniform_delay: int | None = None
  told_delay: float = 1.0
  shrinking: float = 1.0

  @property
  def task_key(self) -> tuple[Any, ...]:
    """Equal for settings that one task can train."""
    fields = dataclasses.asdict(self)
    return tuple(v for name, v in fields.items() if name not in _OF_AN_ARM)


def make_stages(
  setting: Setting, num_classes: int = 10
) -> tuple[pbp.Stage, ...]:
  """The pipeline of a setting, for so many classes."""
  options = {
    "normalization": setting.normalization,
    "group_size": setting.group_size,
  }
  given = {name: value for name, value in options.items() if value}
  return train.make_stages(setting, num_classes=num_classes, **given)


def make_arm(
  label: str,
  setting: Setting,
  num_stages: int,
  num_examples: int,
  total_samples: int,
) -> pbp.presets.Arm:
  """Makes the arm of a setting.

  Args:
    label: The arm's name.
    setting: The setting.
    num_stages: Stages of its pipeline.
    num_examples: Size of its training split.
    total_samples: Samples it trains on.

  Returns:
    The arm, whose numbers hold the rate and the momentum as well.

  Raises:
    ValueError: If the arm is unknown or can't have such numbers.
  """
  scaled = train.scaled_hyperparameters(setting)
  schedule = _schedule(setting, num_stages)

  def make(numbers: Mapping[str, Any]) -> pbp.presets.Arm:
    return pbp.presets.make_arm(
      setting.arm,
      num_stages,
      learning_rate=train.decaying_rate(
        setting, numbers["learning_rate"], num_examples
      ),
      momentum=numbers["momentum"],
      weight_decay=setting.weight_decay,
      update_interval=setting.update_interval,
      num_updates=total_samples // setting.update_interval,
      schedule=schedule,
    )

  own = {"learning_rate": scaled.learning_rate, "momentum": scaled.momentum}
  arm = make(own)
  family = [
    arm.family,
    setting.uniform_delay,
    setting.update_interval,
    setting.weight_decay,
    setting.decay_epochs,
    setting.decay_factor,
    # Without numbers of its own a mitigation is told by the schedule.
    None if arm.numbers else setting.told_delay,
  ]
  numbers = {**arm.numbers, **own, "shrinking": setting.shrinking}

  def make_optimizer(numbers):
    return optax.chain(
      pbp.shrink_gradients(numbers["shrinking"]),
      make(numbers).make_optimizer(
        {name: numbers[name] for name in arm.numbers}
      ),
    )

  return dataclasses.replace(
    arm,
    name=label,
    family=repr(family),
    numbers=numbers,
    make_optimizer=make_optimizer,
  )


def _schedule(setting: Setting, num_stages: int) -> schedules.Schedule:
  interval = setting.update_interval
  if setting.uniform_delay is None:
    base = pbp.presets.BASES[setting.arm.split("+")[0]]
    schedule = base.make(num_stages, interval)
  else:
    schedule = schedules.uniform_delay(
      num_stages, setting.uniform_delay, interval
    )
  told = np.asarray(schedule.delay) * setting.told_delay
  return dataclasses.replace(schedule, delay=told)
