"""The studies: what each varies, at which sizes, and the claim it tests.

Claims are Kosson et al.'s (arXiv 2003.11666), as recalled. A study is a grid:
each of its lines at each of its points is a `Setting`. Sizes: `smoke` takes
seconds, `cpu` minutes on two cores, `paper` is the paper's recipe as recalled,
for a GPU.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from experiments.study_settings import Setting

# Fields of `Setting`, and their values.
Changes = Mapping[str, Any]
Place = float | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """A study at one scale.

  Attributes:
    base: What all its settings have in common.
    lines: By the legend's text, what makes the line.
    points: By the place on the horizontal axis, what makes the point.
  """

  base: Setting
  lines: Mapping[str, Changes]
  points: Mapping[Place, Changes]

  def settings(self) -> dict[tuple[str, Place], Setting]:
    """The setting of each line at each point.

    Example:
      >>> grid = Grid(base=Setting(), lines={"PB": {"arm": "pb"}},
      ...             points={0.2: {"learning_rate": 0.2}})
      >>> [(place, s.arm, s.learning_rate)
      ...  for place, s in grid.settings().items()]
      [(('PB', 0.2), 'pb', 0.2)]
    """
    return {
      (line, x): dataclasses.replace(self.base, **{**of_line, **of_point})
      for line, of_line in self.lines.items()
      for x, of_point in self.points.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """One table or figure.

  Attributes:
    claim: What the paper says, in one sentence.
    x_label: What the horizontal axis shows.
    grids: The study by scale: smoke, cpu, paper. ImageNet has only paper.
  """

  claim: str
  x_label: str
  grids: Mapping[str, Grid]


_SMOKE = Setting(
  num_stages=4,
  width=4,
  seeds=2,
  max_samples=60,
  chunk_samples=30,
  accuracy_points=2,
  accuracy_images=20,
  final_images=20,
)
_DIGITS = Setting()
_SMALL_RESNET = Setting(model="resnet20", width=4, epochs=5)
_CIFAR = Setting(
  dataset="cifar10",
  model="resnet20",
  epochs=164,
  weight_decay=1e-4,
  decay_epochs=(82.0, 123.0),
  augment=True,
)
_IMAGENET = Setting(
  dataset="imagenet2012",
  seeds=1,
  epochs=90,
  reference_batch_size=256,
  weight_decay=1e-4,
  decay_epochs=(30.0, 60.0, 80.0),
  augment=True,
  chunk_samples=500,
  accuracy_images=5000,
  final_images=50_000,
)
_VGG: Changes = {
  "epochs": 300,
  "learning_rate": 0.05,
  "weight_decay": 5e-4,
  "decay_epochs": tuple(30.0 * i for i in range(1, 10)),
  "decay_factor": 0.5,
}

_SGDM: Changes = {"arm": "sgdm"}
_PB: Changes = {"arm": "pb"}
_BOTH: Changes = {"arm": "pb+lwpvd+scd"}
_MITIGATED: Mapping[str, Changes] = {
  "SGDM": _SGDM,
  "PB": _PB,
  "PB + SC": {"arm": "pb+scd"},
  "PB + LWPv": {"arm": "pb+lwpvd"},
  "PB + LWPv + SC": _BOTH,
}
_WITH_STASHED: Mapping[str, Changes] = {
  **_MITIGATED,
  "PB, stashed": {"arm": "pb+stash"},
}


def _grids(
  lines: Mapping[str, Changes],
  cpu: Mapping[Place, Changes],
  *,
  paper: Mapping[Place, Changes] | None = None,
  smoke: Mapping[Place, Changes] | None = None,
  smoke_lines: Mapping[str, Changes] | None = None,
  small: Setting = _DIGITS,
) -> dict[str, Grid]:
  """The three scales; smoke has the last point of cpu unless told."""
  if smoke is None:
    smoke = dict(list(cpu.items())[-1:])
  return {
    "smoke": Grid(base=_SMOKE, lines=smoke_lines or lines, points=smoke),
    "cpu": Grid(base=small, lines=lines, points=cpu),
    "paper": Grid(base=_CIFAR, lines=lines, points=paper or cpu),
  }


def _over(name: str, *values: Any) -> dict[Place, Changes]:
  """A point for each value of a field."""
  return {value: {name: value} for value in values}


def _momenta(learning_rate: float, *momenta: float) -> dict[Place, Changes]:
  """Momenta at the rate divided by 1 - m that .9 has at this rate."""
  return {
    m: {"momentum": m, "learning_rate": learning_rate * (1 - m) / 0.1}
    for m in momenta
  }


def _networks(*names: str, **changes: Any) -> dict[Place, Changes]:
  return {
    name: {"model": name, **changes, **(_VGG if "vgg" in name else {})}
    for name in names
  }


def _by_depth(lines: Mapping[str, Changes]) -> dict[str, Grid]:
  """Deeper and deeper: free in the residual MLP, given in the paper's nets."""
  return _grids(
    lines,
    _over("num_stages", 10, 20, 34, 68),
    smoke=_over("num_stages", 5),
    paper=_networks("resnet20", "resnet56", "resnet110"),
  )


