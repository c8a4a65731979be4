"""Clipping that a worker of an asynchronous pipeline can do by itself."""

import jax
import jax.numpy as jnp
import optax

from pbp_jax.transforms import per_stage


def clip_by_stage_norm(
  max_norm: per_stage.PerStage,
) -> optax.GradientTransformation:
  """Clips every stage's update by that stage's own norm.

  `u_s min(1, c / ||u_s||)` with the Euclidean norm over all leaves of stage s.
  `optax.clip_by_global_norm` needs the gradients of all stages at one time,
  which an asynchronous pipeline never has. As there, the sum of squares is
  taken as it is: a norm that overflows (entries above `1e19` in float32) clips
  the stage's update to zero, and it is NaN where an entry is infinite.

  Args:
    max_norm: c > 0, finite: a scalar, one value a stage, or a pytree prefix of
      the parameters; may be traced. Stages are the elements of a top-level list
      or tuple; any other tree is one stage.

  Returns:
    A transformation without a state.

  Raises:
    ValueError: If a norm is not > 0 or, in use, does not fit the parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.clip_by_stage_norm(1.0)
    >>> updates = (jnp.array([3.0, 4.0]), jnp.array([0.5]))
    >>> clipped, _ = link.update(updates, optax.EmptyState())
    >>> print(*clipped)
    [0.6 0.8] [0.5]
  """
  per_stage.check_numbers(max_norm, "max_norm", above=0.0)

  def clip_stage(updates, limits):
    norm = optax.tree.norm(updates)
    return jax.tree.map(
      lambda u, limit: jnp.where(
        norm <= limit, u, (u / norm.astype(u.dtype)) * limit
      ).astype(u.dtype),
      updates,
      limits,
    )

  def update_fn(updates, state, params=None):
    del params
    limits = per_stage.broadcast(max_norm, updates, "max_norm")
    stages, structure = per_stage.stage_trees(updates)
    clipped = map(clip_stage, stages, per_stage.stage_trees(limits)[0])
    return jax.tree.unflatten(structure, list(clipped)), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
