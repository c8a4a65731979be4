"""Words for the mitigations that change gradients, directions or updates."""

from pbp_jax import transforms
from pbp_jax.mitigations import entry

_KOSSON = "Kosson et al. 2020, arXiv 2003.11666 (form recalled)"


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


MITIGATIONS: dict[str, entry.Mitigation] = {
  "scd": _spike(1),
  "sc2d": _spike(2),
}
