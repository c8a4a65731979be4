"""Pictures of training runs. Matplotlib is imported when a picture is made."""

from collections.abc import Mapping, Sequence
import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
  from matplotlib import axes as mpl_axes
  from matplotlib import figure as mpl_figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = (
  "#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00",
)  # fmt: skip
_DASHES = ("-", "--", ":")


def training_curves(
  curves: Mapping[str, Mapping[str, Any]],
  title: str = "",
  chance_loss: float | None = None,
) -> "mpl_figure.Figure":
  """Draws loss and accuracy against samples seen, one line an arm.

  A line is the median over seeds and its band reaches from the lowest to the
  highest seed; a seed without a value (diverged) is left out of both from
  there on.

  Args:
    curves: For each arm `samples` `[points]` and `loss` `[seeds, points]`, and
      `accuracy_samples` and `accuracy` likewise; None or NaN where a seed has
      no value. Accuracies are shares in [0, 1].
    title: The picture's title.
    chance_loss: A loss to mark by a dotted line, such as that of a guess.

  Returns:
    The figure; save it by `figure.savefig(path)`.

  Raises:
    ValueError: If there are no curves, or a curve's shapes do not fit.

  Example:
    >>> from pbp_jax import plotting
    >>> curve = {"samples": [10, 20], "loss": [[2.0, 1.0], [2.5, None]],
    ...          "accuracy_samples": [20], "accuracy": [[0.5], [None]]}
    >>> figure = plotting.training_curves({"pb": curve}, title="digits")
    >>> [axis.get_ylabel() for axis in figure.axes]
    ['training loss', 'test accuracy (%)']
  """
  if not curves:
    raise ValueError("curves must hold at least one arm, got none.")
  from matplotlib import figure as mpl_figure

  figure = mpl_figure.Figure(figsize=(10, 4.2), layout="constrained", dpi=150)
  loss_axes, accuracy_axes = figure.subplots(1, 2)
  for i, (name, curve) in enumerate(curves.items()):
    style = {**_style(i), "label": name}
    _draw(loss_axes, name, curve["samples"], curve["loss"], style)
    percent = _as_array(curve["accuracy"]) * 100
    _draw(accuracy_axes, name, curve["accuracy_samples"], percent, style)
  _label_losses(loss_axes, chance_loss)
  loss_axes.set_ylabel("training loss")
  accuracy_axes.set_ylabel("test accuracy (%)")
  for axes in (loss_axes, accuracy_axes):
    axes.set_xlabel("samples seen")
    axes.set_xlim(left=0)
    _tidy(axes)
  if len(curves) <= len(_COLORS):
    accuracy_axes.legend(loc="lower right", frameon=False)
  else:
    handles = loss_axes.get_legend_handles_labels()
    rows = math.ceil(len(curves) / 6)
    figure.set_figheight(4.2 + 0.25 * rows)
    figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
  if title:
    figure.suptitle(title)
  return figure


def arms_chart(
  ends: Mapping[str, Mapping[str, Any]],
  title: str = "",
) -> "mpl_figure.Figure":
  """Draws how arms ended, one row an arm, the lowest median loss on top.

  Each seed is a dot and the median a bar; an arm with seeds that diverged says
  how many, and stands below the others.

  Args:
    ends: For each arm `loss` and `accuracy` `[seeds]`; None or NaN where a seed
      has no value. Accuracies are shares in [0, 1].
    title: The picture's title.

  Returns:
    The figure.

  Raises:
    ValueError: If there are no arms.

  Example:
    >>> from pbp_jax import plotting
    >>> ends = {"pb": {"loss": [0.3, 0.2], "accuracy": [0.8, 0.9]},
    ...         "sgdm": {"loss": [0.1, 0.1], "accuracy": [0.9, 0.9]}}
    >>> figure = plotting.arms_chart(ends)
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['sgdm', 'pb']
  """
  if not ends:
    raise ValueError("ends must hold at least one arm, got none.")
  from matplotlib import figure as mpl_figure

  loss = {name: _as_array(end["loss"]) for name, end in ends.items()}
  lost = {name: int((~np.isfinite(x)).sum()) for name, x in loss.items()}

  def rank(name):
    finite = loss[name][np.isfinite(loss[name])]
    return lost[name], np.median(finite) if len(finite) else math.inf

  order = sorted(ends, key=rank)
  figure = mpl_figure.Figure(
    figsize=(10, 1.4 + 0.24 * len(ends)), layout="constrained", dpi=150
  )
  loss_axes, accuracy_axes = figure.subplots(1, 2, sharey=True)
  for axes, key, factor in (
    (loss_axes, "loss", 1),
    (accuracy_axes, "accuracy", 100),
  ):
    for row, name in enumerate(order):
      values = factor * _as_array(ends[name][key])
      values = values[np.isfinite(values)]
      row_of = np.full(len(values), row)
      axes.plot(values, row_of, "o", ms=3.5, alpha=0.6, color=_COLORS[2])
      if len(values):
        axes.plot(np.median(values), row, "k|", ms=10, mew=1.6)
    _tidy(axes)
  diverged = lambda n: f" ({n} diverged)" if n else ""
  labels = [name + diverged(lost[name]) for name in order]
  loss_axes.set_yticks(range(len(order)), labels)
  loss_axes.invert_yaxis()
  loss_axes.set_xscale("log")
  loss_axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
  loss_axes.set_xlabel("final training loss")
  accuracy_axes.set_xlabel("final test accuracy (%)")
  if title:
    figure.suptitle(title)
  return figure


