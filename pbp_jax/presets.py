"""Arms by name: a schedule, its consistency and the mitigations, as one word.

An arm is one column of an experiment. Its name is a base, then what is added
to it: `pb+stash+lwpvd+scd` is pipelined backpropagation with weight stashing,
weight prediction in the velocity form and spike compensation, both for the
whole delay. Every optimizer is SGD with momentum at its core, unless a word
puts another in its place, and weight decay enters the gradient before the
momentum, on the newest weights. The words are those of `pbp_jax.mitigations`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import difflib
from typing import Any, NamedTuple

import jax
from jax import core as jax_core
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax import mitigations, schedules, transforms
from pbp_jax.transforms import per_stage

# The places that all arms of a family fill in the same way: with spike
# compensation and weight prediction in the velocity form, whose numbers are
# neutral in an arm that has neither.
_STACKED = ("momentum", "view")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
  """The first word of an arm's name.

  Attributes:
    make: Makes the schedule from the number of stages and update interval.
    description: One line.
    source: Where the schedule comes from.
    is_delayed: Whether there is a delay to mitigate.
  """

  make: Callable[[int, int], schedules.Schedule]
  description: str
  source: str
  is_delayed: bool = True


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


class Description(NamedTuple):
  """What a word of an arm's name stands for.

  Attributes:
    name: The word; what is added to a base begins with "+".
    formula: One line.
    source: Where it comes from, and how surely.
  """

  name: str
  formula: str
  source: str


BASES: dict[str, Base] = {
  "sgdm": Base(
    make=lambda num_stages, interval: schedules.fill_drain(
      num_stages, interval
    ),
    description="SGD with momentum, no pipeline",
    source="textbook",
    is_delayed=False,
  ),
  "fill_drain": Base(
    make=schedules.fill_drain,
    description="fill-and-drain (GPipe): no delay, idle workers",
    source="Huang et al. 2019, arXiv 1811.06965 (recalled)",
    is_delayed=False,
  ),
  "pb": Base(
    make=schedules.pipelined_backprop,
    description="fine-grained pipelined backpropagation, D = 2 (S - 1 - s)",
    source="Kosson et al. 2020, arXiv 2003.11666 (recalled)",
  ),
  "1f1b": Base(
    make=schedules.one_f_one_b,
    description="PipeDream's 1F1B with weight stashing, D = S - 1 - s",
    source="Narayanan et al. 2019, arXiv 1806.03377 (recalled)",
  ),
}

# Words that change the schedule or the backward pass.
CONSISTENCIES: dict[str, str] = {
  "stash": "backward on the weights that the forward met",
  "recompute": "backward by running the stage again on the newest weights",
}
_CONSISTENCY_SOURCES: dict[str, str] = {
  "stash": "Narayanan et al. 2019, arXiv 1806.03377 (recalled)",
  "recompute": "Chen et al. 2016, arXiv 1604.06174 (recalled)",
}

# All further words.
MITIGATIONS: dict[str, mitigations.Mitigation] = mitigations.MITIGATIONS

# What is tried together, besides every mitigation by itself.
_COMBINATIONS = ("lwpvd+scd", "lwpwd+scd", "t1+t2")


def list_arms() -> list[str]:
  """Names of the common arms; further words combine as in them."""
  arms = [name for name, base in BASES.items() if not base.is_delayed]
  for name, base in BASES.items():
    if base.is_delayed:
      is_stashed = base.make(1, 1).is_stashed
      endings = [
        *([] if is_stashed else ["stash"]),
        *(
          ending
          for ending in (*MITIGATIONS, *_COMBINATIONS)
          if not (is_stashed and _only_backward(ending.split("+")))
        ),
      ]
      arms += [name, *(f"{name}+{ending}" for ending in endings)]
  return arms


def describe_arms() -> list[Description]:
  """Describes all the words of which arms' names are made.

  Returns:
    A row for every base, and one for every word to add to it.

  Example:
    >>> print(*describe_arms()[2][:2], sep=": ")
    pb: fine-grained pipelined backpropagation, D = 2 (S - 1 - s)
  """
  return [
    *(
      Description(n, base.description, base.source) for n, base in BASES.items()
    ),
    *(
      Description(f"+{word}", formula, _CONSISTENCY_SOURCES[word])
      for word, formula in CONSISTENCIES.items()
    ),
    *(
      Description(f"+{word}", mitigation.formula, mitigation.source)
      for word, mitigation in MITIGATIONS.items()
    ),
  ]


def make_arm(
  name: str,
  num_stages: int,
  *,
  learning_rate: optax.ScalarOrSchedule,
  momentum: ArrayLike,
  weight_decay: float | jax.Array = 0.0,
  update_interval: int = 1,
  num_updates: int | None = None,
  schedule: schedules.Schedule | None = None,
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
    num_updates: Updates that the run is to make: for words that anneal.
    schedule: A schedule in the place of the base's own, such as a uniform
      delay. Mitigations go by its `delay`.

  Returns:
    The arm.

  Raises:
    ValueError: If a word is unknown, words contradict each other, a word
      needs `num_updates`, or the schedule is for other stages or another
      interval; the error lists what there is.

  Example:
    >>> arm = make_arm("pb+lwpvd+scd", 4, learning_rate=0.1, momentum=0.5)
    >>> arm.schedule.delay
    array([6, 4, 2, 0])
    >>> arm.numbers["horizon"]
    array([6, 4, 2, 0])
  """
  base, *words = name.split("+")
  _check_words(name, base, words)
  chosen = {w: MITIGATIONS[w] for w in words if w not in CONSISTENCIES}
  _check_places(name, chosen)

  if schedule is None:
    schedule = BASES[base].make(num_stages, update_interval)
  made_for = (schedule.num_stages, schedule.update_interval)
  if made_for != (num_stages, update_interval):
    raise ValueError(
      f"schedule must be for {num_stages} stages and an update interval of"
      f" {update_interval}, got {made_for[0]} and {made_for[1]}."
    )
  if "stash" in words:
    schedule = schedule.with_weight_stashing()
  if "recompute" in words and schedule.is_stashed:
    raise ValueError(
      f"arm {name!r} must not recompute: its weights are stashed, which makes"
      " no difference between the two."
    )
  if schedule.is_stashed and (idle := _only_backward(words)):
    raise ValueError(
      f"arm {name!r} must not say {idle[0]!r}, which changes the weights of the"
      f" backward pass alone: {schedule.name} stashes weights, both passes meet"
      " the same."
    )
  context = mitigations.Context(
    schedule=schedule,
    learning_rate=learning_rate,
    momentum=momentum,
    weight_decay=weight_decay,
    num_updates=num_updates,
  )
  for mitigation in chosen.values():
    if mitigation.adapt is not None:
      context = mitigation.adapt(context)

  family, numbers = name, {}
  if BASES[base].is_delayed and _is_stackable(chosen.values()):
    own = [w for w in words if w not in chosen or chosen[w].numbers is None]
    family = "+".join([base, *sorted(own)])
    numbers = {
      "a": np.ones(num_stages),
      "b": np.zeros(num_stages),
      "horizon": np.zeros(num_stages),
    }
    for mitigation in chosen.values():
      if mitigation.numbers is not None:
        numbers.update(mitigation.numbers(context))

  def make_optimizer(numbers):
    return _chain(context, list(chosen.values()), numbers)

  make_optimizer(numbers)  # what can't be made is to be said now
  return Arm(
    name=name,
    schedule=schedule,
    backward="recompute" if "recompute" in words else "saved",
    family=family,
    numbers=numbers,
    make_optimizer=make_optimizer,
  )


