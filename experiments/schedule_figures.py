"""What each schedule makes of its workers' time and memory.

Claims shown (Kosson et al., 2003.11666, introduction): fill-and-drain with N
micro-batches an update keeps workers busy for N / (N + 2 (S - 1)) of the time
only, pipelined backpropagation for all of it once it is full, without keeping
old weights; schedules that stash them pay in memory what PB pays in
consistency.

Figures: timetables, worker by time; utilization against micro-batches and
stages; a model of the memory for weights and activations. All follow from the
package's timetables, nothing is trained or timed. A fine-grained tick has room
for a forward and a backward; half of it idles while the pipeline fills.

Command: python -m experiments.schedule_figures --workdir=DIR
A few seconds on a CPU.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from matplotlib import figure as figures
from matplotlib import patches, ticker
import numpy as np

from experiments import figure_program
from pbp_jax import schedules, timetables

_COLORS = {"forward": "#8fbce6", "backward": "#f2b27a", "idle": "#e8e8e8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What is drawn.

  Attributes:
    num_stages: Stages of the timetables.
    num_micro_batches: Micro-batches of the timetables.
    update_interval: Micro-batches an update of their fill-and-drain.
    stages: Numbers of stages over which curves run.
    num_points: Points of the curves over stages.
    micro_batches: Micro-batches an update over which curves run.
    memory_interval: Micro-batches an update of fill-and-drain in the memory
      model.
  """

  num_stages: int = 4
  num_micro_batches: int = 8
  update_interval: int = 4
  stages: Sequence[int] = (4, 34, 78, 169)
  num_points: int = 24
  micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
  memory_interval: int = 32


SCALES = {
  "smoke": Sizes(
    num_stages=3,
    num_micro_batches=4,
    update_interval=2,
    stages=(4, 10),
    num_points=5,
    micro_batches=(1, 2, 4, 8),
  ),
  "cpu": Sizes(),
  "paper": Sizes(),
}

_LABELS = {
  "data_parallel": "no pipeline: $S$ workers with the whole network",
  "fill_drain": "fill-and-drain",
  "pb": "PB",
  "pb_stashed": "PB, weights stashed",
  "1f1b": "1F1B, weights stashed",
}


def cells(table: timetables.Timetable) -> list[tuple[int, int, str, int]]:
  """Lists what the workers do, in units of one pass of one stage.

  A tick of a fine-grained pipeline has room for a forward and a backward; it
  is drawn as two units, the forward first. So the time axes of all schedules
  have one unit.

  Args:
    table: The timetable.

  Returns:
    One (stage, time, "forward" or "backward", micro-batch) a pass.

  Example:
    >>> cells(timetables.fine_grained(num_stages=1, num_micro_batches=1))
    [(0, 0, 'forward', 0), (0, 1, 'backward', 0)]
  """
  unit = table.slots_per_tick
  return [
    (stage, int(ticks[stage, i]) * unit + offset, kind, i)
    for kind, ticks, offset in (
      ("forward", table.forward_tick, 0),
      ("backward", table.backward_tick, unit - 1),
    )
    for stage in range(table.num_stages)
    for i in range(table.num_micro_batches)
  ]


def activations_in_flight(table: timetables.Timetable) -> np.ndarray:
  """Counts the micro-batches a stage holds activations of, at its peak.

  Activations are held from the forward to the end of the backward.

  Args:
    table: The timetable.

  Returns:
    The largest number over all ticks, [S].

  Example:
    >>> print(activations_in_flight(timetables.fine_grained(3, 9)))
    [5 3 1]
  """
  ticks = np.arange(table.num_ticks)[:, None, None]
  is_held = (table.forward_tick <= ticks) & (ticks <= table.backward_tick)
  return is_held.sum(-1).max(0)


