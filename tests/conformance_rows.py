"""The rows of the conformance table: every link, and how it is used."""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
import pkgutil
import types
import typing
from typing import Any

import optax

from pbp_jax import transforms

RATE = 0.05
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A link with hyperparameters, and its place in a chain.

  Attributes:
    factory: The public function that makes the link.
    place: "gradient" before a momentum, "core" in its place, "direction"
      between it and the rate, "end" after the rate, "whole" for an optimizer.
    arguments: Keyword arguments, numbers that fit any tree.
    staged: What to replace in `arguments` for parameters of three stages.
    others: Second values for the arguments that may be traced.
    static: The arguments that shape the state.
    core: What stands at the core where the link does not.
    reads_stale_params: Whether an update needs the extra argument.
    rate: The learning rate at which it converges on Rosenbrock's function.
    never_converges: Why it does not, if it does not.
  """

  factory: Callable[..., optax.GradientTransformation]
  place: str
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  staged: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  static: tuple[str, ...] = ()
  core: Callable[[], optax.GradientTransformation] = lambda: optax.trace(
    MOMENTUM
  )
  reads_stale_params: bool = False
  rate: float = 3e-4
  never_converges: str = ""

  def link(self, **changes):
    return self.factory(**{**self.arguments, **changes})

  def staged_link(self):
    return self.link(**self.staged)

  def injected_link(self):
    factory = optax.inject_hyperparams(self.factory, static_args=self.static)
    return factory(**self.arguments)

  def chain(self, link, rate=RATE):
    """The link in an optimizer."""
    descend = optax.scale_by_learning_rate(rate)
    links = {
      "gradient": (link, self.core(), descend),
      "core": (link, descend),
      "direction": (self.core(), link, descend),
      "end": (self.core(), descend, link),
      "whole": (link,),
    }
    return optax.chain(*links[self.place])


ROWS: dict[str, Row] = {
  "adaptive_delay_compensation": Row(
    factory=transforms.adaptive_delay_compensation,
    place="gradient",
    arguments={"strength": 2.0, "decay": 0.95, "epsilon": 1e-7},
    staged={"strength": [2.0, 0.5, 1.0]},
    others={"strength": 0.5, "decay": 0.5, "epsilon": 1e-3},
    reads_stale_params=True,
  ),
  "asynchronous_nesterov": Row(
    factory=transforms.asynchronous_nesterov,
    place="whole",
    arguments={"learning_rate": 1e-3, "momentum": 0.9},
    staged={"momentum": [0.96, 0.93, 0.9]},
    others={"learning_rate": 0.1, "momentum": 0.5},
  ),
  "clip_by_stage_norm": Row(
    factory=transforms.clip_by_stage_norm,
    place="gradient",
    arguments={"max_norm": 1.0},
    staged={"max_norm": [0.5, 1.0, 2.0]},
    others={"max_norm": 0.1},
  ),
  "delay_compensation": Row(
    factory=transforms.delay_compensation,
    place="gradient",
    arguments={"strength": 0.5},
    staged={"strength": [2.0, 0.5, 1.0]},
    others={"strength": 0.0},
    reads_stale_params=True,
  ),
  "delay_gradients": Row(
    factory=transforms.delay_gradients,
    place="gradient",
    arguments={"delay": 2},
    staged={"delay": [2, 1, 0]},
    static=("delay",),
    never_converges="gradients that are two updates old diverge there",
  ),
  "discrepancy_correction": Row(
    factory=transforms.discrepancy_correction,
    place="end",
    arguments={"delay": 2.0, "decay": 0.1},
    staged={"delay": [2.0, 0.5, 0.0]},
    others={"delay": 0.0, "decay": 0.5},
  ),
  "error_feedback": Row(
    factory=transforms.error_feedback,
    place="end",
    arguments={"strength": 1.0},
    staged={"strength": [2.0, 0.5, 1.0]},
    others={"strength": 0.5},
  ),
  "gap_aware": Row(
    factory=transforms.gap_aware,
    place="gradient",
    arguments={
      "momentum": MOMENTUM,
      "learning_rate": RATE,
      "decay": 0.999,
      "epsilon": 1e-8,
    },
    staged={"momentum": [0.9, 0.5, 0.0]},
    others={
      "momentum": 0.5,
      "learning_rate": 0.1,
      "decay": 0.9,
      "epsilon": 1e-3,
    },
    reads_stale_params=True,
  ),
  "linear_weight_prediction_velocity": Row(
    factory=transforms.linear_weight_prediction,
    place="end",
    arguments={"horizon": 2.0, "form": "velocity", "learning_rate": RATE},
    staged={"horizon": [2.0, 0.5, 0.0]},
    others={"horizon": 0.5, "learning_rate": 0.1},
    static=("form",),
  ),
  "linear_weight_prediction_weight": Row(
    factory=transforms.linear_weight_prediction,
    place="end",
    arguments={"horizon": 2.0, "form": "weight"},
    staged={"horizon": [2.0, 0.5, 0.0]},
    others={"horizon": 0.5},
    static=("form",),
  ),
  "msnag": Row(
    factory=transforms.msnag,
    place="end",
    arguments={"horizon": 2.0, "momentum": MOMENTUM, "learning_rate": RATE},
    staged={"horizon": [2.0, 0.5, 0.0]},
    others={"horizon": 0.5, "momentum": 0.5, "learning_rate": 0.1},
  ),
  "msnag_adam": Row(
    factory=transforms.msnag_adam,
    place="end",
    arguments={
      "horizon": 2,
      "learning_rate": RATE,
      "b1": 0.9,
      "b2": 0.999,
      "eps": 1e-8,
      "weight_decay": 0.1,
    },
    staged={"horizon": [2, 1, 0]},
    others={
      "learning_rate": 0.1,
      "b1": 0.5,
      "b2": 0.9,
      "eps": 1e-3,
      "weight_decay": 0.0,
    },
    static=("horizon",),
    core=optax.scale_by_adam,
    rate=1e-2,
  ),
  "pipeoptim": Row(
    factory=transforms.pipeoptim,
    place="direction",
    arguments={"horizon": 2.0, "learning_rate": RATE},
    staged={"horizon": [2.0, 0.5, 0.0]},
    others={"horizon": 0.5, "learning_rate": 0.1},
    core=optax.scale_by_adam,
    rate=1e-2,
  ),
  "reconstructed_weights": Row(
    factory=transforms.reconstructed_weights,
    place="end",
    arguments={"delay": 2.0},
    staged={"delay": [2.0, 0.5, 0.0]},
    others={"delay": 0.5},
  ),
  "scale_by_asynchronous_nadam": Row(
    factory=transforms.scale_by_asynchronous_nadam,
    place="core",
    arguments={"b1": 0.9, "b2": 0.999, "eps": 1e-8, "momentum_decay": 0.004},
    staged={"b1": [0.96, 0.93, 0.9]},
    others={"b1": 0.5, "b2": 0.9, "eps": 1e-3, "momentum_decay": 0.1},
    rate=1e-2,
  ),
  "scale_by_basis_rotation": Row(
    factory=transforms.scale_by_basis_rotation,
    place="core",
    arguments={"b1": 0.9, "b2": 0.999, "eps": 1e-3, "refresh_every": 2},
    others={"b1": 0.5, "b2": 0.9, "eps": 1e-2, "refresh_every": 1},
    rate=1e-2,
  ),
  "scale_by_stage": Row(
    factory=transforms.scale_by_stage,
    place="direction",
    arguments={"factor": 0.5},
    staged={"factor": [0.25, 0.5, 0.75]},
    others={"factor": 2.0},
  ),
  "scale_by_staleness": Row(
    factory=transforms.scale_by_staleness,
    place="direction",
    arguments={"delay": 2.0},
    staged={"delay": [4.0, 2.0, 3.0]},
    others={"delay": 3.0},
  ),
  "scale_by_staleness_annealed": Row(
    factory=transforms.scale_by_staleness,
    place="direction",
    arguments={"delay": 2.0, "annealing_steps": 4.0},
    staged={"delay": [4.0, 2.0, 3.0]},
    others={"delay": 3.0, "annealing_steps": 2.0},
  ),
  "shrink_gradients": Row(
    factory=transforms.shrink_gradients,
    place="gradient",
    arguments={"factor": 0.5, "hops": 1},
    staged={"hops": None},
    others={"factor": 0.8, "hops": 2},
  ),
  "spectrain": Row(
    factory=transforms.spectrain,
    place="end",
    arguments={"delay": 2.0, "learning_rate": RATE, "backward_horizon": 1.0},
    staged={"delay": [2.0, 0.5, 0.0], "backward_horizon": None},
    others={"delay": 0.5, "learning_rate": 0.1, "backward_horizon": 0.0},
  ),
  "spike_compensation": Row(
    factory=transforms.spike_compensation,
    place="core",
    arguments={"momentum": MOMENTUM, "delay": 2.0},
    staged={"delay": [2.0, 0.5, 0.0]},
    others={"momentum": 0.5, "delay": 0.5},
  ),
  "xpipe": Row(
    factory=transforms.xpipe,
    place="direction",
    arguments={
      "forward_horizon": 2.0,
      "backward_horizon": 1.0,
      "learning_rate": RATE,
    },
    staged={"forward_horizon": [2.0, 1.0, 0.0]},
    others={
      "forward_horizon": 1.0,
      "backward_horizon": 0.0,
      "learning_rate": 0.1,
    },
    core=optax.scale_by_adam,
    rate=1e-2,
  ),
}

# What methods share: functions that make links for them, and are not public.
SHARED = {"go_back", "predict_along_direction"}


def public_links() -> set[str]:
  """The names of all functions of `pbp_jax.transforms` that make links."""
  return {
    name for name, member in vars(transforms).items() if _makes_link(member)
  }


def links_on_disk() -> set[str]:
  """The same of all its modules, exported or not."""
  names = set()
  for info in pkgutil.iter_modules(transforms.__path__):
    module = __import__(f"{transforms.__name__}.{info.name}", fromlist=["*"])
    names |= {
      name
      for name, member in vars(module).items()
      if _makes_link(member)
      and member.__module__ == module.__name__
      and not name.startswith("_")
    }
  return names


def functions_without_result_type() -> set[str]:
  """The public functions that could be links without being seen as such."""
  return {
    name
    for name, member in vars(transforms).items()
    if isinstance(member, types.FunctionType)
    and inspect.signature(member).return_annotation is inspect.Signature.empty
  }


def per_stage_arguments(row: Row) -> set[str]:
  """The arguments that may differ from stage to stage: any pytree."""
  parameters = inspect.signature(row.factory).parameters.values()
  return {
    parameter.name
    for parameter in parameters
    if Any in (parameter.annotation, *typing.get_args(parameter.annotation))
  }


def _makes_link(member: Any) -> bool:
  if not isinstance(member, types.FunctionType):
    return False
  result = inspect.signature(member).return_annotation
  if isinstance(result, str):
    return "GradientTransformation" in result
  return isinstance(result, type) and issubclass(
    result, optax.GradientTransformation
  )
