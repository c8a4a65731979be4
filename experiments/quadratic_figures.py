"""Delay on a quadratic: what it costs and what mitigations give back.

Claims tested (Kosson et al., 2003.11666, section on the convex quadratic):
a delay shrinks the stable region and makes momentum useless; spike compensation
and weight prediction win most of it back; together, or with twice the horizon,
they do more; the best prediction horizon is near twice the delay.

Figures: heat maps of the largest root modulus over rate and momentum; best
half-life against the condition number (delay 1), the delay (condition number
1000) and the prediction horizon; the response to a single gradient.

Expected, best half-lives at condition number 1000 and delay 1: without a delay
10.96 updates; plain 693.5, SC_D 115.1, LWP_D 107.4, SC_2D 43.5, LWP_2D 43.5,
LWPv_D+SC_D 43.5, LWPw_D+SC_D 37.8. They are computed, not sampled: no spread.

Command: python -m experiments.quadratic_figures --workdir=DIR
About a minute of CPU time; with --smoke a quarter of that, to compile.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import time
from typing import Any

import jax
from matplotlib import colors, ticker
from matplotlib import figure as figures
import numpy as np

from experiments import figure_program
from pbp_jax import quadratic

# What figures call a method, and how they draw it.
_LABELS = {
  "no_delay": "no delay",
  "none": "delay, no mitigation",
  "scd": "SC$_D$",
  "lwpd": "LWP$_D$",
  "sc2d": "SC$_{2D}$",
  "lwp2d": "LWP$_{2D}$",
  "lwpvd_scd": "LWP$^v_D$+SC$_D$",
  "lwpwd_scd": "LWP$^w_D$+SC$_D$",
  "nesterov": "Nesterov",
  "error_feedback": "error feedback",
}
_STYLES = {
  "no_delay": dict(color="black", marker="."),
  "none": dict(color="tab:red", marker="o"),
  "scd": dict(color="tab:blue", marker="s"),
  "lwpd": dict(color="tab:green", marker="^"),
  # These three all but coincide: a broad, a middle and a thin line.
  "sc2d": dict(color="tab:cyan", marker="s", linewidth=5, alpha=0.5),
  "lwp2d": dict(color="tab:olive", marker="^", linewidth=2.5),
  "lwpvd_scd": dict(color="tab:purple", marker="D", linewidth=1),
  "lwpwd_scd": dict(color="tab:orange", marker="v"),
  "nesterov": dict(color="tab:brown", marker="x", linestyle="--"),
  "error_feedback": dict(color="tab:pink", marker="+", linestyle=":"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What is computed.

  Attributes:
    methods: Names of methods, "no_delay" and `quadratic.METHOD_NAMES`.
    resolution: Points along each side of a heat map.
    heat_map_delay: Delay of the heat maps, in updates.
    condition_numbers: Condition numbers at delay 1.
    delays: Delays at `condition_number`, in updates.
    condition_number: Condition number where it isn't varied.
    horizon_delays: Delays for which the horizon is varied.
    horizons: Horizons, in units of the delay.
    impulse_momentum: Momentum of the impulse response.
    impulse_delay: Delay of the impulse response, in updates.
  """

  methods: Sequence[str] = tuple(_LABELS)
  resolution: int = 200
  heat_map_delay: int = 1
  condition_numbers: Sequence[float] = (
    1e1, 3e1, 1e2, 3e2, 1e3, 3e3, 1e4, 3e4, 1e5,
  )  # fmt: skip
  delays: Sequence[int] = (0, 1, 2, 3, 4, 6, 8, 12)
  condition_number: float = 1e3
  horizon_delays: Sequence[int] = (1, 2, 4)
  horizons: Sequence[float] = (
    0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 5,
  )  # fmt: skip
  impulse_momentum: float = 0.9
  impulse_delay: int = 8


_SMOKE = Sizes(
  methods=("no_delay", "none", "scd", "lwpvd_scd"),
  resolution=16,
  condition_numbers=(10.0, 100.0),
  delays=(0, 1),
  condition_number=100.0,
  horizon_delays=(1,),
  horizons=(0.0, 1.0, 2.0),
)


SCALES = {"smoke": _SMOKE, "cpu": Sizes(), "paper": Sizes()}

_STABILITY_MOMENTA = (0.0, 0.5, 0.9, 0.99, 0.999)