def _only_backward(words: Iterable[str]) -> list[str]:
  """Those of an arm's words that stashed weights leave without effect."""
  known = (w for w in words if w in MITIGATIONS)
  return [w for w in known if MITIGATIONS[w].only_backward]


def _is_stackable(chosen: Iterable[mitigations.Mitigation]) -> bool:
  """Whether the places of `_STACKED` hold nothing but numbers."""
  return not any(
    m.numbers is None and set(m.places) & {*_STACKED, "learning rate"}
    for m in chosen
  )


def _chain(
  context: mitigations.Context,
  chosen: Sequence[mitigations.Mitigation],
  numbers: Mapping[str, Any],
) -> optax.GradientTransformationExtraArgs:
  """The chain of the chosen links and those that are there unasked."""
  rate, momentum = context.learning_rate, context.momentum
  links = {
    "decay": optax.add_decayed_weights(context.weight_decay),
    "momentum": optax.trace(momentum)
    if per_stage.is_scalar(momentum)
    else transforms.spike_compensation(momentum, delay=0),
    "learning rate": optax.scale_by_learning_rate(rate),
  }
  decay = context.weight_decay
  if not isinstance(decay, jax_core.Tracer) and not np.any(decay):
    del links["decay"]
  if numbers:
    links["momentum"] = transforms.spike_compensation(
      momentum, a=numbers["a"], b=numbers["b"]
    )
    links["view"] = transforms.linear_weight_prediction(
      numbers["horizon"], "velocity", rate
    )
  for mitigation in chosen:
    if numbers and mitigation.role in _STACKED:
      continue
    for place in mitigation.places:
      links.pop(place, None)
    links[mitigation.role] = mitigation.make(context)
  return optax.chain(*(links[r] for r in mitigations.ROLES if r in links))


def _check_words(name: str, base: str, words: Sequence[str]) -> None:
  """Raises a ValueError unless the words are known and each said once."""
  if base not in BASES:
    raise _unknown(name, base, BASES)
  known = {**CONSISTENCIES, **MITIGATIONS}
  for word in words:
    if word not in known:
      raise _unknown(name, word, known)
  if len(set(words)) < len(words):
    raise ValueError(f"arm {name!r} must not say a word twice.")
  if words and not BASES[base].is_delayed:
    raise ValueError(
      f"arm {name!r} must be just {base!r}: there is no delay to mitigate."
    )


def _check_places(
  name: str, chosen: Mapping[str, mitigations.Mitigation]
) -> None:
  """Raises a ValueError if mitigations stand in each other's way."""
  taken: dict[str, str] = {}
  for word, mitigation in chosen.items():
    for place in mitigation.places:
      if place in taken:
        rivals = [w for w, m in MITIGATIONS.items() if place in m.places]
        raise ValueError(
          f"arm {name!r} must name at most one {place} mitigation of"
          f" {', '.join(rivals)}; got {taken[place]!r} and {word!r}."
        )
      taken[place] = word
  readers = [word for word, m in chosen.items() if m.reads_rate]
  if readers and "rate" in taken:
    raise ValueError(
      f"arm {name!r} must not combine {taken['rate']!r}, which scales the rate"
      f" stage by stage, with {readers[0]!r}, which reckons with one rate for"
      " all stages. The weight form of prediction (lwpwd) goes with any rate."
    )


def _unknown(name: str, word: str, known: Mapping[str, Any]) -> ValueError:
  close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  return ValueError(
    f"arm {name!r} has the unknown word {word!r}.{hint} Bases:"
    f" {', '.join(BASES)}. Words to add:"
    f" {', '.join([*CONSISTENCIES, *MITIGATIONS])}."
  )
