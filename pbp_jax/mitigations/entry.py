"""What the registry knows of a mitigation, and the places it can take."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import optax

from pbp_jax import schedules
from pbp_jax.transforms import per_stage

# The places of a chain in their order. Those that are there without being asked
# for are the decay, the momentum and the learning rate.
ROLES: dict[str, str] = {
  "shrinking": "scales the gradient",
  "correction": "corrects the gradient for the weights it was taken at",
  "clipping": "bounds the gradient",
  "decay": "adds the weight decay to the gradient",
  "damping": "divides the decayed gradient",
  "momentum": "turns gradients into a direction",
  "rate": "scales the direction, stage by stage",
  "direction view": "remembers the direction, for the weights that a pass sees",
  "learning rate": "turns the direction into an update",
  "feedback": "changes the update",
  "view": "changes the weights that a pass sees",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What a mitigation's link is made for.

  Attributes:
    schedule: The arm's schedule.
    learning_rate: The rate, a number (may be traced) or an optax schedule.
    momentum: The momentum m, a number or one value a stage; may be traced.
    weight_decay: The coupled decay, already in the chain; may be traced.
    num_updates: How many updates the run makes, None if that is not known.
  """

  schedule: schedules.Schedule
  learning_rate: optax.ScalarOrSchedule
  momentum: per_stage.PerStage
  weight_decay: float | jax.Array = 0.0
  num_updates: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mitigation:
  """A word of an arm's name, after the base.

  Attributes:
    role: Its place in the chain (`ROLES`); one mitigation a place.
    make: Makes the link.
    formula: One line; D is the stage's delay in updates, S the number of
      stages, s the stage, g the gradient, v the velocity, u the update.
    source: Where the formula comes from, and how surely.
    numbers: Makes the numbers in which arms of the same structure differ, or
      None if the arm has a structure of its own.
    replaces: Further places that the link fills by itself: they stay empty, and
      no other mitigation may take them.
    adapt: Changes what all the chain's links are made for.
    reads_rate: Whether the link needs to know the rate of every stage, so that
      nothing may scale the rate stage by stage.
    only_backward: Whether it changes nothing but the weights of the backward
      pass, which a schedule that stashes weights does not ask for.
  """

  role: str
  make: Callable[[Context], optax.GradientTransformation]
  formula: str
  source: str
  numbers: Callable[[Context], dict[str, Any]] | None = None
  replaces: tuple[str, ...] = ()
  adapt: Callable[[Context], Context] | None = None
  reads_rate: bool = False
  only_backward: bool = False

  def __post_init__(self):
    unknown = {self.role, *self.replaces} - set(ROLES)
    if unknown:
      raise ValueError(
        f"role and replaces must be among {', '.join(ROLES)}, got"
        f" {', '.join(sorted(unknown))}."
      )

  @property
  def places(self) -> tuple[str, ...]:
    """All the places it takes."""
    return (self.role, *self.replaces)


def merge(*tables: dict[str, Mitigation]) -> dict[str, Mitigation]:
  """Merges tables of mitigations by name.

  Args:
    *tables: The tables.

  Returns:
    One table, in the tables' order.

  Raises:
    ValueError: If two of them have a word in common.

  Example:
    >>> merge({}, {})
    {}
  """
  merged: dict[str, Mitigation] = {}
  for table in tables:
    if common := merged.keys() & table.keys():
      raise ValueError(
        f"Words must be unique, got twice: {', '.join(sorted(common))}."
      )
    merged.update(table)
  return merged
