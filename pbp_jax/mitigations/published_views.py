"""Words for published methods that change the weights a pass sees."""

import numpy as np
import optax

from pbp_jax import schedules, transforms
from pbp_jax.mitigations import entry


def _updates_to_leave(schedule: schedules.Schedule) -> np.ndarray:
  """Updates from each stage's backward pass to that of stage 0, `[S]`.

  A forward and a backward pass of a stage take as long as each other, so it is
  half the difference of delays: s in pipelined backpropagation, ⌊s/2⌋ in 1F1B.
  """
  delay = np.asarray(schedule.micro_batch_delay)
  return np.maximum(0, (delay[0] - delay) // 2) / schedule.update_interval


def _spectrain(context: entry.Context) -> optax.GradientTransformation:
  schedule = context.schedule
  return transforms.spectrain(
    schedule.delay, context.learning_rate, _updates_to_leave(schedule)
  )


def _msnag(context: entry.Context) -> optax.GradientTransformation:
  horizon = context.schedule.delay
  if callable(context.learning_rate):
    horizon = np.rint(horizon).astype(int)
  return transforms.msnag(horizon, context.momentum, context.learning_rate)


def _xpipe(context: entry.Context) -> optax.GradientTransformation:
  forward, backward = transforms.xpipe_horizons(
    context.schedule.num_stages, context.schedule.update_interval
  )
  return transforms.xpipe(forward, backward, context.learning_rate)


def _nesterov(context: entry.Context) -> optax.GradientTransformation:
  rate, kept = context.learning_rate, 1 - context.momentum
  return transforms.asynchronous_nesterov(
    (lambda count: rate(count) / kept) if callable(rate) else rate / kept,
    context.momentum,
  )


MITIGATIONS: dict[str, entry.Mitigation] = {
  "t2": entry.Mitigation(
    role="view",
    make=lambda context: transforms.discrepancy_correction(
      context.schedule.delay
    ),
    formula="backward pass on w - D d, d the mean update, decay e^(-2 / D)",
    source="Yang et al. 2021, arXiv 1910.05124 (recalled)",
    only_backward=True,
  ),
  "rebuild": entry.Mitigation(
    role="view",
    make=lambda context: transforms.reconstructed_weights(
      context.schedule.delay
    ),
    formula="backward pass on w - D d, d the mean update, decay D / (D + 1)",
    source="Unnikrishnan and Parhi 2025, arXiv 2512.08160 (recalled)",
    only_backward=True,
  ),
  "spectrain": entry.Mitigation(
    role="view",
    make=_spectrain,
    formula="forward pass on w - lr (D + B) v, backward on w - lr B v, B"
    " updates until the micro-batch leaves",
    source="Chen et al. 2018, arXiv 1809.02839 (authors' code)",
    reads_rate=True,
  ),
  "msnag": entry.Mitigation(
    role="view",
    make=_msnag,
    formula="forward pass on w - lr (m + ... + m^D) v",
    source="Eliad et al. 2021, FTPipe, USENIX ATC (authors' code)",
    reads_rate=True,
  ),
  "pipeoptim": entry.Mitigation(
    role="direction view",
    make=lambda context: transforms.pipeoptim(
      context.schedule.delay, context.learning_rate
    ),
    formula="forward pass on w - lr D (last direction)",
    source="Guan et al. 2023, arXiv 2312.00839 (authors' code)",
    replaces=("view",),
  ),
  "xpipe": entry.Mitigation(
    role="direction view",
    make=_xpipe,
    formula="passes on w - lr T (last direction), T = round((S + M -"
    " floor(s/2) - 2) / M) and round((M + floor(s/2) - 1) / M)",
    source="Guan et al. 2019, arXiv 1911.04610 (abstract; code of a port)",
    replaces=("view",),
  ),
  "nesterov": entry.Mitigation(
    role="learning rate",
    make=_nesterov,
    formula="passes on w + d, d = m (w - previous w); update d - lr g",
    source="Ajanthan et al. 2025, arXiv 2505.01099 (authors' code)",
    replaces=("momentum", "rate", "feedback", "view"),
  ),
}
