"""LayerPipe2's reconstructed weights: stashing without a stash."""

import optax

from pbp_jax.transforms import past_weights, per_stage


def reconstructed_weights(
  delay: per_stage.PerStage,
) -> optax.GradientTransformation:
  """Lets backward passes see past weights, rebuilt from an average update.

  `w(t-n) ≈ w(t) - n ū(t)`, in the authors' words `W(t) + η n Ḡ(t)`, with a
  moving average ū of the updates whose decay is `n / (n + 1)`, so that its mean
  age is n. It stands for the stash of `schedule.with_weight_stashing()` with
  the memory of one copy of the weights, and is `discrepancy_correction` with
  another decay. Updates pass unchanged; the forward pass sees the raw weights.
  n = 0 changes nothing. It has to be the last link, to see the updates as they
  are applied, any weight decay included; in a schedule that stashes weights it
  has no effect.

  Args:
    delay: n, any real >= 0, in updates (`schedule.delay`). A scalar, one value
      a stage, or a pytree prefix of the parameters; may be traced.

  Returns:
    A transformation with a `PastWeightsState`.

  Raises:
    ValueError: If a delay is negative or, at `init`, does not fit the
      parameters.

  References:
    Unnikrishnan and Parhi, LayerPipe2, arXiv 2512.08160;
    as published; not re-read at the source. That the average is of whole
    updates, rates included, is our reading.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.sgd(0.5), pbp.reconstructed_weights(delay=1))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.ones(1), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, pbp.predict_params(state, params, "backward"))
    [0.5] [0.75]
  """
  return past_weights.go_back(delay, lambda n: n / (n + 1))
