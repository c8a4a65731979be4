"""PipeOptim: forward passes along the optimizer's own direction."""

from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import direction_prediction, per_stage


def pipeoptim(
  horizon: per_stage.PerStage, learning_rate: ArrayLike | optax.Schedule
) -> optax.GradientTransformation:
  """Lets forward passes see the weights after s more updates like the last.

  `ŵ = wₜ - lr s Δ`, with Δ the last step of the optimizer before its learning
  rate: the velocity `m v + g` of `optax.trace`, `m̂ / (sqrt(v̂) + ε)` of
  `optax.scale_by_adam`, the sign of `optax.scale_by_lion`. The backward pass
  sees the raw weights. Updates pass unchanged.

  Its place is directly before `optax.scale_by_learning_rate`. There it takes
  what arrives for Δ, so it works after any optimizer: a coupled weight decay
  (before the momentum) is part of Δ, and so is a decoupled one
  (`optax.add_decayed_weights` after the optimizer) if it stands before this
  link. At a constant rate it is the weight form of linear weight prediction.

  Args:
    horizon: s, any real >= 0, in updates. The authors' text says S - 1 - s for
      stage s of S (`one_f_one_b(S).delay`), their code S - s. A scalar, one
      value a stage, or a pytree prefix of the parameters; may be traced.
    learning_rate: The rate that follows in the chain: the next update's is
      used, except under `optax.inject_hyperparams`, where it is the last's.

  Returns:
    A transformation with a `DirectionPredictionState`.

  Raises:
    ValueError: If a number is negative or, at `init`, does not fit the
      parameters.

  References:
    Guan et al., PipeOptim: Ensuring Effective 1F1B Schedule with
    Optimizer-Dependent Weight Prediction, arXiv 2312.00839; as read in the
    authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.trace(decay=0.5),
    ...   pbp.pipeoptim(horizon=3, learning_rate=0.1),
    ...   optax.scale_by_learning_rate(0.1))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(jnp.ones(1), state, params)
    >>> print(pbp.predict_params(state, params))
    [0.7]
  """
  per_stage.check_numbers(horizon, "horizon")
  return direction_prediction.predict_along_direction(
    horizon, None, learning_rate
  )
