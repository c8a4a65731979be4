"""Delayed gradients, as an optax link."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pbp_jax import ring_buffers
from pbp_jax.transforms import per_stage


class DelayGradientsState(NamedTuple):
  """State of `delay_gradients`.

  Attributes:
    count: Updates seen, int32.
    history: For each leaf of shape `[...]` and delay D a ring of the last
      gradients, `[D + 1, ...]`; `[0, ...]` where D = 0.
  """

  count: jax.Array
  history: Any


def delay_gradients(delay: per_stage.PerStage) -> optax.GradientTransformation:
  """Emits the gradients of D updates ago: delayed training without a pipeline.

  `uₜ = gₜ₋D`, and zero for the first D updates. Put it first in a chain. For
  optimizers that zero gradients leave untouched (SGD with or without momentum
  or spike compensation, no decay, constant rate) the losses equal those of the
  uniform stashed schedule, and the parameters after T + D updates those of the
  simulator after T. Adam, decay and rate schedules see the zeros.

  Args:
    delay: D, an int >= 0, in updates: a scalar, one value a stage, or a pytree
      prefix of the parameters. It sizes a buffer, so it can't be traced; name
      it in `static_args` of `optax.inject_hyperparams`.

  Returns:
    A transformation with a `DelayGradientsState`.

  Raises:
    ValueError: If a delay is no int >= 0 or, at `init`, does not fit the
      parameters.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> link = pbp.delay_gradients(delay=2)
    >>> state = link.init(jnp.zeros(()))
    >>> for gradient in (1.0, 2.0, 3.0, 4.0):
    ...   update, state = link.update(jnp.asarray(gradient), state)
    ...   print(update)
    0.0
    0.0
    1.0
    2.0
  """
  per_stage.check_numbers(delay, "delay", whole=True)

  def init_fn(params):
    def ring(leaf, delay):
      slots = int(delay) + 1 if delay else 0
      return ring_buffers.full(jnp.zeros_like(leaf), slots)

    delays = per_stage.broadcast(delay, params, "delay")
    return DelayGradientsState(
      count=jnp.zeros([], jnp.int32),
      history=jax.tree.map(ring, params, delays),
    )

  def update_fn(updates, state, params=None):
    del params

    def write(gradient, ring):
      if not ring.shape[0]:
        return ring
      return ring_buffers.write(ring, gradient, state.count)

    def read(gradient, ring):
      if not ring.shape[0]:
        return gradient
      return ring_buffers.read(ring, state.count + 1)

    history = jax.tree.map(write, updates, state.history)
    delayed = jax.tree.map(read, updates, history)
    count = jnp.asarray(optax.safe_increment(state.count))
    return delayed, DelayGradientsState(count, history)

  return optax.GradientTransformation(init_fn, update_fn)