_NORMALIZATIONS: Mapping[Place, Changes] = {
  "none": {"normalization": "none"},
  **{
    f"groups of {size}": {"normalization": "group", "group_size": size}
    for size in (1, 2, 4)
  },
  "layer": {"normalization": "layer"},
  "online": {"normalization": "online"},
}

STUDIES: Mapping[str, Study] = types.MappingProxyType(
  {
    "constant_delay": Study(
      claim="Accuracy falls with a delay that is the same for all stages;"
      " seeing other weights on the backward pass than on the forward pass"
      " hurts at long delays only.",
      x_label="delay of every stage (updates)",
      grids=_grids(
        {
          "consistent (stashed)": {"arm": "pb+stash"},
          "forward only (inconsistent)": _PB,
          "inconsistent, recomputed": {"arm": "pb+recompute"},
        },
        _over("uniform_delay", 0, 4, 16, 64, 256),
        paper=_over("uniform_delay", 0, 1, 2, 4, 8, 16, 32, 64, 128, 256),
      ),
    ),
    "momentum": Study(
      claim="With a delay, high momentum hurts, at the same rate over"
      " 1 - momentum; spike compensation and prediction make it useful.",
      x_label="momentum at the reference batch size",
      grids=_grids(
        _MITIGATED,
        _momenta(0.1, 0.0, 0.5, 0.9, 0.97, 0.99),
        smoke=_momenta(0.1, 0.0, 0.9),
      ),
    ),
    "batch_size": Study(
      claim="Under the scaling rule small updates cost SGDM nothing, and the"
      " delay, which is long in updates but not in samples, costs PB no more.",
      x_label="samples an update",
      grids=_grids(
        {"SGDM": _SGDM, "PB": _PB, "PB + LWPv + SC": _BOTH},
        _over("update_interval", 1, 4, 16, 64),
        paper=_over("update_interval", 1, 2, 4, 8, 16, 32, 64, 128),
      ),
    ),
    "normalization": Study(
      claim="Group and Online Normalization train at batch one, with a delay"
      " too.",
      x_label="normalisation",
      grids=_grids(
        {"SGDM": _SGDM, "PB": _PB, "PB + LWPv + SC": _BOTH},
        _NORMALIZATIONS,
        smoke={
          "online": {
            "normalization": "online",
            "model": "resnet8",
            "num_stages": 0,
          }
        },
        smoke_lines={"PB": _PB},  # a ResNet takes long to compile
        small=_SMALL_RESNET,
      ),
    ),
    "inconsistency_border": Study(
      claim="Weight inconsistency does no harm at the paper's small rates"
      " (where it begins to is ours to show).",
      x_label="learning rate at the reference batch size",
      grids=_grids(
        _WITH_STASHED,
        _over("learning_rate", 0.1, 0.4, 1.6, 6.4, 25.6),
        paper=_over("learning_rate", 0.05, 0.1, 0.2, 0.4, 0.8),
        smoke=_over("learning_rate", 0.05, 0.1),
        small=dataclasses.replace(_DIGITS, reference_batch_size=32),
      ),
    ),
    "reference_batch": Study(
      claim="Weight inconsistency does no harm at the paper's settings (at"
      " which rate of a small reference batch it begins to is ours to show).",
      x_label="reference batch size, at rate 0.1 and momentum 0.9",
      grids=_grids(
        _WITH_STASHED,
        _over("reference_batch_size", 128, 64, 32, 16, 8),
        smoke=_over("reference_batch_size", 128, 8),
      ),
    ),
    "weight_stashing": Study(
      claim="Weight stashing gains nothing in fine-grained PB.",
      x_label="stages",
      grids=_by_depth(
        {
          "SGDM": _SGDM,
          "PB": _PB,
          "PB, stashed": {"arm": "pb+stash"},
          "PB + LWPv + SC": _BOTH,
          "PB + LWPv + SC, stashed": {"arm": "pb+stash+lwpvd+scd"},
        },
      ),
    ),
    "prediction_form": Study(
      claim="Combined with SC, the velocity form of prediction is better than"
      " the weight form at small batch.",
      x_label="horizon, in multiples of the delay (prediction alone)",
      grids=_grids(
        {"LWPv": {"arm": "pb+lwpvd"}, "LWPw": {"arm": "pb+lwpwd"}},
        _over("told_delay", 0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
        smoke=_over("told_delay", 1.0),
      ),
    ),
    "prediction_form_with_sc": Study(
      claim="As in prediction_form, with spike compensation for the delay.",
      x_label="stages",
      grids=_by_depth(
        {
          "LWPv + SC": _BOTH,
          "LWPw + SC": {"arm": "pb+lwpwd+scd"},
          "PB": _PB,
        },
      ),
    ),
    "overcompensation": Study(
      claim="Compensating for twice the delay (SC_2D, LWP_2D) does as well as"
      " the combination.",
      x_label="stages",
      grids=_by_depth(
        {
          "PB": _PB,
          "SC_D": {"arm": "pb+scd"},
          "SC_2D": {"arm": "pb+sc2d"},
          "LWPv_D": {"arm": "pb+lwpvd"},
          "LWPv_2D": {"arm": "pb+lwpv2d"},
          "LWPv_D + SC_D": _BOTH,
        },
      ),
    ),
    "spectrain": Study(
      claim="SpecTrain's prediction on both passes is no better than LWP and"
      " SC.",
      x_label="stages",
      grids=_by_depth(
        {
          "SGDM": _SGDM,
          "PB": _PB,
          "SpecTrain": {"arm": "pb+spectrain"},
          "PB + LWPv + SC": _BOTH,
        },
      ),
    ),
    "gradient_shrinking": Study(
      claim="Shrinking the gradient of early stages does not mitigate the delay"
      " as SC and LWP do.",
      x_label="factor of the gradient for each stage it passes (1: none)",
      grids=_grids(
        {"PB": _PB, "PB + LWPv + SC": _BOTH},
        _over("shrinking", 1.0, 0.98, 0.95, 0.9, 0.8),
        smoke=_over("shrinking", 1.0, 0.8),
      ),
    ),
    "networks": Study(
      claim="PB loses more accuracy the deeper the network is; SC and LWP"
      " together restore it.",
      x_label="network",
      grids=_grids(
        _MITIGATED,
        _networks("resnet8", "resnet20", "resnet56", width=4),
        smoke=_networks("residual_mlp"),
        paper=_networks(
          *(f"vgg{depth}" for depth in (11, 13, 16)),
          *(f"resnet{depth}" for depth in (20, 32, 44, 56, 110)),
        ),
        small=_SMALL_RESNET,
      ),
    ),
    "training_length": Study(
      claim="PB with SC and LWP reaches SGDM's accuracy on a deep network (how"
      " long a run that takes is ours to show).",
      x_label="epochs",
      grids={
        "smoke": Grid(
          base=_SMOKE,
          lines={"PB": _PB},
          points={f"{n} samples": {"max_samples": n} for n in (40, 80)},
        ),
        "cpu": Grid(
          base=dataclasses.replace(_SMALL_RESNET, model="resnet56"),
          lines={"SGDM": _SGDM, "PB": _PB, "PB + LWPv + SC": _BOTH},
          points=_over("epochs", 5, 10, 20),
        ),
        "paper": Grid(
          base=dataclasses.replace(_CIFAR, model="resnet56"),
          lines={"SGDM": _SGDM, "PB": _PB, "PB + LWPv + SC": _BOTH},
          points={
            n: {"epochs": n, "decay_epochs": (n / 2, 3 * n / 4)}
            for n in (41, 82, 164)
          },
        ),
      },
    ),
    "imagenet": Study(
      claim="SC and LWP together restore the accuracy of PB on ImageNet.",
      x_label="network",
      grids={
        "paper": Grid(
          base=_IMAGENET, lines=_MITIGATED, points=_networks("resnet50")
        )
      },
    ),
  }
)
