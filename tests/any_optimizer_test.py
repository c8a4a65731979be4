"""Schedules and the weight form of prediction go with any optax optimizer.

Evaluated another way: a Python loop in which every stage is a worker with an
optimizer of its own, that keeps all its old weights in a list.
"""

from absl.testing import absltest, parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import pbp_jax as pbp
from tests import chain

_COUNT = 14
_RATE = optax.exponential_decay(0.02, 1, 0.97)

_OPTIMIZERS = {
  "sgd": lambda: optax.sgd(_RATE),
  "adam": lambda: optax.adam(_RATE),
  "adamw": lambda: optax.adamw(_RATE, weight_decay=0.1),
  "lion": lambda: optax.lion(_RATE, weight_decay=0.1),
  "muon": lambda: contrib.muon(_RATE),
}
_SCHEDULES = {
  "pb": pbp.schedules.pipelined_backprop(
    chain.NUM_STAGES
  ).with_weight_stashing(),
  "pb_interval_2": pbp.schedules.pipelined_backprop(
    chain.NUM_STAGES, 2
  ).with_weight_stashing(),
  "1f1b": pbp.schedules.one_f_one_b(chain.NUM_STAGES, 1),
}


def _loss(params, x, target):
  for weights in params:
    x = chain.dense_tanh(weights, x)
  return chain.squared_error(x, target)


def _loop_of_workers(
  make_optimizer, schedule, horizons, inputs, targets, dtype=None
):
  """Final weights and losses, by workers that know their own stage only."""
  num_stages, interval = schedule.num_stages, schedule.update_interval
  versions = [[stage.init(None, None)] for stage in chain.stages()]
  optimizer = make_optimizer()
  states = [optimizer.init(seen[0]) for seen in versions]
  update = jax.jit(optimizer.update)  # of one stage at a time
  loss_and_gradients = jax.jit(jax.value_and_grad(_loss))

  def view(s, version):
    newest = versions[s][version]
    if version == 0:
      return newest
    last = versions[s][version - 1]
    return jax.tree.map(lambda w, u: w + horizons[s] * (w - u), newest, last)

  def kept(view, lag):
    if dtype is None or not lag:
      return view
    return jax.tree.map(lambda w: w.astype(dtype).astype(w.dtype), view)

  losses, sums = [], None
  for i, batch in enumerate(zip(inputs, targets, strict=True)):
    lags = schedule.steady_lags[:, 0]
    met = [
      kept(view(s, max(0, i // interval - lags[s])), lags[s])
      for s in range(num_stages)
    ]
    loss, gradients = loss_and_gradients(met, *batch)
    losses.append(loss)
    sums = gradients if sums is None else optax.tree.add(sums, gradients)
    if (i + 1) % interval:
      continue
    for s in range(num_stages):
      mean = jax.tree.map(lambda g: g / interval, sums[s])
      updates, states[s] = update(mean, states[s], versions[s][-1])
      versions[s].append(optax.apply_updates(versions[s][-1], updates))
    sums = None
  return tuple(seen[-1] for seen in versions), np.array(losses)


class AnyOptimizerTest(parameterized.TestCase):
  @parameterized.named_parameters(
    *((name, name, "pb") for name in _OPTIMIZERS),
    ("adam_interval_2", "adam", "pb_interval_2"),
    ("adam_1f1b", "adam", "1f1b"),
  )
  def test_weight_form_is_a_loop_of_workers(self, optimizer, schedule):
    make_optimizer = _OPTIMIZERS[optimizer]
    schedule = _SCHEDULES[schedule]
    horizons = schedule.delay
    with jax.enable_x64(True):
      inputs, targets = chain.samples(_COUNT)
      simulator = pbp.Simulator(
        chain.stages(),
        chain.squared_error,
        optax.chain(
          make_optimizer(),
          pbp.linear_weight_prediction(horizons, form="weight"),
        ),
        schedule,
      )
      state = simulator.init(jax.random.key(0), inputs[0])
      state, metrics = simulator.run(state, inputs, targets)
      params, losses = _loop_of_workers(
        make_optimizer, schedule, horizons, inputs, targets
      )
    chex.assert_trees_all_close(metrics["loss"], losses, rtol=1e-10)
    chex.assert_trees_all_close(state.params, params, atol=1e-10)

  def test_old_weights_may_be_kept_in_less_precision(self):
    schedule = _SCHEDULES["pb"]
    make_optimizer = lambda: optax.sgd(0.05, 0.9)
    with jax.enable_x64(True):
      inputs, targets = chain.samples(_COUNT)
      simulator = pbp.Simulator(
        chain.stages(),
        chain.squared_error,
        make_optimizer(),
        schedule,
        history_dtype=jnp.bfloat16,
      )
      state = simulator.init(jax.random.key(0), inputs[0])
      state, metrics = simulator.run(state, inputs, targets)
      params, losses = _loop_of_workers(
        make_optimizer,
        schedule,
        np.zeros(chain.NUM_STAGES),
        inputs,
        targets,
        jnp.bfloat16,
      )
    rings = jax.tree.leaves(state.history)
    self.assertEqual({leaf.dtype for leaf in rings}, {np.dtype(jnp.bfloat16)})
    chex.assert_trees_all_close(metrics["loss"], losses, rtol=1e-10)
    chex.assert_trees_all_close(state.params, params, atol=1e-10)

  def test_history_of_ints_is_refused(self):
    with self.assertRaisesRegex(ValueError, "history_dtype.*int8"):
      pbp.Simulator(
        chain.stages(),
        chain.squared_error,
        optax.sgd(0.1),
        _SCHEDULES["pb"],
        history_dtype=jnp.int8,
      )

  def test_velocity_form_needs_a_momentum(self):
    optimizer = optax.chain(
      optax.adam(0.1), pbp.linear_weight_prediction(1.0, "velocity", 0.1)
    )
    params = {"w": jnp.ones(2)}
    with self.assertRaisesRegex(ValueError, "trace"):
      pbp.predict_params(optimizer.init(params), params)


if __name__ == "__main__":
  absltest.main()
