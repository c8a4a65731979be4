"""Arms by name: a schedule, its consistency and the mitigations, as one word.

An arm is one column of an experiment. Its name is a base, then what is added
to it: `pb+stash+lwpvd+scd` is pipelined backpropagation with weight stashing,
weight prediction in the velocity form and spike compensation, both for the
whole delay. Every optimizer is SGD with momentum at its core, and weight decay
enters the gradient before the momentum, on the newest weights.
"""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
from typing import Any

import jax
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax import schedules, transforms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What a mitigation's links are made for.

  Attributes:
    schedule: The arm's schedule.
    learning_rate: The rate, a number (may be traced) or an optax schedule.
    momentum: The momentum m; may be traced.
  """

  schedule: schedules.Schedule
  learning_rate: ArrayLike | optax.Schedule
  momentum: ArrayLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
  """The first word of an arm's name.

  Attributes:
    make: Makes the schedule from the number of stages and update interval.
    description: One line.
    is_delayed: Whether there is a delay to mitigate.
  """

  make: Callable[[int, int], schedules.Schedule]
  description: str
  is_delayed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mitigation:
  """A further word of an arm's name.

  Attributes:
    role: Its place in the chain, one mitigation a place: "momentum" replaces
      the momentum buffer, "view" ends the chain.
    make: Makes the link.
    formula: One line; D is the stage's delay in updates.
    source: Where the formula comes from.
    numbers: Makes the numbers in which arms of the same structure differ, or
      None if the arm has a structure of its own.
  """

  role: str
  make: Callable[[Context], optax.GradientTransformation]
  formula: str
  source: str
  numbers: Callable[[Context], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One column of an experiment.

  Attributes:
    name: The arm's name.
    schedule: Its schedule.
    backward: What `Simulator` takes as `backward`.
    family: Arms of one family have optimizers of one structure, which differ in
      `numbers` only: they can be stacked and run under one `vmap`.
    numbers: Arrays that `make_optimizer` takes; may be traced.
    make_optimizer: Makes the optimizer from the numbers.
  """

  name: str
  schedule: schedules.Schedule
  backward: str
  family: str
  numbers: Mapping[str, Any]
  make_optimizer: Callable[
    [Mapping[str, Any]], optax.GradientTransformationExtraArgs
  ]

  @property
  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The arm's own optimizer."""
    return self.make_optimizer(self.numbers)


def _spike(multiple: int) -> Mitigation:
  def numbers(context):
    # In float64 on the host (if known), as the arm on its own has them.
    a, b = transforms.spike_coefficients(
      context.momentum, multiple * context.schedule.delay
    )
    return {"a": a, "b": b}

  times = "" if multiple == 1 else f"{multiple} "
  return Mitigation(
    role="momentum",
    make=lambda context: transforms.spike_compensation(
      context.momentum, multiple * context.schedule.delay
    ),
    formula=f"v = m v + g; update m^T v + (1 - m^T) / (1 - m) g, T = {times}D",
    source="Kosson et al. 2020, arXiv 2003.11666 (form recalled)",
    numbers=numbers,
  )


def _prediction(form: str, multiple: int) -> Mitigation:
  times = "" if multiple == 1 else f"{multiple} "
  along = {"velocity": "- lr T v", "weight": "+ T (w - previous w)"}[form]
  return Mitigation(
    role="view",
    make=lambda context: transforms.linear_weight_prediction(
      multiple * context.schedule.delay,
      form,
      context.learning_rate if form == "velocity" else None,
    ),
    formula=f"forward pass on w {along}, T = {times}D",
    source="Kosson et al. 2020, arXiv 2003.11666 (form recalled)",
    numbers=(
      (lambda context: {"horizon": multiple * context.schedule.delay})
      if form == "velocity"
      else None
    ),
  )


BASES: dict[str, Base] = {
  "sgdm": Base(
    make=lambda num_stages, interval: schedules.fill_drain(
      num_stages, interval
    ),
    description="SGD with momentum, no pipeline",
    is_delayed=False,
  ),
  "fill_drain": Base(
    make=schedules.fill_drain,
    description="fill-and-drain (GPipe): no delay, idle workers",
    is_delayed=False,
  ),
  "pb": Base(
    make=schedules.pipelined_backprop,
    description="fine-grained pipelined backpropagation, D = 2 (S - 1 - s)",
  ),
  "1f1b": Base(
    make=schedules.one_f_one_b,
    description="PipeDream's 1F1B with weight stashing, D = S - 1 - s",
  ),
}

MITIGATIONS: dict[str, Mitigation] = {
  "scd": _spike(1),
  "sc2d": _spike(2),
  "lwpvd": _prediction("velocity", 1),
  "lwpv2d": _prediction("velocity", 2),
  "lwpwd": _prediction("weight", 1),
  "lwpw2d": _prediction("weight", 2),
}

# Words that change the schedule or the backward pass.
CONSISTENCIES: dict[str, str] = {
  "stash": "backward on the weights that the forward met",
  "recompute": "backward by running the stage again on the newest weights",
}


