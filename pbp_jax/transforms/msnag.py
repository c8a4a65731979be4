"""FTPipe's MSNAG: the optimizer rolled on over the delay, with no gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from pbp_jax.transforms import (
  arithmetic,
  per_stage,
  scalars,
  spike_compensation,
  views,
)


class MsnagState(NamedTuple):
  """State of `msnag`.

  Attributes:
    count: Updates done, int32.
    coefficient: Rate times horizon, a scalar for each leaf of the parameters.
  """

  count: jax.Array
  coefficient: Any

  def predict_view(self, params, enclosing, which):
    """`w - coefficient v` on the forward pass; see `views.Prediction`."""
    if which == "backward":
      return params
    return views.map_covered(
      lambda w, coefficient, v: arithmetic.linear_combination(
        (1, w), (-coefficient, v)
      ),
      params,
      self.coefficient,
      views.find_momentum(
        enclosing,
        "msnag",
        "msnag_adam after Adam, or after any other optimizer"
        ' linear_weight_prediction(form="weight")',
      ),
    )


class MsnagAdamState(NamedTuple):
  """State of `msnag_adam`.

  Attributes:
    count: Updates done, int32.
    eps: Adam's ε, a scalar.
    roll: For each leaf of the parameters `[D, 3]`, a row for each update to
      come: what the decay leaves of the weight, the factor of the first moment,
      and that of the second moment's root.
  """

  count: jax.Array
  eps: jax.Array
  roll: Any

  def predict_view(self, params, enclosing, which):
    """Adam's next updates on the forward pass; see `views.Prediction`."""
    if which == "backward":
      return params
    adam = views.find_adam(enclosing)

    def roll_on(w, roll, mu, nu):
      wide = jnp.promote_types(w.dtype, jnp.float32)
      mu, root = mu.astype(wide), jnp.sqrt(nu.astype(wide))

      def step(w, factors):
        keep, first, second = factors.astype(wide)
        return keep * w - first * mu / (second * root + self.eps), None

      rolled, _ = jax.lax.scan(step, w.astype(wide), roll)
      return rolled.astype(w.dtype)

    return views.map_covered(roll_on, params, self.roll, adam.mu, adam.nu)


def msnag(
  horizon: per_stage.PerStage,
  momentum: per_stage.PerStage,
  learning_rate: ArrayLike | optax.Schedule,
) -> optax.GradientTransformation:
  """Lets forward passes see SGD with momentum rolled on over D updates.

  The next D updates are made with zero gradients, so that only the velocity v
  goes on, decaying: `ŵ = wₜ - Σₖ ηₖ mᵏ vₜ` over k = 1..D, with ηₖ the rate of
  the k-th update to come; at a constant rate `wₜ - η (m - m^(D+1)) / (1-m) vₜ`.
  That horizon is the one which spike compensation reaches in effect. The
  backward pass sees the raw weights; updates pass unchanged.

  v is the one momentum buffer in the same chain (as in the velocity form of
  `linear_weight_prediction`). A coupled weight decay is part of v; the decay of
  the updates to come is left out.

  Args:
    horizon: D >= 0, in updates (`schedule.delay`). A scalar, one value a stage,
      or a pytree prefix of the parameters. Any real, may be traced, at a
      constant rate; ints, known, with a schedule.
    momentum: m in [0, 1], in the same forms; may be traced.
    learning_rate: The rate that the chain applies, a number (may be traced) or
      an optax schedule. Injected by `optax.inject_hyperparams` it is the last
      update's.

  Returns:
    A transformation with a `MsnagState`.

  Raises:
    ValueError: If a number is out of range or, at `init`, does not fit the
      parameters; in `predict_params`, if there is not one momentum buffer.

  References:
    Eliad et al., Fine-tuning giant neural networks on commodity hardware with
    automatic pipeline model parallelism (FTPipe), USENIX ATC 2021; as read in
    the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.trace(decay=0.5),
    ...   optax.scale_by_learning_rate(0.5),
    ...   pbp.msnag(horizon=2, momentum=0.5, learning_rate=0.5))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(jnp.ones(1), state, params)
    >>> print(pbp.predict_params(state, params))
    [0.625]
  """
  is_scheduled = callable(learning_rate)
  per_stage.check_numbers(horizon, "horizon", whole=is_scheduled)
  per_stage.check_numbers(momentum, "momentum", maximum=1.0)
  scalars.check_rate(learning_rate)

  def coefficient(count, horizon, momentum):
    if is_scheduled:
      ahead = jnp.arange(int(horizon))
      rates = scalars.rates_ahead(learning_rate, count, int(horizon))
      powers = jnp.asarray(momentum, dtype=float) ** (ahead + 1)
      return jnp.sum(rates * powers)
    _, b = spike_compensation.spike_coefficients(momentum, horizon)
    return scalars.rate_at(learning_rate, count) * jnp.asarray(
      momentum * b, dtype=float
    )

  def make_state(count, tree):
    return MsnagState(
      count,
      jax.tree.map(
        lambda horizon, momentum: coefficient(count, horizon, momentum),
        per_stage.broadcast(horizon, tree, "horizon"),
        per_stage.broadcast(momentum, tree, "momentum"),
      ),
    )

  def init_fn(params):
    return make_state(jnp.zeros([], jnp.int32), params)

  def update_fn(updates, state, params=None):
    del params
    return updates, make_state(optax.safe_increment(state.count), updates)

  return optax.GradientTransformation(init_fn, update_fn)


