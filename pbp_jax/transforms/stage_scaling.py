"""Rates and momenta that grow from stage to stage."""

import jax
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import arithmetic, per_stage


def scale_by_stage(
  factor: per_stage.PerStage,
) -> optax.GradientTransformation:
  """Multiplies the update of every stage by that stage's own factor.

  Before `optax.scale_by_learning_rate` it makes the rate differ from stage to
  stage: with Graphcore's `stage_rate_factors`, or factors of your own. Coupled
  weight decay is scaled with the rest. 1 is the identity.

  Args:
    factor: Any real: a scalar, one value a stage, or a pytree prefix of the
      parameters; may be traced.

  Returns:
    A transformation without a state.

  Raises:
    ValueError: If a factor is no real number or, in use, does not fit the
      parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.scale_by_stage(pbp.stage_rate_factors(2))
    >>> updates, _ = link.update((jnp.ones(1), jnp.ones(1)), optax.EmptyState())
    >>> print(*updates)
    [0.25] [0.625]
  """
  per_stage.check_numbers(factor, "factor", minimum=-np.inf)

  def update_fn(updates, state, params=None):
    del params
    factors = per_stage.broadcast(factor, updates, "factor")
    scaled = jax.tree.map(
      lambda u, f: arithmetic.linear_combination((f, u)), updates, factors
    )
    return scaled, state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)


def stage_rate_factors(
  num_stages: int, offset: ArrayLike = 0.25
) -> np.ndarray | jax.Array:
  """Graphcore's factors for the learning rate of every stage.

  `o + (1 - o) s / S` for stage s of S, with o the offset: from o at the input
  to nearly 1 at the loss. They depend on the stage's place and not on the
  delay, which in its pipelines falls linearly with the place. o = 1 leaves all
  rates as they are.

  Args:
    num_stages: S.
    offset: o in [0, 1]; may be traced.

  Returns:
    `[S]`.

  Raises:
    ValueError: If there are no stages or the offset is out of range.

  References:
    Graphcore's public examples (TensorFlow CNNs): as read in the authors' code.

  Example:
    >>> print(stage_rate_factors(4))
    [0.25   0.4375 0.625  0.8125]
  """
  return _ramp(num_stages, offset)


def stage_momenta(
  momentum: ArrayLike, num_stages: int, offset: ArrayLike = 0.1
) -> np.ndarray | jax.Array:
  """Graphcore's momentum of every stage.

  `1 - (1 - m) (q + (1 - q) s / S)` for stage s of S, with m the momentum and q
  the offset: nearer to 1 at the input, so that an early stage averages over
  more gradients. For a chain, `spike_compensation(momenta, delay=0)` is
  momentum that differs from stage to stage. q = 1 leaves all momenta at m.

  Args:
    momentum: m in [0, 1]; may be traced.
    num_stages: S.
    offset: q in [0, 1]; may be traced.

  Returns:
    `[S]`.

  Raises:
    ValueError: If there are no stages or a number is out of range.

  References:
    As `stage_rate_factors`.

  Example:
    >>> print(stage_momenta(0.9, 4))
    [0.99   0.9675 0.945  0.9225]
  """
  per_stage.check_number(momentum, "momentum", maximum=1.0)
  return 1 - (1 - momentum) * _ramp(num_stages, offset)


def _ramp(num_stages: int, offset: ArrayLike) -> np.ndarray | jax.Array:
  """`[S]`, from the offset in equal steps towards 1."""
  per_stage.check_number(num_stages, "num_stages", minimum=1, whole=True)
  per_stage.check_number(offset, "offset", maximum=1.0)
  return offset + (1 - offset) * (np.arange(num_stages) / num_stages)
