"""Measurements of staleness against the run done again step by step."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import pbp_jax as pbp
from tests import chain

_COUNT = 30


def _run(settings, **options):
  simulator = chain.simulator(settings, **options)
  inputs, targets = chain.samples(_COUNT)
  state = chain.started(simulator, inputs[0])
  return simulator.run(state, inputs, targets)


def _states(settings):
  """The state before every micro-batch, and the inputs."""
  simulator = chain.simulator(settings)
  inputs, targets = chain.samples(_COUNT)
  state = chain.started(simulator, inputs[0])
  states = [state]
  step = jax.jit(simulator.step)
  for i in range(_COUNT):
    state, _ = step(state, inputs[i], targets[i])
    states.append(state)
  return states, inputs, targets


def _norm(a, b):
  return np.sqrt(
    sum(np.sum((np.asarray(a[k]) - np.asarray(b[k])) ** 2) for k in a)
  )


class DiagnosticsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("raw", {}), ("predicted", {"lwp": 1, "sc": 1})
  )
  def test_distances_are_those_of_the_states_of_the_run(self, settings):
    with jax.enable_x64(True):
      names = ("weight_distance", "stale_weight_distance")
      _, metrics = _run(settings, diagnostics=names)
      states, _, _ = _states(settings)
      for i in (0, 5, _COUNT - 1):
        for s, delay in enumerate((8, 6, 4, 2, 0)):
          stale = states[max(0, i - delay)]
          view = pbp.predict_params(stale.opt_state, stale.params)
          newest = states[i].params[s]
          np.testing.assert_allclose(
            metrics["weight_distance"][i, s],
            _norm(view[s], newest),
            atol=1e-12,
          )
          np.testing.assert_allclose(
            metrics["stale_weight_distance"][i, s],
            _norm(stale.params[s], newest),
            atol=1e-12,
          )

  def test_lag_is_the_schedules(self):
    _, metrics = _run({}, diagnostics=("lag",))
    lags, _ = pbp.schedules.pipelined_backprop(5).lags(0, _COUNT)
    np.testing.assert_array_equal(metrics["lag"], lags.T)

  def test_gradients_without_delay_are_fresh(self):
    names = ("gradient_cosine", "gradient_norm_ratio")
    _, metrics = _run({"pipelined": False}, diagnostics=names)
    for name in names:
      np.testing.assert_allclose(metrics[name], 1, rtol=1e-5)

  def test_gradient_comparison_is_that_of_both_gradients(self):
    with jax.enable_x64(True):
      names = ("gradient_cosine", "gradient_norm_ratio")
      _, metrics = _run({}, diagnostics=names)
      states, inputs, targets = _states({})
      i = _COUNT - 1
      # Plain momentum: the gradient used is the change of the velocity.
      velocity = lambda state: state.opt_state[0].trace
      used = jax.tree.map(
        lambda new, old: new - chain.MOMENTUM * old,
        velocity(states[i + 1]),
        velocity(states[i]),
      )

      def loss(params):
        x = inputs[i]
        for weights in params:
          x = chain.dense_tanh(weights, x)
        return chain.squared_error(x, targets[i])

      fresh = jax.grad(loss)(states[i].params)
      for s in range(5):
        g = np.concatenate([np.ravel(x) for x in jax.tree.leaves(used[s])])
        f = np.concatenate([np.ravel(x) for x in jax.tree.leaves(fresh[s])])
        norms = np.linalg.norm(g), np.linalg.norm(f)
        np.testing.assert_allclose(
          metrics["gradient_cosine"][i, s], g @ f / norms[0] / norms[1]
        )
        np.testing.assert_allclose(
          metrics["gradient_norm_ratio"][i, s], norms[0] / norms[1]
        )

  def test_asking_changes_no_number_of_the_run(self):
    plain, metrics = _run({"lwp": 1, "sc": 1})
    asked, more = _run(
      {"lwp": 1, "sc": 1}, diagnostics=tuple(pbp.diagnostics.NAMES)
    )
    np.testing.assert_allclose(metrics["loss"], more["loss"], rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      plain.params,
      asked.params,
    )

  def test_a_stage_without_parameters_counts_as_fresh(self):
    stages = (*chain.stages(), pbp.as_stages([jnp.tanh])[0])
    simulator = pbp.Simulator(
      stages,
      chain.squared_error,
      chain.optimizer({}, 1),
      pbp.schedules.pipelined_backprop(6),
      diagnostics=tuple(pbp.diagnostics.NAMES),
    )
    inputs, targets = chain.samples(_COUNT)
    state = chain.started(simulator, inputs[0])
    _, metrics = simulator.run(state, inputs, targets)
    np.testing.assert_array_equal(metrics["gradient_cosine"][:, 5], 1)
    np.testing.assert_array_equal(metrics["weight_distance"][:, 5], 0)
    self.assertTrue(np.isfinite(metrics["gradient_norm_ratio"]).all())

  def test_histogram_counts_every_lag(self):
    schedule = pbp.schedules.jittered_delays([3, 1, 0], jitter=1, seed=3)
    counts = pbp.diagnostics.delay_histogram(schedule, 0, 200)
    lags, _ = schedule.lags(0, 200)
    for s in range(3):
      for lag in range(counts.shape[1]):
        self.assertEqual(counts[s, lag], (lags[s] == lag).sum())

  def test_an_unknown_name_is_refused_with_the_list(self):
    with self.assertRaisesRegex(ValueError, "weight_distance.*got"):
      chain.simulator({}, diagnostics=("weights",))


if __name__ == "__main__":
  absltest.main()
