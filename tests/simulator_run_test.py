"""Runs as values: chunks, replicas, donation, tracing, memory."""

import dataclasses
import warnings

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain, xla

_COUNT = 20
_LWP_SC = {"lwp": 1.0, "sc": 1.0}


def _noisy_dense(params, x, key):
  noise = 0.0 if key is None else 0.1 * jax.random.normal(key, (1, 4))
  return chain.dense_tanh(params, x) + noise


def _averaging_dense(params, state, x):
  state = 0.9 * state + 0.1 * jnp.mean(x)
  return chain.dense_tanh(params, x - state), state


def _stages_of_all_kinds():
  """The chain with a stochastic stage and one that has a state."""
  stages = list(chain.stages())
  stages[1] = dataclasses.replace(
    stages[1], apply=_noisy_dense, stochastic=True
  )
  stages[2] = dataclasses.replace(
    stages[2],
    apply=_averaging_dense,
    init_state=lambda key, x: jnp.zeros([]),
  )
  return stages


def _simulator(schedule, stages=None, backward="saved"):
  return pbp.Simulator(
    stages or chain.stages(),
    chain.squared_error,
    chain.optimizer(_LWP_SC, schedule.delay),
    schedule,
    backward=backward,
  )


def _pb(update_interval=1):
  return pbp.schedules.pipelined_backprop(chain.NUM_STAGES, update_interval)


def _without_period(schedule):
  return dataclasses.replace(schedule, period=None)


def _started(simulator, seed=0):
  return simulator.init(jax.random.key(seed), jnp.zeros((1, 3)))


def _assert_same_bits(got, expected):
  def compare(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)

  jax.tree.map(compare, got, expected)


class ChunksTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("every_micro_batch", _pb()),
    ("every_third", _pb(3)),
    ("stashed", _pb(3).with_weight_stashing()),
    ("without_period", _without_period(_pb(3))),
  )
  def test_chunks_make_one_run_bit_for_bit(self, schedule):
    """Chunks of five end while the pipeline fills, and within an interval."""
    simulator = _simulator(schedule, _stages_of_all_kinds())
    data = chain.samples(_COUNT)
    start = _started(simulator)
    whole, metrics = simulator.run(start, *data)
    state, losses = start, []
    for begin in range(0, _COUNT, 5):
      chunk = [leaf[begin : begin + 5] for leaf in data]
      state, chunk_metrics = simulator.run(state, *chunk)
      losses.append(chunk_metrics["loss"])
    _assert_same_bits(np.concatenate(losses), np.asarray(metrics["loss"]))
    _assert_same_bits(state, whole)

  def test_steps_make_a_run(self):
    simulator = _simulator(_pb(3), _stages_of_all_kinds())
    inputs, targets = chain.samples(8)
    start = _started(simulator)
    whole, metrics = simulator.run(start, inputs, targets)
    step = jax.jit(simulator.step)
    state = start
    for i in range(8):
      state, one = step(state, inputs[i], targets[i])
      np.testing.assert_allclose(one["loss"], metrics["loss"][i], atol=1e-6)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      state.params,
      whole.params,
    )

  def test_lags_from_a_table_are_those_of_the_period(self):
    data = chain.samples(_COUNT)
    results = [
      (simulator := _simulator(schedule)).run(_started(simulator), *data)
      for schedule in (_pb(3), _without_period(_pb(3)))
    ]
    _assert_same_bits(*results)

  def test_lags_from_a_table_may_vary_without_a_pattern(self):
    """A jitter between one and three versions, seen in the losses."""
    lags = np.random.default_rng(0).integers(1, 4, size=_COUNT)
    schedule = dataclasses.replace(
      _without_period(pbp.schedules.uniform_delay(chain.NUM_STAGES, 3)),
      lag_function=lambda i: np.broadcast_to(lags[i], (5, len(i))),
    )
    # Version k of every weight is the initial one plus 0.01 k.
    counting = optax.stateless(
      lambda updates, _: jax.tree.map(lambda u: 0.01 + 0 * u, updates)
    )
    simulator = pbp.Simulator(
      chain.stages(), chain.squared_error, counting, schedule
    )
    inputs, targets = chain.samples(_COUNT)
    start = _started(simulator)
    _, metrics = simulator.run(start, inputs, targets)
    for i in range(_COUNT):
      version = max(0, i - lags[i])
      params = jax.tree.map(lambda w, k=version: w + 0.01 * k, start.params)
      loss = chain.squared_error(
        simulator.predict(params, inputs[i]), targets[i]
      )
      np.testing.assert_allclose(metrics["loss"][i], loss, rtol=1e-5)

  def test_lags_from_a_table_may_be_given_under_jit(self):
    schedule = _without_period(_pb(3))
    simulator = _simulator(schedule)
    data = chain.samples(_COUNT)
    start = _started(simulator)
    _, expected = simulator.run(start, *data)
    lags, _ = schedule.lags(0, _COUNT)
    run = jax.jit(lambda state: simulator.run(state, *data, lags=lags)[1])
    np.testing.assert_allclose(
      run(start)["loss"], expected["loss"], rtol=0, atol=1e-6
    )

  def test_a_partial_update_waits_in_the_state(self):
    simulator = _simulator(_pb(3))
    start = _started(simulator)
    two, _ = simulator.run(start, *chain.samples(2))
    _assert_same_bits(two.params, start.params)
    three, _ = simulator.run(start, *chain.samples(3))
    self.assertTrue((three.params[4]["w"] != start.params[4]["w"]).all())

  @parameterized.named_parameters(
    ("every_micro_batch", _pb()), ("every_third", _pb(3))
  )
  def test_a_state_keeps_its_structure_shapes_and_dtypes(self, schedule):
    simulator = _simulator(schedule, _stages_of_all_kinds())
    start = jax.eval_shape(lambda: _started(simulator))
    end, _ = jax.eval_shape(simulator.run, start, *chain.samples(4))
    kind = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type)
    self.assertEqual(jax.tree.map(kind, end), jax.tree.map(kind, start))

  def test_nothing_that_is_given_is_changed(self):
    simulator = _simulator(_pb())
    data = chain.samples(4)
    start = _started(simulator)
    before = jax.tree.map(jnp.array, (start.params, data))
    simulator.run(start, *data)
    _assert_same_bits((start.params, data), before)


class ReplicasTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("every_micro_batch", _pb()),
    ("every_third_without_period", _without_period(_pb(3))),
  )
  def test_seeds_by_vmap_are_each_alone(self, schedule):
    simulator = _simulator(schedule, _stages_of_all_kinds())
    data = chain.samples(_COUNT)
    together, metrics = _run_seeds(simulator, data)
    self.assertEqual(together.step.shape, ())
    for seed in range(3):
      alone, lone_metrics = simulator.run(_started(simulator, seed), *data)
      np.testing.assert_allclose(
        metrics["loss"][seed], lone_metrics["loss"], rtol=1e-4, atol=1e-5
      )
      jax.tree.map(
        lambda a, b, seed=seed: np.testing.assert_allclose(
          a[seed], b, rtol=1e-4, atol=1e-5
        ),
        together.params,
        alone.params,
      )
    self.assertTrue((metrics["loss"][0] != metrics["loss"][1]).all())

  def test_rings_of_replicas_are_sliced_and_not_gathered(self):
    simulator = _simulator(_pb())
    run = jax.jit(lambda data: _run_seeds(simulator, data)[1])
    text = run.lower(chain.samples(4)).compile(xla.AS_ELSEWHERE).as_text()
    self.assertIn(" dynamic-update-slice(", text)
    self.assertNotIn(" gather(", text)
    self.assertNotIn(" scatter(", text)

  def test_traced_hyperparameters_by_vmap_are_a_loop(self):
    schedule = _pb()
    data = chain.samples(_COUNT)

    def losses(rate, momentum, scale):
      simulator = pbp.Simulator(
        chain.stages(),
        chain.squared_error,
        optax.chain(
          pbp.spike_compensation(momentum, delay=scale * schedule.delay),
          optax.scale_by_learning_rate(rate),
          pbp.linear_weight_prediction(
            horizon=scale * schedule.delay, learning_rate=rate
          ),
        ),
        schedule,
      )
      return simulator.run(_started(simulator), *data)[1]["loss"]

    values = jnp.array([[0.01, 0.02], [0.9, 0.8], [1.0, 0.5]])
    together = jax.jit(jax.vmap(losses))(*values)
    for j in range(2):
      alone = losses(*(float(value) for value in values[:, j]))
      np.testing.assert_allclose(together[j], alone, rtol=1e-4, atol=1e-5)
    self.assertGreater(np.abs(together[0] - together[1])[2:].min(), 1e-5)

  @parameterized.named_parameters(
    ("without_delay", pbp.schedules.fill_drain(chain.NUM_STAGES, 2)),
    ("stashed", _pb().with_weight_stashing()),
  )
  def test_reverse_mode_goes_through_a_run_of_equal_versions(self, schedule):
    self.enter_context(jax.enable_x64(True))
    data = chain.samples(_COUNT)

    def total_loss(rate):
      simulator = pbp.Simulator(
        chain.stages(), chain.squared_error, optax.sgd(rate, 0.9), schedule
      )
      return simulator.run(_started(simulator), *data)[1]["loss"].sum()

    loss_and_slope = jax.jit(jax.value_and_grad(total_loss))
    _, slope = loss_and_slope(0.02)
    step = 1e-6
    more, _ = loss_and_slope(0.02 + step)
    less, _ = loss_and_slope(0.02 - step)
    measured = (more - less) / 2 / step
    np.testing.assert_allclose(slope, measured, rtol=1e-6)


