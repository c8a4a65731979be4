"""SpecTrain: both passes on the weights of the time a micro-batch leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import arithmetic, per_stage, scalars, views


class SpecTrainState(NamedTuple):
  """State of `spectrain`.

  Attributes:
    count: Updates done, int32.
    learning_rate: The rate of the next update, a scalar.
    delay: As given, in arrays.
    backward_horizon: Likewise.
  """

  count: jax.Array
  learning_rate: jax.Array
  delay: Any
  backward_horizon: Any

  def predict_view(self, params, enclosing, which):
    """`w - lr T v`; see `views.Prediction`."""
    horizons = scalars.spread(self.backward_horizon, params, "backward_horizon")
    if which == "forward":
      delays = scalars.spread(self.delay, params, "delay")
      horizons = jax.tree.map(jnp.add, delays, horizons)
    return views.map_covered(
      lambda w, horizon, v: arithmetic.linear_combination(
        (1, w), (-self.learning_rate * horizon, v)
      ),
      params,
      horizons,
      views.find_momentum(
        enclosing,
        "spectrain",
        "xpipe, which predicts for both passes after any optimizer",
      ),
    )


def spectrain(
  delay: per_stage.PerStage,
  learning_rate: ArrayLike | optax.Schedule,
  backward_horizon: per_stage.PerStage | None = None,
) -> optax.GradientTransformation:
  """Lets both passes see the weights of the time the micro-batch leaves.

  `ŵ = wₜ - lr T vₜ` along the momentum buffer v that is in the same chain (as
  in the velocity form of `linear_weight_prediction`), with `T_bwd` updates from
  the backward pass of stage s to that of stage 0, where the micro-batch leaves
  the pipeline, and `T_fwd = D + T_bwd` from the forward pass. All passes of a
  micro-batch then aim at the same version. Updates pass unchanged.

  In fine-grained pipelined backpropagation `T_bwd = s`. In the authors' 1F1B,
  `D = S - 1 - s` and `T_bwd = ⌊s/2⌋`. A coupled weight decay is part of v, a
  decoupled one is not predicted.

  Args:
    delay: D, any real >= 0, in updates (`schedule.delay`). A scalar, one value
      a stage, or a pytree prefix of the parameters; may be traced.
    learning_rate: The rate that the chain applies: the next update's is used,
      except under `optax.inject_hyperparams`, where it is the last's.
    backward_horizon: T_bwd, any real >= 0, in updates, in the forms of `delay`;
      with M micro-batches an update s / M. None stands for the stage's index s,
      and needs parameters whose top level is a list or tuple of stages.

  Returns:
    A transformation with a `SpecTrainState`.

  Raises:
    ValueError: If a number is negative or, at `init`, does not fit the
      parameters; if `backward_horizon` is None and there are no stages to
      count; in `predict_params`, if there is no momentum buffer, or several.

  References:
    Chen, Yang and Cheng, Efficient and Robust Parallel DNN Training through
    Model Parallelism on Multi-GPU Platform, arXiv 1809.02839; as read in the
    authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.trace(decay=0.5),
    ...   optax.scale_by_learning_rate(0.125),
    ...   pbp.spectrain(delay=[2, 0], learning_rate=0.125))
    >>> params = [jnp.ones(1), jnp.ones(1)]
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(params, state, params)
    >>> for which in ("forward", "backward"):
    ...   print(*pbp.predict_params(state, params, which))
    [0.75] [0.875]
    [1.] [0.875]
  """
  per_stage.check_numbers(delay, "delay")
  if backward_horizon is not None:
    per_stage.check_numbers(backward_horizon, "backward_horizon")
  scalars.check_rate(learning_rate)

  def backward_horizons(params):
    if backward_horizon is not None:
      return scalars.as_given(backward_horizon, params, "backward_horizon")
    if not jax.tree.leaves(params):
      return jnp.zeros([])  # of nothing
    if not isinstance(params, list | tuple):
      raise ValueError(
        "backward_horizon must be given for parameters that are no list or"
        f" tuple of stages; got None, for {jax.tree.structure(params)}."
      )
    stages = list(range(len(params)))
    return scalars.as_given(stages, params, "backward_horizon")

  def make_state(count, tree):
    return SpecTrainState(
      count=count,
      learning_rate=scalars.rate_at(learning_rate, count),
      delay=scalars.as_given(delay, tree, "delay"),
      backward_horizon=backward_horizons(tree),
    )

  def init_fn(params):
    return make_state(jnp.zeros([], jnp.int32), params)

  def update_fn(updates, state, params=None):
    del params
    return updates, make_state(optax.safe_increment(state.count), updates)

  return optax.GradientTransformation(init_fn, update_fn)
