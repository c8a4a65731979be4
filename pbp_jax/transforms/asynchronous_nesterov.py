"""Asynchronous Nesterov: a look-ahead that makes up for delayed gradients.

Nesterov's method with the gradient discounted by `1 - γ` and the momentum near
one, as of AsyncPP, in its own form and as the NAdam that its authors train
with; and the momentum schedules of both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import arithmetic, per_stage, scalars, views


def nadam_momentum(
  b1: ArrayLike = 0.99, momentum_decay: ArrayLike = 0.004
) -> Callable[[ArrayLike], jax.Array]:
  """The momentum schedule of PyTorch's NAdam, which warms up.

  `μₜ = β₁ (1 - 0.5 · 0.96^(ψ t))`, with t = 1 for the first update. (It is not
  that of `optax.nadam`, which is constant.)

  Args:
    b1: β₁, a scalar or one value a stage, in [0, 1].
    momentum_decay: ψ >= 0.

  Returns:
    A schedule from updates done, t - 1, to μₜ, of the shape of `b1`.

  Example:
    >>> print(nadam_momentum(b1=0.99)(0).round(6))
    0.495081
  """
  per_stage.check_numbers(b1, "b1", maximum=1.0)
  per_stage.check_number(momentum_decay, "momentum_decay")

  def momentum(count):
    exponent = jnp.asarray(momentum_decay, dtype=float) * (count + 1)
    return jnp.asarray(b1, dtype=float) * (1 - 0.5 * 0.96**exponent)

  return momentum


def stage_adaptive_momentum(
  delay: ArrayLike, num_stages: int
) -> np.ndarray | jax.Array:
  """A momentum that grows with the stage's delay: `γ_s = 0.9 + 0.09 D_s / S`.

  As read in the authors' code of asynchronous Nesterov.

  Args:
    delay: D_s, in updates, `[S]`, up to S (1F1B: `S - 1 - s`).
    num_stages: S.

  Returns:
    γ, `[S]`.

  Raises:
    ValueError: If a number is negative, a momentum would exceed one, or the
      delays are not one a stage.

  Example:
    >>> print(stage_adaptive_momentum(np.array([3, 2, 1, 0]), num_stages=4))
    [0.9675 0.945  0.9225 0.9   ]
  """
  per_stage.check_number(num_stages, "num_stages", minimum=1, whole=True)
  per_stage.check_numbers(delay, "delay", maximum=num_stages / 0.9)
  if np.shape(delay) != (num_stages,):
    raise ValueError(
      f"delay must have one value a stage, shape ({num_stages},), got"
      f" {delay!r}."
    )
  xp = jnp if isinstance(delay, jax.Array) else np
  return 0.9 + 0.09 * xp.asarray(delay) / num_stages


class AsynchronousNesterovState(NamedTuple):
  """State of `asynchronous_nesterov`.

  Attributes:
    count: Updates done, int32.
    momentum: The momentum of the next update, a scalar for each leaf.
    last_update: The last update, like the parameters.
  """

  count: jax.Array
  momentum: Any
  last_update: optax.Updates

  def predict_view(self, params, enclosing, which):
    """`w + γ u` on both passes; see `views.Prediction`."""
    del enclosing, which
    return views.map_covered(
      lambda w, momentum, update: arithmetic.linear_combination(
        (1, w), (momentum, update)
      ),
      params,
      self.momentum,
      self.last_update,
    )


def asynchronous_nesterov(
  learning_rate: ArrayLike | optax.Schedule,
  momentum: per_stage.PerStage | Callable[[ArrayLike], Any] = 0.99,
) -> optax.GradientTransformation:
  """Nesterov's method with discounted gradients: a whole optimizer, and a view.

  With the look-ahead `dₜ = γₜ (wₜ - wₜ₋₁)` and the gradient g, D updates old,
  `wₜ₊₁ = wₜ + dₜ - η (1 - γₜ) g(wₜ₋D + dₜ₋D)`. So the weights that passes are
  to see, the view, are `wₜ + dₜ`: use it with a schedule that stashes weights,
  whose gradient is the formula's. In other schedules the backward pass sees the
  newest look-ahead.

  It ends a chain: it holds the learning rate itself, and no link that changes
  updates may follow. Weight decay before it is coupled and is discounted like
  the gradient.

  Args:
    learning_rate: η, a number (may be traced) or an optax schedule.
    momentum: γ in [0, 1]: a scalar, one value a stage
      (`stage_adaptive_momentum`), or a pytree prefix of the parameters, may be
      traced; or a schedule from updates done to those (`nadam_momentum`).

  Returns:
    A transformation with an `AsynchronousNesterovState`.

  Raises:
    ValueError: If a number is out of range or, at `init`, does not fit the
      parameters.

  References:
    Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel
    Optimization, arXiv 2505.01099; as read in the abstract and in the authors'
    code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> link = pbp.asynchronous_nesterov(learning_rate=0.5, momentum=0.5)
    >>> params = jnp.ones(1)
    >>> state = link.init(params)
    >>> updates, state = link.update(jnp.ones(1), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, pbp.predict_params(state, params))
    [0.75] [0.625]
  """
  scalars.check_rate(learning_rate)
  if not callable(momentum):
    per_stage.check_numbers(momentum, "momentum", maximum=1.0)

  def momenta(count, tree):
    value = momentum(count) if callable(momentum) else momentum
    return scalars.per_leaf(value, tree, "momentum")

  def init_fn(params):
    count = jnp.zeros([], jnp.int32)
    return AsynchronousNesterovState(
      count, momenta(count, params), optax.tree.zeros_like(params)
    )

  def update_fn(updates, state, params=None):
    del params
    rate = scalars.rate_at(learning_rate, state.count)
    updates = jax.tree.map(
      lambda g, last, m: arithmetic.linear_combination(
        (-rate * (1 - m), g), (m, last)
      ),
      updates,
      state.last_update,
      momenta(state.count, updates),
    )
    count = jnp.asarray(optax.safe_increment(state.count))
    return updates, AsynchronousNesterovState(
      count, momenta(count, updates), updates
    )

  return optax.GradientTransformation(init_fn, update_fn)


class AsynchronousNadamState(NamedTuple):
  """State of `scale_by_asynchronous_nadam`.

  Attributes:
    count: Updates done, int32.
    mu_product: The product of the momenta so far, a scalar for each leaf.
    mu: The first moment, like the parameters.
    nu: The second moment, likewise.
  """

  count: jax.Array
  mu_product: Any
  mu: optax.Updates
  nu: optax.Updates


def scale_by_asynchronous_nadam(
  b1: per_stage.PerStage = 0.99,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  momentum_decay: ArrayLike = 0.004,
) -> optax.GradientTransformation:
  """NAdam as in PyTorch, with the momentum for asynchronous pipelines.

  At update t = 1, 2, ... with `μₜ = β₁ (1 - 0.5 · 0.96^(ψ t))`, the moments
  `m = β₁ m + (1 - β₁) g`, `v = β₂ v + (1 - β₂) g²` and `Πₜ = μ₁ ⋯ μₜ`,
  `u = (μₜ₊₁ m / (1 - Πₜ μₜ₊₁) + (1 - μₜ) g / (1 - Πₜ)) /
  (sqrt(v / (1 - β₂ᵗ)) + ε)`. It is used with a schedule that stashes weights,
  and differs from `optax.nadam` by the warm-up of μ, which never ends for Π.
  Put the rate after it; decoupled decay goes between.

  Args:
    b1: β₁, in [0, 1): a scalar, one value a stage (`stage_adaptive_momentum`),
      or a pytree prefix of the parameters; may be traced, as all others.
    b2: β₂, in [0, 1).
    eps: ε >= 0.
    momentum_decay: ψ >= 0.

  Returns:
    A transformation with an `AsynchronousNadamState`.

  Raises:
    ValueError: If a number is out of range or, at `init`, does not fit the
      parameters.

  References:
    As for `asynchronous_nesterov`; as read in the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.scale_by_asynchronous_nadam()
    >>> state = link.init(jnp.ones(1))
    >>> updates, state = link.update(jnp.ones(1), state)
    >>> print(updates.round(4))
    [1.0066]
  """
  per_stage.check_numbers(b1, "b1", below=1.0)
  per_stage.check_number(b2, "b2", below=1.0)
  per_stage.check_number(eps, "eps")
  per_stage.check_number(momentum_decay, "momentum_decay")

  def init_fn(params):
    return AsynchronousNadamState(
      count=jnp.zeros([], jnp.int32),
      mu_product=jax.tree.map(
        jnp.ones_like, scalars.per_leaf(b1, params, "b1")
      ),
      mu=optax.tree.zeros_like(params),
      nu=optax.tree.zeros_like(params),
    )

  def update_fn(updates, state, params=None):
    del params
    count = jnp.asarray(optax.safe_increment(state.count))
    momenta = scalars.per_leaf(b1, updates, "b1")
    decay = jnp.asarray(b2, dtype=float)

    def now(b1):
      return nadam_momentum(b1, momentum_decay)(state.count)

    def step(g, m, v, b1, product):
      wide = jnp.promote_types(g.dtype, jnp.float32)
      now_momentum = now(b1).astype(wide)
      next_momentum = nadam_momentum(b1, momentum_decay)(count).astype(wide)
      product = product.astype(wide)
      direction = next_momentum * m.astype(wide) / (
        1 - product * next_momentum
      ) + (1 - now_momentum) * g.astype(wide) / (1 - product)
      corrected = v.astype(wide) / (1 - decay**count).astype(wide)
      scale = jnp.sqrt(corrected) + jnp.asarray(eps, dtype=wide)
      return (direction / scale).astype(g.dtype)

    mu = jax.tree.map(
      lambda g, m, b1: arithmetic.linear_combination((1 - b1, g), (b1, m)),
      updates,
      state.mu,
      momenta,
    )
    nu = jax.tree.map(
      lambda g, v: arithmetic.linear_combination(
        (1 - decay, g * g), (decay, v)
      ),
      updates,
      state.nu,
    )
    products = jax.tree.map(
      lambda product, b1: product * now(b1), state.mu_product, momenta
    )
    steps = jax.tree.map(step, updates, mu, nu, momenta, products)
    return steps, AsynchronousNadamState(count, products, mu, nu)

  return optax.GradientTransformation(init_fn, update_fn)
