"""Who worked when, in a run on devices: as text, table and picture."""

from collections.abc import Mapping
from typing import Any

from matplotlib import colors, patches, ticker
from matplotlib import figure as figures
import numpy as np

_CODES = {"idle": ".", "backward": "B", "forward": "F", "both": "X"}
_COLORS = {
  "idle": "#e8e8e8", "backward": "#f2b27a", "forward": "#8fbce6",
  "both": "#6a994e",
}  # fmt: skip
_MOST_TICKS = 80


def letters(busy: np.ndarray) -> np.ndarray:
  """What each device did at each tick.

  Args:
    busy: `[ticks, devices, 2]`, whether there was a forward and a backward.

  Returns:
    `[devices, ticks]` letters: "F" forward, "B" backward, "X" both, "." none.

  Example:
    >>> print(letters(np.array([[[1, 0]], [[1, 1]], [[0, 0]]])))
    [['F' 'X' '.']]
  """
  return np.array(list(_CODES.values()))[busy @ np.array([2, 1])].T


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The rows of results as text.

  Args:
    rows: By the name of the part.

  Returns:
    A line for each part.
  """
  lines = []
  for name, row in rows.items():
    lines.append(
      f"{name}: {row['ticks']} ticks (timetable"
      f" {row['ticks_of_the_timetable']}), busy {row['utilization']:.1%}"
      f" ({row['utilization_of_the_timetable']:.1%}), balance"
      f" {row['balance_by_operations']:.1%}; loss"
      f" {row['loss_by_quarters'][0]:.3f} to {row['loss_by_quarters'][-1]:.3f},"
      " off the simulator's by"
      f" {row['loss_differs_from_the_simulators_by']:.1e}"
    )
  return "\n".join(lines)


def timelines(rows: Mapping[str, Mapping[str, Any]]) -> figures.Figure:
  """Draws who worked when, the ticks of fill and drain.

  Args:
    rows: By the name of the part; `busy` has a line of letters a device.

  Returns:
    The picture, a panel for each part.
  """
  heights = [len(row["busy"]) for row in rows.values()]
  figure = figures.Figure(
    figsize=(10, 1 + sum(0.55 + 0.22 * height for height in heights)),
    layout="constrained",
  )
  panels = figure.subplots(
    len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
  )
  kinds = list(_CODES)
  for axes, row in zip(panels[:, 0], rows.values(), strict=True):
    lines = np.array([list(line) for line in row["busy"]])
    num_ticks = lines.shape[1]
    shown = np.arange(num_ticks)
    if num_ticks > _MOST_TICKS:
      half = _MOST_TICKS // 2
      shown = np.concatenate([shown[:half], shown[-half:]])
      axes.axvline(half - 0.5, color="black", linestyle=":", linewidth=1.5)
    codes = np.vectorize(list(_CODES.values()).index)(lines[:, shown])
    axes.pcolormesh(
      np.arange(len(shown) + 1) - 0.5,
      np.arange(len(lines) + 1) - 0.5,
      codes,
      cmap=colors.ListedColormap([_COLORS[kind] for kind in kinds]),
      vmin=-0.5,
      vmax=len(kinds) - 0.5,
      edgecolors="white",
      linewidth=0.5,
    )
    axes.invert_yaxis()
    axes.set_ylabel("device")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
    places = np.linspace(0, len(shown) - 1, 9).round().astype(int)
    axes.set_xticks(places, [str(shown[place]) for place in places])
    axes.set_title(
      f"{len(lines)} devices with {_counted(row['stages_of_devices'])} stages:"
      f" {num_ticks} ticks, {row['utilization']:.1%} busy (timetable"
      f" {row['utilization_of_the_timetable']:.1%}), balance of operations"
      f" {row['balance_by_operations']:.0%}",
      fontsize=9,
      loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
  panels[-1, 0].set_xlabel(
    f"tick, of long runs the first and the last {_MOST_TICKS // 2}"
  )
  figure.legend(
    handles=[
      patches.Patch(color=color, label=kind) for kind, color in _COLORS.items()
    ],
    loc="outside lower right",
    ncols=len(kinds),
    fontsize=8,
  )
  return figure


def _counted(sizes: Any) -> str:
  return ", ".join(map(str, sizes))