def memory(schedule: schedules.Schedule) -> dict[str, int]:
  """Counts what all workers together keep, with equal stages.

  Args:
    schedule: A schedule with a timetable.

  Returns:
    `weights`: versions of a stage's weights, summed over stages;
    `activations`: activations of one micro-batch at one stage, summed
    likewise.
  """
  # The long run: filled, and for fill-and-drain one whole update.
  count = max(2 * schedule.num_stages, schedule.update_interval)
  held = activations_in_flight(schedule.timetable(count))
  return {
    "weights": int(schedule.versions_kept.sum()),
    "activations": int(held.sum()),
  }


def memory_by_stages(
  stages: Sequence[int], interval: int
) -> dict[str, dict[str, list[int]]]:
  """Runs `memory` over numbers of stages, for each schedule.

  For comparison `data_parallel`: S workers, each with the whole network and
  one sample, which keeps S^2 weights and S^2 activations.

  Args:
    stages: Numbers of stages.
    interval: Micro-batches an update of fill-and-drain.

  Returns:
    `weights` and `activations` by schedule, each [len(stages)].
  """
  found: dict[str, dict[str, list[int]]] = {
    name: {"weights": [], "activations": []} for name in _LABELS
  }
  for s in stages:
    pipelined = schedules.pipelined_backprop(s)
    counts = {
      "data_parallel": {"weights": s * s, "activations": s * s},
      "fill_drain": memory(schedules.fill_drain(s, interval)),
      "pb": memory(pipelined),
      "pb_stashed": memory(pipelined.with_weight_stashing()),
      "1f1b": memory(schedules.one_f_one_b(s)),
    }
    for name, kept in counts.items():
      for kind, number in kept.items():
        found[name][kind].append(number)
  return found


def _draw_timetables(
  shown: Mapping[str, schedules.Schedule],
  tables: Mapping[str, timetables.Timetable],
) -> figures.Figure:
  figure = figures.Figure(figsize=(10, 6.2), layout="constrained")
  axes = figure.subplots(len(tables), 1, sharex=True)
  for axis, (name, table) in zip(axes, tables.items(), strict=True):
    num_stages = table.num_stages
    length = table.num_ticks * table.slots_per_tick
    axis.add_patch(
      patches.Rectangle(
        (0, -0.5), length, num_stages, color=_COLORS["idle"], linewidth=0
      )
    )
    for stage, time, kind, i in cells(table):
      axis.add_patch(
        patches.Rectangle(
          (time, stage - 0.5),
          1,
          1,
          facecolor=_COLORS[kind],
          edgecolor="white",
          linewidth=0.8,
        )
      )
      axis.text(time + 0.5, stage, str(i), ha="center", va="center", fontsize=7)
    schedule = shown[name]
    interval = schedule.update_interval
    every = "" if interval == 1 else f", an update every {interval}"
    axis.set(
      ylim=(num_stages - 0.5, -0.5),
      yticks=range(num_stages),
      ylabel="worker (stage)",
    )
    axis.set_title(
      f"{_LABELS[name]}{every}: workers busy for {table.utilization():.0%} of"
      f" this run, {schedule.utilization():.0%} in the long run",
      fontsize=10,
    )
    axis.spines[["top", "right"]].set_visible(False)
  axes[-1].set_xlabel("time (passes of one stage); numbers are micro-batches")
  axes[-1].set_xlim(
    0, max(table.num_ticks * table.slots_per_tick for table in tables.values())
  )
  axes[-1].xaxis.set_major_locator(ticker.MultipleLocator(4))
  figure.legend(
    handles=[patches.Patch(color=c, label=k) for k, c in _COLORS.items()],
    loc="outside lower right",
    ncols=3,
    fontsize=8,
  )
  return figure