def msnag_adam(
  horizon: per_stage.PerStage,
  learning_rate: ArrayLike | optax.Schedule,
  b1: ArrayLike = 0.9,
  b2: ArrayLike = 0.999,
  eps: ArrayLike = 1e-8,
  weight_decay: per_stage.PerStage = 0.0,
) -> optax.GradientTransformation:
  """Lets forward passes see Adam or AdamW rolled on over D updates.

  After t updates, for k = 1..D in turn, with the rate ηₖ of the k-th update to
  come, `w *= 1 - ηₖ λ` (AdamW; Adam has λ = 0) and
  `w -= ηₖ / (1 - β₁^(t+k)) β₁ᵏ mₜ / (sqrt(vₜ) / sqrt(1 - β₂^(t+k)) + ε)`. The
  gradients are taken as zero, so the first moment decays; the second moment is
  held. The backward pass sees the raw weights; updates pass unchanged.

  The moments m and v are those of the one `optax.scale_by_adam` in the same
  chain, whose β₁, β₂ and ε this link needs too. A coupled weight decay (before
  Adam) is part of the moments.

  Args:
    horizon: D, an int >= 0, in updates (`schedule.delay`): a scalar, one value
      a stage, or a pytree prefix of the parameters. It shapes the state, so it
      can't be traced; name it in `static_args` of `optax.inject_hyperparams`.
    learning_rate: The rate that the chain applies, a number (may be traced) or
      an optax schedule, which is asked for the rates of the updates to come.
    b1: β₁, in [0, 1); may be traced, as all that follow.
    b2: β₂, in [0, 1).
    eps: ε > 0.
    weight_decay: λ >= 0, decoupled, in the forms of `horizon`.

  Returns:
    A transformation with a `MsnagAdamState`. D small arithmetic passes over the
    weights are made for every view.

  Raises:
    ValueError: If a number is out of range or, at `init`, does not fit the
      parameters; in `predict_params`, if there is not one Adam.

  References:
    As for `msnag`; as read in the authors' code.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import pbp_jax as pbp
    >>> optimizer = optax.chain(
    ...   optax.adam(0.1), pbp.msnag_adam(horizon=2, learning_rate=0.1))
    >>> params = jnp.ones(1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.ones(1), state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params.round(4), pbp.predict_params(state, params).round(4))
    [0.9] [0.7813]
  """
  per_stage.check_numbers(horizon, "horizon", whole=True)
  scalars.check_rate(learning_rate)
  per_stage.check_number(b1, "b1", below=1.0)
  per_stage.check_number(b2, "b2", below=1.0)
  per_stage.check_number(eps, "eps", above=0.0)
  per_stage.check_numbers(weight_decay, "weight_decay")

  def make_state(count, tree):
    longest = max(
      map(int, np.ravel(jax.tree.leaves(horizons(tree)))), default=0
    )
    ahead = jnp.arange(1, longest + 1)
    rates = scalars.rates_ahead(learning_rate, count, longest)
    first = jnp.asarray(b1, dtype=float)
    first = rates * first**ahead / (1 - first ** (count + ahead))
    second = jnp.sqrt(1 - jnp.asarray(b2, dtype=float) ** (count + ahead))

    def roll(horizon, decay):
      keep = 1 - rates * decay
      return jnp.stack([keep, first, 1 / second], axis=1)[: int(horizon)]

    return MsnagAdamState(
      count=count,
      eps=jnp.asarray(eps, dtype=float),
      roll=jax.tree.map(
        roll,
        horizons(tree),
        scalars.per_leaf(weight_decay, tree, "weight_decay"),
      ),
    )

  def horizons(tree):
    return per_stage.broadcast(horizon, tree, "horizon")

  def init_fn(params):
    return make_state(jnp.zeros([], jnp.int32), params)

  def update_fn(updates, state, params=None):
    del params
    return updates, make_state(optax.safe_increment(state.count), updates)

  return optax.GradientTransformation(init_fn, update_fn)
