"""What PipeMare and LayerPipe2 share: past weights from an average update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from pbp_jax.transforms import arithmetic, per_stage, scalars, views


class PastWeightsState(NamedTuple):
  """State of `discrepancy_correction` and `reconstructed_weights`.

  Attributes:
    delay: As given, in arrays.
    average: The moving average of the updates, like the parameters.
  """

  delay: Any
  average: optax.Updates

  def predict_view(self, params, enclosing, which):
    """`w - D average` on the backward pass; see `views.Prediction`."""
    del enclosing
    if which == "forward":
      return params
    return views.map_covered(
      lambda w, delay, average: arithmetic.linear_combination(
        (1, w), (-delay, average)
      ),
      params,
      scalars.spread(self.delay, params, "delay"),
      self.average,
    )


def go_back(
  delay: per_stage.PerStage, decay: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
  """Makes the link; it has to be the last one.

  Args:
    delay: D, any real >= 0, in updates.
    decay: Gives the decay of the average, from a leaf's delay.

  Returns:
    A transformation that passes updates on unchanged.
  """
  per_stage.check_numbers(delay, "delay")

  def init_fn(params):
    return PastWeightsState(
      scalars.as_given(delay, params, "delay"), optax.tree.zeros_like(params)
    )

  def update_fn(updates, state, params=None):
    del params
    delays = scalars.per_leaf(delay, updates, "delay")

    def average(update, last, delay):
      keep = decay(delay)
      return arithmetic.linear_combination((1 - keep, update), (keep, last))

    averages = jax.tree.map(average, updates, state.average, delays)
    kept = scalars.as_given(delay, updates, "delay")
    return updates, PastWeightsState(kept, averages)

  return optax.GradientTransformation(init_fn, update_fn)
