"""What PipeOptim and XPipe share: prediction along the last direction.

Both see the weights as they will be if the next updates go where the last one
went. They differ in how far each pass looks ahead.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import arithmetic, per_stage, scalars, views


class DirectionPredictionState(NamedTuple):
  """State of `pipeoptim` and `xpipe`.

  Attributes:
    count: Updates done, int32.
    learning_rate: The rate of the next update, a scalar.
    forward_horizon: As given, in arrays.
    backward_horizon: Likewise; None if the backward pass sees the raw weights.
    direction: The last direction, before its rate, like the parameters.
  """

  count: jax.Array
  learning_rate: jax.Array
  forward_horizon: Any
  backward_horizon: Any
  direction: optax.Updates

  def predict_view(self, params, enclosing, which):
    """`w - lr T direction`; see `views.Prediction`."""
    del enclosing
    horizon = (
      self.forward_horizon if which == "forward" else self.backward_horizon
    )
    return views.map_covered(
      lambda w, horizon, direction: arithmetic.linear_combination(
        (1, w), (-self.learning_rate * horizon, direction)
      ),
      params,
      scalars.spread(horizon, params, "horizon"),
      self.direction,
    )


def predict_along_direction(
  forward_horizon: per_stage.PerStage,
  backward_horizon: per_stage.PerStage | None,
  learning_rate: ArrayLike | optax.Schedule,
) -> optax.GradientTransformation:
  """Makes the link; its place is directly before the learning rate.

  Args:
    forward_horizon: Updates to look ahead in the forward pass, real >= 0.
    backward_horizon: Likewise in the backward pass; None for raw weights.
    learning_rate: The rate that follows in the chain, a number or a schedule.

  Returns:
    A transformation that passes updates on unchanged.

  Raises:
    ValueError: If a number is negative or, at `init`, does not fit.
  """
  per_stage.check_numbers(forward_horizon, "forward_horizon")
  if backward_horizon is not None:
    per_stage.check_numbers(backward_horizon, "backward_horizon")
  scalars.check_rate(learning_rate)

  def make_state(count, direction):
    return DirectionPredictionState(
      count=count,
      learning_rate=scalars.rate_at(learning_rate, count),
      forward_horizon=scalars.as_given(
        forward_horizon, direction, "forward_horizon"
      ),
      backward_horizon=None
      if backward_horizon is None
      else scalars.as_given(backward_horizon, direction, "backward_horizon"),
      direction=direction,
    )

  def init_fn(params):
    zeros = optax.tree.zeros_like(params)
    return make_state(jnp.zeros([], jnp.int32), zeros)

  def update_fn(updates, state, params=None):
    del params
    return updates, make_state(optax.safe_increment(state.count), updates)

  return optax.GradientTransformation(init_fn, update_fn)