def heat_map(
  method: quadratic.Method, delay: int, resolution: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Computes the largest root modulus over rate and momentum.

  Args:
    method: The method.
    delay: The gradient's delay, in updates.
    resolution: Points along each side.

  Returns:
    Rates times curvature and momenta, both [resolution], and the moduli,
    [momentum, rate].
  """
  rate = np.geomspace(1e-4, 4.0, resolution)
  momentum = 1 - np.geomspace(1.0, 1e-4, resolution)
  radius = quadratic.spectral_radius(
    method, rate[None], momentum[:, None], delay
  )
  return rate, momentum, np.asarray(radius)


def best_over(
  axis: str, settings: Sequence[tuple[quadratic.Method, float, int]], x: Any
) -> dict[str, list[float]]:
  """Finds the best hyperparameters in each of several settings.

  Args:
    axis: What varies.
    settings: (method, condition number, delay) of each.
    x: Its value in each.

  Returns:
    The values under `axis`, and a list for each field of the optimum.
  """
  optima = [quadratic.best_hyperparameters(*setting) for setting in settings]
  columns = {
    field: [float(getattr(optimum, field)) for optimum in optima]
    for field in quadratic.Optimum._fields
  }
  return {axis: list(x), **columns}


def _method_row(
  name: str, sizes: Sizes
) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """The numbers of one method, and its heat map."""

  def at(delay):
    if name == "no_delay":
      return quadratic.Method(), 0
    return quadratic.named_method(name, delay), delay

  method, delay = at(sizes.heat_map_delay)
  start = time.perf_counter()
  heat = heat_map(method, delay, sizes.resolution)
  seconds = time.perf_counter() - start
  limits = [
    float(quadratic.stability_limit(method, momentum, delay))
    for momentum in _STABILITY_MOMENTA
  ]
  row = {
    "heat_map": {
      "seconds": seconds,
      "stable_share": float((heat[2] < 1).mean()),
      "smallest_radius": float(heat[2].min()),
    },
    "stability_limit": {
      "momentum": list(_STABILITY_MOMENTA),
      "limit": limits,
    },
    "by_condition_number": best_over(
      "condition_number",
      [
        (at(1)[0], condition_number, at(1)[1])
        for condition_number in sizes.condition_numbers
      ],
      sizes.condition_numbers,
    ),
  }
  if name != "no_delay":
    row["by_delay"] = best_over(
      "delay",
      [(at(d)[0], sizes.condition_number, d) for d in sizes.delays],
      sizes.delays,
    )
  return row, heat


def _horizon_rows(sizes: Sizes) -> dict[str, dict[str, list[float]]]:
  """Half-lives over horizons, a row a kind of mitigation and a delay."""
  return {
    f"{kind}, delay {delay}": best_over(
      "horizon_over_delay",
      [
        (
          quadratic.Method(**{field: float(horizon * delay)}),
          sizes.condition_number,
          delay,
        )
        for horizon in sizes.horizons
      ],
      sizes.horizons,
    )
    for delay in sizes.horizon_delays
    for kind, field in (("LWP", "velocity_horizon"), ("SC", "spike_delay"))
  }


def _draw_heat_maps(
  maps: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]], delay: int
) -> figures.Figure:
  figure = figures.Figure(figsize=(12, 5.4), layout="constrained")
  axes = figure.subplots(2, -(-len(maps) // 2), sharex=True, sharey=True)
  for axis, (name, (rate, momentum, radius)) in zip(
    axes.flat, maps.items(), strict=False
  ):
    axis.pcolormesh(
      rate,
      1 - momentum,
      np.ma.masked_where(radius >= 1, 1 - radius),
      norm=colors.LogNorm(1e-4, 1),
      cmap="viridis",
      rasterized=True,
    )
    axis.set_facecolor("0.85")
    axis.set(xscale="log", yscale="log")
    axis.set_title(_LABELS[name], fontsize=10)
  one_minus = lambda x, _: f"{1 - x:.4g}"
  ticks = ticker.FixedLocator(list(10.0 ** -np.arange(5)))
  axes[0, 0].invert_yaxis()
  axes[0, 0].yaxis.set_major_locator(ticks)
  axes[0, 0].yaxis.set_major_formatter(one_minus)
  axes[0, 0].yaxis.set_minor_locator(ticker.NullLocator())
  figure.supxlabel(r"learning rate × curvature, $\eta\lambda$")
  figure.supylabel("momentum $m$")
  bar = figure.colorbar(axes[0, 0].collections[0], ax=axes, extend="min")
  bar.ax.yaxis.set_major_locator(ticks)
  bar.ax.yaxis.set_major_formatter(one_minus)
  bar.ax.invert_yaxis()
  bar.set_label(r"$|r_{max}|$ (grey: unstable)")
  figure.suptitle(f"Largest root modulus at delay $D={delay}$ (first map: 0)")
  return figure


def _new_axis(**settings: Any):
  """A figure with one axis for half-lives."""
  figure = figures.Figure(figsize=(6, 4.4), layout="constrained")
  axis = figure.subplots()
  axis.set(ylabel="best half-life of the error (updates)", yscale="log")
  axis.set(**settings)
  axis.grid(alpha=0.3)
  return figure, axis


def _draw_half_lives(
  rows: Mapping[str, Mapping[str, Any]],
  over: str,
  *,
  x_label: str,
  x_scale: str,
  title: str,
) -> figures.Figure:
  figure, axis = _new_axis(xlabel=x_label, xscale=x_scale, title=title)
  for name, row in rows.items():
    if f"by_{over}" in row:
      curve = row[f"by_{over}"]
      axis.plot(
        curve[over],
        curve["half_life"],
        label=_LABELS[name],
        markersize=4,
        **_STYLES[name],
      )
  axis.legend(fontsize=8)
  return figure


def _draw_horizons(
  curves: Mapping[str, Mapping[str, Sequence[float]]], sizes: Sizes
) -> figures.Figure:
  figure, axis = _new_axis(
    xlabel="horizon over delay, $T/D$",
    title=rf"Horizon, condition number $\kappa={sizes.condition_number:g}$",
  )
  for i, (name, curve) in enumerate(curves.items()):
    axis.plot(
      curve["horizon_over_delay"],
      curve["half_life"],
      label=name.replace("delay", "$D$ ="),
      color=f"C{i // 2}",
      linestyle=("-", "--")[i % 2],
      marker="^s"[i % 2],
      markersize=4,
    )
  axis.axvline(2, color="0.5", linewidth=1)
  axis.annotate(
    "$T=2D$", (2, 1), xycoords=("data", "axes fraction"), color="0.4",
    xytext=(3, -12), textcoords="offset points",
  )  # fmt: skip
  axis.legend(fontsize=8)
  return figure


def _draw_impulse(sizes: Sizes) -> figures.Figure:
  momentum, delay = sizes.impulse_momentum, sizes.impulse_delay
  num_steps = delay + 32
  responses = (
    ("no delay", quadratic.Method(), 0, "no_delay"),
    (f"delay {delay}", quadratic.Method(), delay, "none"),
    (
      f"delay {delay}, SC$_D$",
      quadratic.named_method("scd", delay),
      delay,
      "scd",
    ),
  )
  figure = figures.Figure(figsize=(9, 3.6), layout="constrained")
  axes = figure.subplots(1, 2)
  for label, method, d, style in responses:
    response = quadratic.impulse_response(method, momentum, d, num_steps)
    for axis, values in zip(axes, (response, np.cumsum(response)), strict=True):
      axis.plot(values, label=label, markersize=4, **_STYLES[style])
  axes[0].set(ylabel="update / learning rate")
  axes[1].set(ylabel="sum of updates / learning rate")
  axes[1].axhline(1 / (1 - momentum), color="0.5", linewidth=1, linestyle=":")
  for axis in axes:
    axis.set(xlabel="step (updates)")
    axis.grid(alpha=0.3)
  axes[0].legend(fontsize=8)
  figure.suptitle(
    f"What one gradient of size 1, made at step 0, does; momentum {momentum:g}"
  )
  return figure


def run(sizes: Sizes) -> figure_program.Output:
  """Computes everything.

  Args:
    sizes: What is computed.

  Returns:
    A row of numbers for each method and each curve over horizons, and the
    pictures.
  """
  with jax.enable_x64(True):
    found = {name: _method_row(name, sizes) for name in sizes.methods}
    horizons = _horizon_rows(sizes)
    impulse = _draw_impulse(sizes)
  rows = {name: row for name, (row, _) in found.items()}
  pictures = {
    "heat_maps": _draw_heat_maps(
      {name: heat for name, (_, heat) in found.items()}, sizes.heat_map_delay
    ),
    "half_life_by_condition_number": _draw_half_lives(
      rows,
      "condition_number",
      x_label=r"condition number $\kappa$",
      x_scale="log",
      title="Best half-life, delay $D=1$",
    ),
    "half_life_by_delay": _draw_half_lives(
      rows,
      "delay",
      x_label="delay $D$ (updates)",
      x_scale="linear",
      title=rf"Best half-life, $\kappa={sizes.condition_number:g}$",
    ),
    "half_life_by_horizon": _draw_horizons(horizons, sizes),
    "impulse_response": impulse,
  }
  return {**rows, **horizons}, pictures


if __name__ == "__main__":
  figure_program.main(SCALES, run)
