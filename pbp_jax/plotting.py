"""Pictures of training runs. Matplotlib is imported when a picture is made."""

from collections.abc import Mapping, Sequence
import math
from typing import TYPE_CHECKING, Any

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
    style = {
      "color": _COLORS[i % len(_COLORS)],
      "linestyle": _DASHES[i // len(_COLORS) % len(_DASHES)],
      "label": name,
    }
    _draw(loss_axes, name, curve["samples"], curve["loss"], style)
    percent = _as_array(curve["accuracy"]) * 100
    _draw(accuracy_axes, name, curve["accuracy_samples"], percent, style)
  loss_axes.set_yscale("log")
  loss_axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
  loss_axes.yaxis.set_minor_formatter(
    lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else ""
  )
  loss_axes.set_ylabel("training loss")
  accuracy_axes.set_ylabel("test accuracy (%)")
  if chance_loss is not None:
    loss_axes.axhline(chance_loss, color="0.6", linestyle=":", zorder=0)
  for axes in (loss_axes, accuracy_axes):
    axes.set_xlabel("samples seen")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
  accuracy_axes.legend(loc="lower right", frameon=False)
  if title:
    figure.suptitle(title)
  return figure


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
