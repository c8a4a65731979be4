"""Given gradients, and what an optimizer makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

NUM_STAGES = 3


def start():
  """The first weights, `[S, 2]`."""
  return np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])


def gradients(count=5):
  """Gradients without a pattern, `[count, S, 2]`."""
  return np.random.default_rng(0).normal(size=(count, NUM_STAGES, 2))


def run(optimizer, given, **extra):
  """Runs an optimizer on given gradients.

  Args:
    optimizer: The optimizer, of a list of stages.
    given: Gradients `[count, S, 2]`.
    **extra: Extra arguments of its update, each like `given`.

  Returns:
    From version 0 on, the weights and the forward and the backward view, each
    `[S, 2]`.
  """
  optimizer = optax.with_extra_args_support(optimizer)
  params = [jnp.asarray(w, dtype=float) for w in start()]
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  versions = []
  for t in range(len(given) + 1):
    versions.append(
      tuple(
        np.stack(tree)
        for tree in (
          params,
          pbp.predict_params(state, params, "forward"),
          pbp.predict_params(state, params, "backward"),
        )
      )
    )
    if t < len(given):
      at_t = lambda values: [
        jnp.asarray(value, dtype=float)
        for value in values[t]  # noqa: B023
      ]
      updates, state = update(
        at_t(given),
        state,
        params,
        **{name: at_t(values) for name, values in extra.items()},
      )
      params = optax.apply_updates(params, updates)
  return versions