def _draw_utilization(
  curves: Mapping[str, Mapping[str, Sequence[float]]],
  stages: Sequence[int],
  sizes: Sizes,
) -> figures.Figure:
  figure = figures.Figure(figsize=(9.5, 3.8), layout="constrained")
  axes = figure.subplots(1, 2, sharey=True)
  for axis, x, letter, kind in (
    (axes[0], sizes.micro_batches, "S", "by_micro_batches"),
    (axes[1], stages, "N", "by_stages"),
  ):
    for number, values in curves[kind].items():
      axis.plot(
        x, values, marker="o", markersize=3, label=f"${letter}={number}$"
      )
    axis.axhline(1, color="black", linestyle="--", label="PB and 1F1B")
    axis.set(xscale="log", ylim=(0, 1.05))
    axis.grid(alpha=0.3)
    axis.yaxis.set_major_formatter(ticker.PercentFormatter(1))
  axes[0].set(
    xlabel="micro-batches an update, $N$",
    ylabel="share of time that workers are busy",
  )
  axes[1].set(xlabel="stages, $S$")
  axes[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.96))
  axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
  figure.suptitle("Utilization of fill-and-drain in the long run")
  return figure


def _draw_memory(
  kept: Mapping[str, Mapping[str, Sequence[int]]],
  stages: Sequence[int],
  interval: int,
) -> figures.Figure:
  # Lines that coincide differ in width.
  styles = {
    "data_parallel": dict(color="0.75", linewidth=7),
    "fill_drain": dict(color="tab:olive", linewidth=4),
    "pb": dict(color="tab:blue", linewidth=2),
    "pb_stashed": dict(color="tab:red", linestyle="--", marker="^"),
    "1f1b": dict(color="tab:green", marker="D"),
  }
  figure = figures.Figure(figsize=(9.5, 4), layout="constrained")
  axes = figure.subplots(1, 2)
  for axis, kind, unit in (
    (axes[0], "weights", "copies of one stage's weights"),
    (axes[1], "activations", "one stage's activations of one micro-batch"),
  ):
    for name, columns in kept.items():
      axis.plot(
        stages,
        columns[kind],
        label=_LABELS[name] + (f", $N={interval}$" * (name == "fill_drain")),
        markersize=4,
        **styles[name],
      )
    axis.set(xlabel="stages, $S$", ylabel=unit, xscale="log", yscale="log")
    axis.set_title(f"{kind.capitalize()} kept by all workers", fontsize=10)
    axis.grid(alpha=0.3)
  figure.legend(
    handles=axes[0].get_lines(), loc="outside lower center", ncols=3, fontsize=8
  )
  return figure


def run(sizes: Sizes) -> figure_program.Output:
  """Computes everything.

  Args:
    sizes: What is drawn.

  Returns:
    A row of numbers for each schedule, and the pictures.
  """
  num_stages, count = sizes.num_stages, sizes.num_micro_batches
  shown = {
    "fill_drain": schedules.fill_drain(num_stages, sizes.update_interval),
    "pb": schedules.pipelined_backprop(num_stages),
    "1f1b": schedules.one_f_one_b(num_stages),
  }
  tables = {name: shown[name].timetable(count) for name in shown}
  stages = np.geomspace(2, max(sizes.stages), sizes.num_points)
  stages = np.unique(stages.round().astype(int)).tolist()
  utilization = {
    "by_micro_batches": {
      str(s): [
        schedules.fill_drain(s, n).utilization() for n in sizes.micro_batches
      ]
      for s in sizes.stages
    },
    "by_stages": {
      str(n): [schedules.fill_drain(s, n).utilization() for s in stages]
      for n in sizes.micro_batches[::3]
    },
  }
  kept = memory_by_stages(stages, sizes.memory_interval)
  pictures = {
    "timetables": _draw_timetables(shown, tables),
    "utilization": _draw_utilization(utilization, stages, sizes),
    "memory": _draw_memory(kept, stages, sizes.memory_interval),
  }
  rows: dict[str, dict[str, Any]] = {
    name: {"memory": {"stages": stages, **columns}}
    for name, columns in kept.items()
  }
  for name, schedule in shown.items():
    rows[name]["utilization_shown"] = tables[name].utilization()
    rows[name]["utilization_long_run"] = schedule.utilization()
  rows["fill_drain"]["utilization"] = {"stages": stages, **utilization}
  return rows, pictures


if __name__ == "__main__":
  figure_program.main(SCALES, run)
