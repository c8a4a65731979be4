"""PipeMare's discrepancy correction: backward passes near past weights.

This is the technique T2 of its authors.
"""

import math

import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import past_weights, per_stage

DEFAULT_DECAY = math.exp(-2)


def discrepancy_correction(
  delay: per_stage.PerStage, decay: ArrayLike = DEFAULT_DECAY
) -> optax.GradientTransformation:
  """Lets backward passes see an estimate of what the forward pass has seen.

  `u = wₜ - τ δₜ` with the moving average
  `δₜ₊₁ = γ δₜ + (1 - γ) (wₜ₊₁ - wₜ)` of the updates and `γ = decay^(1/τ)`, so
  that a fraction `decay` of the average is older than τ updates. It needs no
  stash, and memory of one copy of the weights. Updates pass unchanged; the
  forward pass sees the raw weights. τ = 0 changes nothing.

  It has to be the last link, to see the updates as they are applied, any weight
  decay included. In a schedule that stashes weights it has no effect.

  Args:
    delay: τ = τ_fwd - τ_bkwd, any real >= 0: by how many updates the forward
      pass's weights are older (`schedule.delay`). A scalar, one value a stage,
      or a pytree prefix of the parameters; may be traced.
    decay: In (0, 1), the authors' is e⁻²; may be traced.

  Returns:
    A transformation with a `PastWeightsState`.

  Raises:
    ValueError: If a number is out of range or, at `init`, does not fit the
      parameters.

  References:
    Yang et al., PipeMare: Asynchronous Pipeline Parallel DNN Training,
    arXiv 1910.05124; as published; not re-read at the source.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.sgd(0.5), pbp.discrepancy_correction(delay=2, decay=0.25))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.ones(1), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, pbp.predict_params(state, params, "backward"))
    [0.5] [1.]
  """
  per_stage.check_number(decay, "decay", above=0.0, below=1.0)

  def gamma(delay):
    # Its limit where the delay is zero, for derivatives: no view needs it.
    some = jnp.where(delay > 0, delay, 1)
    return jnp.where(
      delay > 0, jnp.asarray(decay, dtype=float) ** (1 / some), 0
    )

  return past_weights.go_back(delay, gamma)
