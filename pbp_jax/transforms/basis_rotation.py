"""Adam in a rotated basis, in which delayed gradients hurt it less.

Delay harms coordinate-wise methods most where the Hessian is far from diagonal
in the weights' own basis. The basis here is that of the gradients' covariances.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from pbp_jax.transforms import per_stage


class Rotation(NamedTuple):
  """What is kept for a matrix `[R, C]`; nothing for other leaves.

  Attributes:
    left: The moving average of `G Gᵀ`, `[R, R]`.
    right: That of `Gᵀ G`, `[C, C]`.
    rows: The basis U of the rows, `[R, R]`.
    columns: The basis V of the columns, `[C, C]`.
  """

  left: jax.Array
  right: jax.Array
  rows: jax.Array
  columns: jax.Array


class BasisRotationState(NamedTuple):
  """State of `scale_by_basis_rotation`; floats in float32 at least.

  Attributes:
    count: Updates done, int32.
    mu: The first moment, like the parameters, in their own basis.
    nu: The second moment, likewise, in the rotated basis.
    rotations: A `Rotation`, or an empty tuple, for each leaf of the parameters.
  """

  count: jax.Array
  mu: optax.Updates
  nu: optax.Updates
  rotations: Any


def scale_by_basis_rotation(
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  refresh_every: ArrayLike = 10,
  uses_momentum: bool = False,
) -> optax.GradientTransformation:
  """Adam that works in the basis of the gradients' covariances.

  For a matrix with gradient G: `L = β₂ L + (1 - β₂) G Gᵀ`,
  `R = β₂ R + (1 - β₂) Gᵀ G`, whose eigenvectors are U and V. The first update
  computes them at its end (`eigh`), and every K-th update after it takes one
  step of power iteration, `U = qr(L U)` and `V = qr(R V)`. With Adam's
  bias-corrected moments `m̂` of G and `v̂` of the rotated `Uᵀ G V`, the update is
  `U (Uᵀ m̂ V / (sqrt(v̂) + ε)) Vᵀ`. The first update, which has no basis yet, is
  Adam's, and so are those of all other leaves: vectors, and the kernels of
  convolutions.

  It changes no view and knows no delay. Put the learning rate after it;
  decoupled decay goes between, coupled decay before it turns the basis too.

  Args:
    b1: β₁ in [0, 1); may be traced, as all numbers that follow.
    b2: β₂ in [0, 1), for v, L and R.
    eps: ε >= 0.
    refresh_every: K >= 1, in updates.
    uses_momentum: Whether L and R are of the first moment instead of G.

  Returns:
    A transformation with a `BasisRotationState`. A matrix `[R, C]` takes
    `2 (R² + C²)` numbers more than Adam.

  Raises:
    ValueError: If a number is out of range.

  References:
    arXiv 2602.03515 (basis rotation for asynchronous pipelines); as read in the
    authors' code. The order of the steps within an update, and that v is kept
    through a refresh, are ours: in the basis of the same gradient, most of the
    first update would be rounding errors that Adam blows up.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.scale_by_basis_rotation()
    >>> gradient = jnp.array([[3.0, 3.0], [3.0, 3.0]])
    >>> updates, state = link.update(gradient, link.init(gradient))
    >>> updates, state = link.update(gradient, state)
    >>> print(updates.round(3))
    [[0.632 0.632]
     [0.632 0.632]]
  """
  per_stage.check_number(b1, "b1", below=1.0)
  per_stage.check_number(b2, "b2", below=1.0)
  per_stage.check_number(eps, "eps")
  per_stage.check_number(refresh_every, "refresh_every", minimum=1)

  def init_fn(params):
    wide = lambda leaf: jnp.zeros_like(leaf, dtype=_wide(leaf.dtype))
    return BasisRotationState(
      count=jnp.zeros([], jnp.int32),
      mu=jax.tree.map(wide, params),
      nu=jax.tree.map(wide, params),
      rotations=jax.tree.map(_no_rotation, params),
    )

  def update_fn(updates, state, params=None):
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    is_due = state.count % jnp.asarray(refresh_every) == 0

    def step(g, mu, nu, rotation):
      wide = mu.dtype
      keep_mu, keep_nu = (jnp.asarray(b, dtype=wide) for b in (b1, b2))
      gradient = g.astype(wide)
      mu = keep_mu * mu + (1 - keep_mu) * gradient
      seen = mu if uses_momentum else gradient
      if rotation:
        gradient = rotation.rows.T @ gradient @ rotation.columns
      nu = keep_nu * nu + (1 - keep_nu) * gradient**2
      direction = mu / (1 - keep_mu**count)
      if rotation:
        direction = rotation.rows.T @ direction @ rotation.columns
      root = jnp.sqrt(nu / (1 - keep_nu**count))
      direction = direction / (root + jnp.asarray(eps, dtype=wide))
      if rotation:
        direction = rotation.rows @ direction @ rotation.columns.T
        rotation = _turn(rotation, seen, keep_nu, state.count == 0, is_due)
      return direction.astype(g.dtype), mu, nu, rotation

    leaves, structure = jax.tree.flatten(updates)
    trees = (state.mu, state.nu, state.rotations)
    columns = [structure.flatten_up_to(tree) for tree in trees]
    steps = [step(*row) for row in zip(leaves, *columns, strict=True)]
    updates, mu, nu, rotations = (
      jax.tree.unflatten(structure, [row[i] for row in steps]) for i in range(4)
    )
    return updates, BasisRotationState(count, mu, nu, rotations)

  return optax.GradientTransformation(init_fn, update_fn)


def _wide(dtype: Any) -> Any:
  return jnp.promote_types(dtype, jnp.float32)


def _no_rotation(leaf: jax.Array) -> tuple[()] | Rotation:
  """The identity, for a matrix; nothing for other leaves."""
  if leaf.ndim != 2:
    return ()
  dtype = _wide(leaf.dtype)
  eyes = [jnp.eye(size, dtype=dtype) for size in leaf.shape]
  return Rotation(*map(jnp.zeros_like, eyes), *eyes)


def _turn(
  rotation: Rotation,
  matrix: jax.Array,
  decay: jax.Array,
  is_first: jax.Array,
  is_due: jax.Array,
) -> Rotation:
  """Counts a matrix in, and refreshes the bases when it is time."""
  left = decay * rotation.left + (1 - decay) * matrix @ matrix.T
  right = decay * rotation.right + (1 - decay) * matrix.T @ matrix

  def refresh():
    return jax.lax.cond(
      is_first,
      lambda: (jnp.linalg.eigh(left)[1], jnp.linalg.eigh(right)[1]),
      lambda: (
        jnp.linalg.qr(left @ rotation.rows)[0],
        jnp.linalg.qr(right @ rotation.columns)[0],
      ),
    )

  bases = jax.lax.cond(
    is_due, refresh, lambda: (rotation.rows, rotation.columns)
  )
  return Rotation(left, right, *bases)