def _run_seeds(simulator, data):
  axes = pbp.PipelineState.vmap_axes()
  keys = jnp.stack([jax.random.key(seed) for seed in range(3)])
  states = jax.vmap(simulator.init, (0, None), axes)(keys, data[0][0])
  run = jax.vmap(simulator.run, (axes, None, None), (axes, 0))
  return run(states, *data)


class CompiledTest(parameterized.TestCase):
  def test_donation_uses_the_state_up_and_changes_no_number(self):
    simulator = _simulator(_pb())
    data = chain.samples(4)
    kept, metrics = simulator.run(_started(simulator), *data)
    start = _started(simulator)
    donated, donated_metrics = simulator.run(start, *data, donate=True)
    _assert_same_bits((donated, donated_metrics), (kept, metrics))
    self.assertTrue(start.params[0]["w"].is_deleted())

  def test_donation_is_off_under_an_outer_jit(self):
    simulator = _simulator(_pb())
    data = chain.samples(4)
    start = _started(simulator)
    run = jax.jit(lambda state: simulator.run(state, *data, donate=True))
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      run(start)
    self.assertFalse(start.params[0]["w"].is_deleted())

  def test_a_second_run_does_not_trace_again(self):
    traces = []

    def counting(params, x):
      traces.append(x.shape)
      return chain.dense_tanh(params, x)

    stages = list(chain.stages())
    stages[0] = dataclasses.replace(stages[0], apply=counting)
    simulator = _simulator(_pb(3), stages)
    data = chain.samples(8)
    state, _ = simulator.run(_started(simulator), *data)
    before = len(traces)
    self.assertGreater(before, 0)
    simulator.run(state, *data)
    self.assertLen(traces, before)

  @parameterized.named_parameters(
    ("every_micro_batch", 1, False),
    ("every_third", 3, False),
    ("stashed", 1, True),
  )
  def test_a_run_holds_no_temporary_of_the_size_of_a_ring(
    self, interval, stashed
  ):
    """Weights of 64 KiB in rings of 128: XLA has to update them in place."""
    width, stages, slots = 128, 3, 128
    weights = width * width * 4
    schedule = pbp.schedules.uniform_delay(
      stages, (slots - 1) * interval, interval
    ).with_consistency("stashed" if stashed else "inconsistent")
    simulator = pbp.Simulator(
      [chain.given({"w": np.eye(width), "b": np.zeros(width)})] * stages,
      chain.squared_error,
      optax.sgd(0.1, 0.9),
      schedule,
    )
    data = jnp.zeros((2, 16, 1, width))
    state = jax.eval_shape(simulator.init, jax.random.key(0), data[0, 0])
    run = jax.jit(simulator.run, donate_argnums=0)
    compiled = run.lower(state, *data).compile(xla.AS_ELSEWHERE)
    memory = compiled.memory_analysis()
    ring = slots * weights
    self.assertGreater(memory.argument_size_in_bytes, stages * (ring - weights))
    # A few copies of all weights: gradients, both versions, updates.
    self.assertLess(memory.temp_size_in_bytes, 8 * stages * weights)
    self.assertLess(memory.temp_size_in_bytes, ring / 2)


if __name__ == "__main__":
  absltest.main()
