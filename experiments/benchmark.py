"""What simulating a pipeline costs: time a sample, compile time, memory.

Compares, in turn inside each process and over several processes: plain
momentum SGD by the simulator (`sgdm`), pipelined backpropagation without and
with mitigations (`pb`, `pb+lwpvd+scd`), eight times the delay (`@8`), old
weights in half the memory (`:bfloat16`), the program one writes first (`naive`:
stock Flax, `lax.conv`), a plain PyTorch loop (`torch`, if it is installed),
several seeds over the cores (`replicas`), and the loop over the samples as one
kernel (`one_kernel`), which narrow networks gain by.

Command: python -m experiments.benchmark --workdir=runs/benchmark
Hardware, time and numbers: experiments/README.md.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from matplotlib import figure as figures

from experiments import benchmark_cases, figure_program

_ARMS = ("sgdm", "pb", "pb+lwpvd+scd")
_DELAYED = ("pb@8", "pb+lwpvd+scd@8", "pb:bfloat16", "pb@8:bfloat16")

# What is held against what, where one process times both.
_RATIOS = (
  ("pb", "sgdm"),
  ("pb+lwpvd+scd", "sgdm"),
  ("pb@8", "pb"),
  ("pb+lwpvd+scd@8", "pb+lwpvd+scd"),
  ("pb:bfloat16", "pb"),
  ("pb@8:bfloat16", "pb:bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Timed:
  """A case, and how it is timed.

  Attributes:
    case: The case.
    rounds: How many processes time it, one after the other.
    at_once: How many processes time it side by side, each on cores of its own.
  """

  case: benchmark_cases.Case
  rounds: int
  at_once: int = 1


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is timed.

  Attributes:
    timed: The cases.
  """

  timed: tuple[Timed, ...]


def _case(
  model, contenders, samples, repeats, threads=1, rounds=2, at_once=1, stages=0
):
  case = benchmark_cases.Case(
    model=model,
    contenders=contenders,
    samples=samples,
    repeats=repeats,
    threads=threads,
    num_stages=stages,
  )
  return Timed(case, rounds, at_once)


def _torch(model, samples):
  return [
    _case(model, ("torch",), samples, 5, threads, at_once=at_once)
    for threads, at_once in ((1, 1), (2, 1), (1, 2))
  ]


SCALES = {
  "smoke": Sizes(
    (
      _case("residual_mlp", ("sgdm", "pb"), 20, 1, rounds=1, stages=4),
      _case("residual_mlp/one_kernel", ("sgdm",), 20, 1, rounds=1, stages=4),
      _case("residual_mlp/replicas", ("2",), 20, 1, 2, rounds=1, stages=4),
    )
  ),
  "cpu": Sizes(
    (
      _case("residual_mlp", (*_ARMS, *_DELAYED), 2000, 15, rounds=5),
      _case("residual_mlp/one_kernel", (*_ARMS, "pb@8"), 2000, 15, rounds=5),
      _case("residual_mlp/replicas", ("1",), 2000, 5, rounds=1),
      _case("residual_mlp/replicas", ("8",), 2000, 5, 2, rounds=1),
      *_torch("residual_mlp", 200),
      _case("resnet20", (*_ARMS, "pb@8"), 40, 15, rounds=5),
      _case("resnet20", ("naive",), 40, 3),
      _case("resnet20/replicas", ("1",), 40, 5, rounds=1),
      _case("resnet20/replicas", ("2",), 40, 5, 2, rounds=1),
      *_torch("resnet20", 30),
      _case("resnet18", ("sgdm", "pb+lwpvd+scd"), 10, 3, 2),
      *_torch("resnet18", 10),
      _case("vgg11", ("sgdm", "pb+lwpvd+scd"), 10, 3, 2),
      *_torch("vgg11", 10),
      _case("resnet110", ("sgdm", "pb+lwpvd+scd"), 20, 9, rounds=3),
    )
  ),
}
SCALES["paper"] = SCALES["cpu"]


