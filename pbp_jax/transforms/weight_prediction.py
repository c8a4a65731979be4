"""Linear weight prediction: forward passes on weights of the future."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import arithmetic, per_stage, scalars, views

FORMS = ("velocity", "weight")


class VelocityPredictionState(NamedTuple):
  """State of `linear_weight_prediction(form="velocity")`.

  Attributes:
    count: Updates done, int32.
    learning_rate: The rate of the next update, a scalar.
    horizon: As given, in arrays.
  """

  count: jax.Array
  learning_rate: jax.Array
  horizon: Any

  def predict_view(self, params, enclosing, which):
    """`w - lr T v` on the forward pass; see `views.Prediction`."""
    if which == "backward":
      return params
    return views.map_covered(
      lambda w, horizon, v: arithmetic.linear_combination(
        (1, w), (-self.learning_rate * horizon, v)
      ),
      params,
      scalars.spread(self.horizon, params, "horizon"),
      views.find_momentum(
        enclosing,
        "The velocity form of weight prediction",
        'form="weight", which works after any optimizer',
      ),
    )


class WeightPredictionState(NamedTuple):
  """State of `linear_weight_prediction(form="weight")`.

  Attributes:
    horizon: As given, in arrays.
    last_update: The last update, like the parameters.
  """

  horizon: Any
  last_update: optax.Updates

  def predict_view(self, params, enclosing, which):
    """`w + T u` on the forward pass; see `views.Prediction`."""
    del enclosing
    if which == "backward":
      return params
    return views.map_covered(
      lambda w, horizon, u: arithmetic.linear_combination((1, w), (horizon, u)),
      params,
      scalars.spread(self.horizon, params, "horizon"),
      self.last_update,
    )


def linear_weight_prediction(
  horizon: per_stage.PerStage,
  form: str = "velocity",
  learning_rate: ArrayLike | optax.Schedule | None = None,
) -> optax.GradientTransformation:
  """Lets forward passes see the weights T updates ahead, linearly predicted.

  The updates pass unchanged; `predict_params(opt_state, params)` gives the
  predicted weights, on which `Simulator`, or your own loop, runs the forward
  pass. The backward pass sees the raw weights.

  - velocity form, LWP^v: `ŵ = wₜ - lr T vₜ`, with the momentum buffer v that
    is in the same chain (`optax.trace`, `spike_compensation`: the one field
    `trace` of the innermost enclosing state) and lr the next update's rate.
  - weight form, LWP^w: `ŵ = wₜ + T (wₜ - wₜ₋₁)`, with the last update kept in
    the state. It works after any optimizer, and has to be the last link: it
    takes for an update whatever passes through it.

  The two are equal for SGD with momentum at a constant rate, and differ with
  spike compensation, rate schedules, weight decay and adaptive optimizers.

  Args:
    horizon: T, any real >= 0, in updates: `schedule.delay` for LWP_D and twice
      that for LWP_2D. A scalar, one value a stage, or a pytree prefix of the
      parameters; may be traced.
    form: "velocity" or "weight".
    learning_rate: The rate that the chain applies, a number (may be traced) or
      an optax schedule, the same as the chain's; needed by the velocity form
      only. Injected by `optax.inject_hyperparams`, it is the rate of the last
      update, since the next one is not known yet.

  Returns:
    A transformation with a `VelocityPredictionState` or a
    `WeightPredictionState`.

  Raises:
    ValueError: If a horizon is negative or, at `init`, does not fit the
      parameters; if `form` is unknown; if the velocity form has no rate, or
      the weight form has one.

  References:
    Kosson et al., Pipelined Backpropagation at Scale, arXiv 2003.11666. The
    form is recalled, not re-read at the source.

  Example:
    See `predict_params`.
  """
  per_stage.check_numbers(horizon, "horizon")
  if form not in FORMS:
    raise ValueError(f"form must be one of {FORMS}, got {form!r}.")
  if (form == "velocity") != (learning_rate is not None):
    raise ValueError(
      'learning_rate must be given with form="velocity", which predicts along'
      " the momentum buffer, and only then; got form="
      f"{form!r}, learning_rate={learning_rate!r}."
    )
  if learning_rate is not None:
    scalars.check_rate(learning_rate)

  def horizons(params):
    return scalars.as_given(horizon, params, "horizon")

  def velocity_state(count, tree):
    assert learning_rate is not None
    rate = scalars.rate_at(learning_rate, count)
    return VelocityPredictionState(count, rate, horizons(tree))

  def init_velocity(params):
    return velocity_state(jnp.zeros([], jnp.int32), params)

  def update_velocity(updates, state, params=None):
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    return updates, velocity_state(count, updates)

  def init_weight(params):
    return WeightPredictionState(
      horizons(params), optax.tree.zeros_like(params)
    )

  def update_weight(updates, state, params=None):
    del params, state
    return updates, WeightPredictionState(horizons(updates), updates)

  if form == "velocity":
    return optax.GradientTransformation(init_velocity, update_velocity)
  return optax.GradientTransformation(init_weight, update_weight)