def list_arms() -> list[str]:
  """Names of the common arms; further words combine as in them."""
  bases = [name for name, base in BASES.items() if base.is_delayed]
  endings = [
    "", "+stash", "+scd", "+sc2d", "+lwpvd", "+lwpwd", "+lwpv2d", "+lwpw2d",
    "+lwpvd+scd", "+lwpwd+scd",
  ]  # fmt: skip
  arms = [name for name, base in BASES.items() if not base.is_delayed]
  for base in bases:
    stashed = BASES[base].make(1, 1).is_stashed
    arms += [
      base + ending
      for ending in endings
      if not (stashed and ending == "+stash")
    ]
  return arms


def make_arm(
  name: str,
  num_stages: int,
  *,
  learning_rate: ArrayLike | optax.Schedule,
  momentum: ArrayLike,
  weight_decay: ArrayLike = 0.0,
  update_interval: int = 1,
) -> Arm:
  """Makes an arm from its name.

  Args:
    name: A base, and further words in any order, joined by "+".
    num_stages: Stages S.
    learning_rate: The rate, a number (may be traced) or an optax schedule.
    momentum: The momentum m.
    weight_decay: Added times the newest weights to the gradient, before the
      momentum.
    update_interval: Micro-batches an update.

  Returns:
    The arm.

  Raises:
    ValueError: If a word is unknown, or words contradict each other; the error
      lists what there is.

  Example:
    >>> arm = make_arm("pb+lwpvd+scd", 4, learning_rate=0.1, momentum=0.5)
    >>> arm.schedule.delay
    array([6, 4, 2, 0])
    >>> arm.numbers["horizon"]
    array([6, 4, 2, 0])
  """
  words = name.split("+")
  base, words = words[0], words[1:]
  if base not in BASES:
    raise _unknown(name, base, BASES)
  unknown = [
    w for w in words if w not in MITIGATIONS and w not in CONSISTENCIES
  ]
  if unknown:
    raise _unknown(name, unknown[0], {**MITIGATIONS, **CONSISTENCIES})
  if len(set(words)) < len(words):
    raise ValueError(f"arm {name!r} must not say a word twice.")
  if words and not BASES[base].is_delayed:
    raise ValueError(
      f"arm {name!r} must be just {base!r}: there is no delay to mitigate."
    )
  chosen: dict[str, Mitigation] = {}
  for word in words:
    if word in MITIGATIONS:
      mitigation = MITIGATIONS[word]
      if mitigation.role in chosen:
        role = mitigation.role
        rivals = [w for w, m in MITIGATIONS.items() if m.role == role]
        raise ValueError(
          f"arm {name!r} must name at most one {role} mitigation of"
          f" {', '.join(rivals)}."
        )
      chosen[mitigation.role] = mitigation

  schedule = BASES[base].make(num_stages, update_interval)
  if "stash" in words:
    schedule = schedule.with_weight_stashing()
  if "recompute" in words and schedule.is_stashed:
    raise ValueError(
      f"arm {name!r} must not recompute: its weights are stashed, which makes"
      " no difference between the two."
    )
  backward = "recompute" if "recompute" in words else "saved"
  context = Context(
    schedule=schedule, learning_rate=learning_rate, momentum=momentum
  )
  decay = [optax.add_decayed_weights(weight_decay)]
  if not isinstance(weight_decay, jax.core.Tracer) and not np.any(weight_decay):
    decay = []

  stackable = BASES[base].is_delayed and all(
    mitigation.numbers for mitigation in chosen.values()
  )
  if not stackable:

    def make_optimizer(numbers):
      del numbers
      links = {role: m.make(context) for role, m in chosen.items()}
      return optax.chain(
        *decay,
        links.get("momentum", optax.trace(momentum)),
        optax.scale_by_learning_rate(learning_rate),
        *([links["view"]] if "view" in links else []),
      )

    return Arm(
      name=name,
      schedule=schedule,
      backward=backward,
      family=name,
      numbers={},
      make_optimizer=make_optimizer,
    )

  numbers = {
    "a": np.ones(num_stages),
    "b": np.zeros(num_stages),
    "horizon": np.zeros(num_stages),
  }
  for mitigation in chosen.values():
    numbers.update(mitigation.numbers(context))

  def make_stackable_optimizer(numbers):
    return optax.chain(
      *decay,
      transforms.spike_compensation(momentum, a=numbers["a"], b=numbers["b"]),
      optax.scale_by_learning_rate(learning_rate),
      transforms.linear_weight_prediction(
        numbers["horizon"], "velocity", learning_rate
      ),
    )

  consistency = [w for w in words if w in CONSISTENCIES]
  return Arm(
    name=name,
    schedule=schedule,
    backward=backward,
    family="+".join([base, *sorted(consistency)]),
    numbers=numbers,
    make_optimizer=make_stackable_optimizer,
  )


def _unknown(name: str, word: str, known: Mapping[str, Any]) -> ValueError:
  close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  return ValueError(
    f"arm {name!r} has the unknown word {word!r}.{hint} Bases:"
    f" {', '.join(BASES)}. Words to add:"
    f" {', '.join([*CONSISTENCIES, *MITIGATIONS])}. Common arms:"
    f" {', '.join(list_arms())}."
  )
