"""XPipe: both passes of a mini-batch's micro-batches on one prediction."""

from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import direction_prediction, per_stage


def xpipe_horizons(
  num_stages: int, update_interval: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """How many updates each pass of XPipe looks ahead.

  `round((S + M - ⌊s/2⌋ - 2) / M)` in the forward and
  `round((M + ⌊s/2⌋ - 1) / M)` in the backward pass of stage s, halves to the
  even number. As read in the code of a port.

  Args:
    num_stages: Stages S.
    update_interval: Micro-batches M of one update.

  Returns:
    The forward and the backward horizons, ints `[S]`.

  Raises:
    ValueError: If a number is no int >= 1.

  Example:
    >>> forward, backward = xpipe_horizons(num_stages=4)
    >>> print(forward, backward)
    [3 3 2 2] [0 0 1 1]
  """
  per_stage.check_number(num_stages, "num_stages", minimum=1, whole=True)
  per_stage.check_number(
    update_interval, "update_interval", minimum=1, whole=True
  )
  half = np.arange(num_stages) // 2
  forward = (num_stages + update_interval - half - 2) / update_interval
  backward = (update_interval + half - 1) / update_interval
  return np.rint(forward).astype(int), np.rint(backward).astype(int)


def xpipe(
  forward_horizon: per_stage.PerStage,
  backward_horizon: per_stage.PerStage,
  learning_rate: ArrayLike | optax.Schedule,
) -> optax.GradientTransformation:
  """Lets both passes see weights ahead along the optimizer's last direction.

  `ŵ = wₜ - lr T Δ` with `Δ = m̂ / (sqrt(v̂) + ε)` of Adam, its bias corrected
  (`optax.scale_by_adam`), and a horizon T for each pass. Updates pass
  unchanged. Its place is directly before `optax.scale_by_learning_rate`; there
  it takes what arrives for Δ, and so works after any optimizer. A weight decay
  that entered before is part of Δ. With a backward horizon of 0 it is
  `pipeoptim`.

  Args:
    forward_horizon: T of the forward pass, any real >= 0, in updates
      (`xpipe_horizons`). A scalar, one value a stage, or a pytree prefix of the
      parameters; may be traced.
    backward_horizon: T of the backward pass, likewise; of no effect in a
      schedule that stashes weights.
    learning_rate: The rate that follows in the chain: the next update's is
      used, except under `optax.inject_hyperparams`, where it is the last's.

  Returns:
    A transformation with a `DirectionPredictionState`.

  Raises:
    ValueError: If a number is negative or, at `init`, does not fit the
      parameters.

  References:
    Guan et al., XPipe: Efficient Pipeline Model Parallelism for
    Multi-GPU DNN Training, arXiv 1911.04610; as read in the abstract, the
    horizons as read in the code of a port. How it treats weight decay is not
    known.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.scale_by_adam(),
    ...   pbp.xpipe(3, 1, learning_rate=0.1),
    ...   optax.scale_by_learning_rate(0.1))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(jnp.ones(1), state, params)
    >>> for which in ("forward", "backward"):
    ...   print(pbp.predict_params(state, params, which).round(4))
    [0.7]
    [0.9]
  """
  return direction_prediction.predict_along_direction(
    forward_horizon, backward_horizon, learning_rate
  )