def _style(i: int) -> dict[str, str]:
  """How the line of the i-th arm looks, unlike those before it."""
  return {
    "color": _COLORS[i % len(_COLORS)],
    "linestyle": _DASHES[i // len(_COLORS) % len(_DASHES)],
  }


def _tidy(
  axes: "mpl_axes.Axes", grid: Literal["both", "x", "y"] = "both"
) -> None:
  axes.grid(alpha=0.25, linewidth=0.6, axis=grid)
  axes.spines[["top", "right"]].set_visible(False)


def _label_losses(axes: "mpl_axes.Axes", chance_loss: float | None) -> None:
  """A logarithmic scale, and the loss of a guess as a dotted line."""
  if chance_loss is not None:
    axes.axhline(chance_loss, color="0.6", linestyle=":", zorder=0)
  axes.set_yscale("log")
  axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
  axes.yaxis.set_minor_formatter(
    lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else ""
  )


def _as_array(values: Sequence[Sequence[float | None]]) -> np.ndarray:
  """`[seeds, points]` floats, NaN for None."""
  return np.array(values, dtype=float)


def _draw(
  axes: "mpl_axes.Axes",
  name: str,
  samples: Sequence[int],
  values: Any,
  style: Mapping[str, Any],
) -> None:
  """One arm's line and band."""
  values = _as_array(values)
  if values.ndim != 2 or values.shape[1] != len(samples):
    raise ValueError(
      f"curves[{name!r}] must have values [seeds, {len(samples)}], one for"
      f" each place on the samples axis, got shape {values.shape}."
    )
  known = np.isfinite(values).any(axis=0)
  places = np.asarray(samples)[known]
  values = values[:, known]
  axes.plot(places, np.nanmedian(values, axis=0), linewidth=1.6, **style)
  axes.fill_between(
    places,
    np.nanmin(values, axis=0, initial=math.inf),
    np.nanmax(values, axis=0, initial=-math.inf),
    color=style["color"],
    alpha=0.15,
    linewidth=0,
  )


def settings_chart(
  lines: Mapping[str, Mapping[Any, Mapping[str, Any]]],
  x_label: str = "",
  title: str = "",
  chance_loss: float | None = None,
) -> "mpl_figure.Figure":
  """Draws how runs ended against their settings, one line an arm.

  Each seed is a dot; the line goes through the medians over seeds. Settings
  stand at even distances, whatever they are. A seed without a value (diverged)
  is left out; `2×` above a setting says that two are.

  Args:
    lines: For each line, by setting, `loss` and `accuracy` `[seeds]`; None or
      NaN where a seed has no value. Accuracies are shares in [0, 1].
    x_label: What the settings are.
    title: The picture's title.
    chance_loss: A loss to mark by a dotted line, such as that of a guess.

  Returns:
    The figure.

  Raises:
    ValueError: If there are no lines.

  Example:
    >>> from pbp_jax import plotting
    >>> end = {"loss": [0.1, None], "accuracy": [0.9, None]}
    >>> figure = plotting.settings_chart({"pb": {1: end, 2: end}}, "delay")
    >>> [axis.get_xlabel() for axis in figure.axes]
    ['delay', 'delay']
  """
  if not lines:
    raise ValueError("lines must hold at least one line, got none.")
  from matplotlib import figure as mpl_figure

  figure = mpl_figure.Figure(figsize=(10, 4.6), layout="constrained", dpi=150)
  loss_axes, accuracy_axes = figure.subplots(1, 2)
  settings = list(dict.fromkeys(x for ends in lines.values() for x in ends))
  for i, (name, ends) in enumerate(lines.items()):
    style = _style(i)
    shift = 0.5 * ((i + 0.5) / len(lines) - 0.5)
    places = [settings.index(x) + shift for x in ends]
    for axes, key, factor in (
      (loss_axes, "loss", 1),
      (accuracy_axes, "accuracy", 100),
    ):
      values = factor * _as_array([end[key] for end in ends.values()])
      _draw_ends(axes, name, places, values, style)
  _label_losses(loss_axes, chance_loss)
  loss_axes.set_ylabel("final training loss")
  accuracy_axes.set_ylabel("final test accuracy (%)")
  for axes in (loss_axes, accuracy_axes):
    axes.set_xlabel(x_label)
    axes.set_xticks(range(len(settings)), [_as_text(x) for x in settings])
    _tidy(axes, grid="y")
  figure.legend(
    *loss_axes.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=min(len(lines), 5),
    frameon=False,
  )
  if title:
    figure.suptitle(title, fontsize=10)
  return figure


def _draw_ends(
  axes: "mpl_axes.Axes",
  name: str,
  places: Sequence[float],
  values: np.ndarray,
  style: Mapping[str, Any],
) -> None:
  """One line of `settings_chart`; values are `[settings, seeds]`."""
  values = np.where(np.isfinite(values), values, np.nan)
  missing = np.isnan(values).sum(axis=1)
  known = missing < values.shape[1]
  medians = np.full(len(places), np.nan)
  medians[known] = np.nanmedian(values[known], axis=1)
  axes.plot(places, medians, linewidth=1.4, label=name, **style)
  axes.plot(
    np.repeat(places, values.shape[1]),
    values.ravel(),
    linestyle="none",
    marker="o",
    markersize=2.5,
    alpha=0.6,
    color=style["color"],
  )
  for place, count in zip(places, missing, strict=True):
    if count:
      axes.text(
        place,
        1.0,
        f"{count}×",
        transform=axes.get_xaxis_transform(),
        color=style["color"],
        fontsize=7,
        ha="center",
        va="bottom",
        rotation=90,
      )


def _as_text(setting: Any) -> str:
  """A setting as a tick's label, of short lines that don't meet others."""
  if not isinstance(setting, str):
    return f"{setting:g}"
  return textwrap.fill(setting, width=8, break_long_words=False)