def run(sizes: Sizes) -> figure_program.Output:
  """Times all cases, one process at a time.

  Args:
    sizes: What to time.

  Returns:
    A row for each network and contender, and the picture. `ms` of a row are
    the medians of its processes, and `over` says how many times those of
    another contender they are, process by process.
  """
  rows: dict[str, dict[str, Any]] = {}
  for name, case, measured in _measurements(sizes):
    row = rows.setdefault(
      name, {"ms": [], "threads": case.threads, "samples": case.samples}
    )
    row["ms"].append(statistics.median(measured.pop("ms")))
    for key, value in measured.items():
      row[key] = min(value, row.get(key, value))
  for row in rows.values():
    row["ms_median"] = statistics.median(row["ms"])
    row["ms_lowest"], row["ms_highest"] = min(row["ms"]), max(row["ms"])
  _compare(rows)
  return rows, {"milliseconds": _picture(rows)}


def _compare(rows: dict[str, dict[str, Any]]) -> None:
  """Puts ratios within processes into the rows, and prints them."""
  for model in dict.fromkeys(name.split()[0] for name in rows):
    for contender, other in _RATIOS:
      row, reference = (rows.get(f"{model} {c}") for c in (contender, other))
      if row is None or reference is None:
        continue
      ratios = [
        ms / reference_ms
        for ms, reference_ms in zip(row["ms"], reference["ms"], strict=True)
      ]
      found = {
        "median": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
      }
      row.setdefault("over", {})[other] = found
      print(
        f"{model}: {contender} over {other} is {found['median']:.2f}"
        f" ({found['lowest']:.2f} to {found['highest']:.2f},"
        f" {len(ratios)} processes)"
      )


def _measurements(
  sizes: Sizes,
) -> Iterator[tuple[str, benchmark_cases.Case, dict[str, Any]]]:
  """Each contender's measurements in each round."""
  has_torch = importlib.util.find_spec("torch") is not None
  for number in range(max(timed.rounds for timed in sizes.timed)):
    for timed in sizes.timed:
      case = timed.case
      is_torch = "torch" in case.contenders
      if number >= timed.rounds or (is_torch and not has_torch):
        continue
      print(
        f"round {number + 1}: {case.model} {', '.join(case.contenders)}",
        flush=True,
      )
      found = [json.loads(text) for text in _in_processes(timed)]
      for contender in case.contenders:
        name = f"{case.model} {contender}"
        if is_torch:
          name += f", {timed.at_once} x {case.threads} threads"
        slowest = max(
          found, key=lambda f: statistics.median(f[contender]["ms"])
        )
        yield name, case, slowest[contender]


def _in_processes(timed: Timed) -> list[str]:
  """What the processes of a round print, side by side."""
  case = timed.case
  processes = []
  for number in range(timed.at_once):
    own = dataclasses.replace(case, first_core=number * case.threads)
    processes.append(
      subprocess.Popen(
        [
          sys.executable,
          "-m",
          "experiments.benchmark_cases",
          json.dumps(dataclasses.asdict(own)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(case.threads)},
      )
    )
  printed = [process.communicate()[0] for process in processes]
  if failed := [p.returncode for p in processes if p.returncode]:
    raise RuntimeError(f"{case} ended with exit status {failed[0]}.")
  return [text.splitlines()[-1] for text in printed]


def _picture(rows: Mapping[str, Mapping[str, Any]]) -> figures.Figure:
  """Milliseconds a sample of every row, with the range over processes."""
  figure = figures.Figure(
    figsize=(8, 1 + 0.28 * len(rows)), layout="constrained"
  )
  axes = figure.subplots()
  for place, row in enumerate(rows.values()):
    axes.plot([row["ms_lowest"], row["ms_highest"]], [place] * 2, "0.6", lw=3)
    axes.plot(row["ms_median"], place, "o", color="#0072B2", ms=5)
    axes.annotate(
      f"{row['ms_median']:.3g}",
      (row["ms_highest"], place),
      (6, -3),
      textcoords="offset points",
      fontsize=7,
    )
  axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
  axes.margins(x=0.12)
  axes.set_xlabel(
    "milliseconds a sample (all seeds of a row together), batch one:\n"
    "median and range over processes"
  )
  axes.grid(axis="x", alpha=0.25, linewidth=0.6)
  axes.spines[["top", "right"]].set_visible(False)
  return figure


if __name__ == "__main__":
  figure_program.main(SCALES, run)
