"""Words for the mitigations that change gradients, directions or updates."""

import dataclasses

import optax

from pbp_jax import transforms
from pbp_jax.mitigations import entry

_KOSSON = "Kosson et al. 2020, arXiv 2003.11666 (form recalled)"
_PIPEMARE = "Yang et al. 2021, arXiv 1910.05124 (authors' code)"
_DC_ASGD = "Zheng et al. 2017, arXiv 1609.08326 (authors' code)"

# Of the arms; the links take any other.
SHRINKING_FACTOR = 0.8
MAX_STAGE_NORM = 1.0
ANNEALED_SHARE = 0.25


def _spike(multiple: int) -> entry.Mitigation:
  def numbers(context):
    # In float64 on the host (if known), as the arm on its own has them.
    a, b = transforms.spike_coefficients(
      context.momentum, multiple * context.schedule.delay
    )
    return {"a": a, "b": b}

  times = "" if multiple == 1 else f"{multiple} "
  return entry.Mitigation(
    role="momentum",
    make=lambda context: transforms.spike_compensation(
      context.momentum, multiple * context.schedule.delay
    ),
    formula=f"v = m v + g; update m^T v + (1 - m^T) / (1 - m) g, T = {times}D",
    source=_KOSSON,
    numbers=numbers,
  )


def _annealed(context: entry.Context) -> optax.GradientTransformation:
  if context.num_updates is None:
    raise ValueError(
      "num_updates must be given for the word 't1', which anneals the rates"
      f" over {ANNEALED_SHARE:g} of the run; got None."
    )
  return transforms.scale_by_staleness(
    context.schedule.delay, max(1.0, ANNEALED_SHARE * context.num_updates)
  )


def _with_stage_momenta(context: entry.Context) -> entry.Context:
  return dataclasses.replace(
    context,
    momentum=transforms.stage_momenta(
      context.momentum, context.schedule.num_stages
    ),
  )


MITIGATIONS: dict[str, entry.Mitigation] = {
  "shrink": entry.Mitigation(
    role="shrinking",
    make=lambda context: transforms.shrink_gradients(SHRINKING_FACTOR),
    formula=f"beta^(S - 1 - s) g, beta = {SHRINKING_FACTOR:g}",
    source="Zhuang et al. 2019, arXiv 1906.09108 (authors' code)",
  ),
  "dc": entry.Mitigation(
    role="correction",
    make=lambda context: transforms.delay_compensation(),
    formula="g + lambda g^2 (w - forward w), lambda = .04",
    source=_DC_ASGD,
  ),
  "dca": entry.Mitigation(
    role="correction",
    make=lambda context: transforms.adaptive_delay_compensation(),
    formula="g + 2 g^2 (w - forward w) / sqrt(mean g^2 + 1e-7)",
    source=_DC_ASGD,
  ),
  "clip": entry.Mitigation(
    role="clipping",
    make=lambda context: transforms.clip_by_stage_norm(MAX_STAGE_NORM),
    formula=f"g min(1, c / |g of the stage|), c = {MAX_STAGE_NORM:g}",
    source="folklore; by stage, since no worker has the global norm",
  ),
  "gap": entry.Mitigation(
    role="damping",
    make=lambda context: transforms.gap_aware(
      context.momentum, context.learning_rate
    ),
    formula="g / (1 + |w - forward w| / usual step), decay divided with it",
    source="Barkai et al. 2019, arXiv 1909.10802 (authors' code)",
    reads_rate=True,
  ),
  "scd": _spike(1),
  "sc2d": _spike(2),
  "staleness": entry.Mitigation(
    role="rate",
    make=lambda context: transforms.scale_by_staleness(context.schedule.delay),
    formula="rate lr / max(D, 1)",
    source="Zhang et al. 2015, arXiv 1511.05950 (recalled)",
  ),
  "t1": entry.Mitigation(
    role="rate",
    make=_annealed,
    formula="rate lr / max(D, 1)^(1 - min(k / K, 1)) in update k,"
    f" K = {ANNEALED_SHARE:g} of the run",
    source=_PIPEMARE,
  ),
  "stagewise": entry.Mitigation(
    role="rate",
    make=lambda context: transforms.scale_by_stage(
      transforms.stage_rate_factors(context.schedule.num_stages)
    ),
    formula="rate lr (.25 + .75 s / S), momentum 1 - (1 - m) (.1 + .9 s / S)",
    source="Graphcore's public examples (authors' code)",
    adapt=_with_stage_momenta,
  ),
  "ef": entry.Mitigation(
    role="feedback",
    make=lambda context: transforms.error_feedback(),
    formula="w + u + (u - previous u)",
    source="arXiv 2606.30634 (abstract)",
  ),
}
