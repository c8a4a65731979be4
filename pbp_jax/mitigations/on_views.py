"""Words for the mitigations that change the weights a pass sees."""

from pbp_jax import transforms
from pbp_jax.mitigations import entry

_KOSSON = "Kosson et al. 2020, arXiv 2003.11666 (form recalled)"


def _prediction(form: str, multiple: int) -> entry.Mitigation:
  times = "" if multiple == 1 else f"{multiple} "
  along = {"velocity": "- lr T v", "weight": "+ T (w - previous w)"}[form]
  is_velocity = form == "velocity"
  return entry.Mitigation(
    role="view",
    make=lambda context: transforms.linear_weight_prediction(
      multiple * context.schedule.delay,
      form,
      context.learning_rate if is_velocity else None,
    ),
    formula=f"forward pass on w {along}, T = {times}D",
    source=_KOSSON,
    numbers=(
      (lambda context: {"horizon": multiple * context.schedule.delay})
      if is_velocity
      else None
    ),
    reads_rate=is_velocity,
  )


MITIGATIONS: dict[str, entry.Mitigation] = {
  "lwpvd": _prediction("velocity", 1),
  "lwpv2d": _prediction("velocity", 2),
  "lwpwd": _prediction("weight", 1),
  "lwpw2d": _prediction("weight", 2),
}
