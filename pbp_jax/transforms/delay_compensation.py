"""Delay compensation: gradients corrected to first order for moved weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import per_stage
from pbp_jax.transforms import stale_params as stale_params_lib


class AdaptiveDelayCompensationState(NamedTuple):
  """State of `adaptive_delay_compensation`.

  Attributes:
    mean_square: The moving average of squared gradients, like the parameters,
      in float32 at least.
  """

  mean_square: Any


def delay_compensation(
  strength: per_stage.PerStage = 0.04,
) -> optax.GradientTransformationExtraArgs:
  """Corrects stale gradients for how far the weights have moved: DC-ASGD-c.

  `u = g + λ g² (w - ŵ)` elementwise, with w the newest weights, ŵ those that
  the forward passes met (the extra argument `stale_params`), and λ the
  strength. It is the first term of the gradient's expansion about ŵ, with λ g²
  in the place of the Hessian's diagonal. λ = 0, or weights that have not moved,
  is the identity.

  Put it first, on the raw gradients, before weight decay and clipping. The
  delay is in ŵ: in updates, fractions of it with several micro-batches an
  update, whose ŵ is a mean. Under a prediction ŵ is what the forward saw, so it
  compensates only for what the prediction missed. In an inconsistent pipeline a
  part of the gradient has been taken at newer weights than ŵ already; the
  method, made for parameter servers, does not know of that.

  Args:
    strength: λ >= 0: a scalar, one value a stage, or a pytree prefix of the
      parameters; may be traced.

  Returns:
    A transformation without a state, whose update takes `params` and
    `stale_params`; both may be whole trees where the gradients are masked.

  Raises:
    ValueError: If a strength is negative, or in use does not fit the parameters
      or `params` or `stale_params` are missing.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation, arXiv 1609.08326: as read in the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.delay_compensation(0.5)
    >>> update, _ = link.update(
    ...   jnp.array(2.0), optax.EmptyState(), jnp.array(1.5),
    ...   stale_params=jnp.array(1.0))
    >>> print(update)
    3.0
  """
  per_stage.check_numbers(strength, "strength")

  def update_fn(updates, state, params=None, *, stale_params=None, **extra):
    del extra
    corrected = _compensate(
      updates,
      params,
      stale_params,
      per_stage.broadcast(strength, updates, "strength"),
      link="delay_compensation",
    )
    return corrected, state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )


def adaptive_delay_compensation(
  strength: per_stage.PerStage = 2.0,
  decay: ArrayLike = 0.95,
  epsilon: ArrayLike = 1e-7,
) -> optax.GradientTransformationExtraArgs:
  """`delay_compensation` of a strength that adapts to the gradients: DC-ASGD-a.

  `MS = ρ MS + (1 - ρ) g²`, then `u = g + λ g² (w - ŵ) / √(MS + ε)`,
  elementwise, with λ the strength and ρ the decay. MS starts at zero and is not
  corrected for that. All else is as in `delay_compensation`.

  Args:
    strength: λ >= 0: a scalar, one value a stage, or a pytree prefix of the
      parameters; may be traced.
    decay: ρ in [0, 1]; may be traced.
    epsilon: ε > 0, added under the root; may be traced.

  Returns:
    A transformation with an `AdaptiveDelayCompensationState`.

  Raises:
    ValueError: As `delay_compensation`, and if `decay` or `epsilon` is out of
      range.

  References:
    As `delay_compensation`.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.adaptive_delay_compensation(1.0, decay=0.75)
    >>> state = link.init(jnp.array(1.5))
    >>> update, state = link.update(
    ...   jnp.array(2.0), state, jnp.array(1.5), stale_params=jnp.array(1.0))
    >>> print(update)
    4.0
  """
  per_stage.check_numbers(strength, "strength")
  per_stage.check_number(decay, "decay", maximum=1.0)
  per_stage.check_number(epsilon, "epsilon", above=0.0)

  def init_fn(params):
    return AdaptiveDelayCompensationState(stale_params_lib.wide_zeros(params))

  def update_fn(updates, state, params=None, *, stale_params=None, **extra):
    del extra
    mean_square = jax.tree.map(
      lambda g, ms: (decay * ms + (1 - decay) * g.astype(ms.dtype) ** 2).astype(
        ms.dtype
      ),
      updates,
      state.mean_square,
    )
    strengths = jax.tree.map(
      lambda strength, ms: strength / jnp.sqrt(ms + epsilon),
      per_stage.broadcast(strength, updates, "strength"),
      mean_square,
    )
    corrected = _compensate(
      updates,
      params,
      stale_params,
      strengths,
      link="adaptive_delay_compensation",
    )
    return corrected, AdaptiveDelayCompensationState(mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _compensate(updates, params, stale_params, strengths, link):
  """`g + λ g² (w - ŵ)`."""
  corrected = stale_params_lib.map_gaps(
    lambda g, gap, strength: g + strength * g**2 * gap,
    updates,
    params,
    stale_params,
    strengths,
    link=link,
  )
  return stale_params_lib.cast_like(corrected, updates)
