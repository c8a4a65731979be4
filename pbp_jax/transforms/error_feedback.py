"""Error feedback: an update corrects the one that was made in its absence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pbp_jax.transforms import arithmetic, per_stage


class ErrorFeedbackState(NamedTuple):
  """State of `error_feedback`.

  Attributes:
    count: Updates done, int32.
    last_update: The update before, as it came in, like the parameters.
  """

  count: jax.Array
  last_update: optax.Updates


def error_feedback(
  strength: per_stage.PerStage = 1.0,
) -> optax.GradientTransformation:
  """Adds to every update its difference to the update before.

  `xₜ₊₁ = xₜ + uₜ + λ (uₜ - uₜ₋₁)`, with u the optimizer's whole update as optax
  adds it (the source subtracts it), rate and weight decay included, and λ the
  strength. In the first update u₋₁ = u₀, so it passes unchanged. λ = 0 is the
  identity.

  Put it after everything that changes updates. The formula is that of
  `optax.scale_by_optimistic_gradient(alpha=1, beta=λ)`, which stands before an
  optimizer and acts on gradients; here it acts on updates, and on every stage
  with its own strength. It knows no delay: as a linear method its effective
  horizon is one update.

  Args:
    strength: λ, any real >= 0: a scalar, one value a stage, or a pytree prefix
      of the parameters; may be traced.

  Returns:
    A transformation with an `ErrorFeedbackState`.

  Raises:
    ValueError: If a strength is negative or, in use, does not fit the
      parameters.

  References:
    arXiv 2606.30634: as read in the abstract.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.error_feedback()
    >>> state = link.init(jnp.zeros(()))
    >>> for update in (1.0, 3.0, 3.0):
    ...   update, state = link.update(jnp.asarray(update), state)
    ...   print(update)
    1.0
    5.0
    3.0
  """
  per_stage.check_numbers(strength, "strength")

  def init_fn(params):
    return ErrorFeedbackState(
      count=jnp.zeros([], jnp.int32),
      last_update=optax.tree.zeros_like(params),
    )

  def update_fn(updates, state, params=None):
    del params
    is_first = state.count == 0
    changed = jax.tree.map(
      lambda u, last, strength: arithmetic.linear_combination(
        (1, u), (jnp.where(is_first, 0, strength), u - last)
      ),
      updates,
      state.last_update,
      per_stage.broadcast(strength, updates, "strength"),
    )
    count = jnp.asarray(optax.safe_increment(state.count))
    return changed, ErrorFeedbackState(count, updates)

  return optax.GradientTransformation(init_fn, update_fn)
