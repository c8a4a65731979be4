"""Links that change gradients and updates, against NumPy, link by link."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_STEPS = 5


def _tree(rng):
  """Three stages: a matrix and a vector, nothing, a scalar."""
  return (
    {"w": rng.normal(size=(2, 3)), "b": rng.normal(size=3)},
    {},
    {"w": rng.normal(size=())},
  )


def _steps():
  """Gradients, newest and stale weights of a few updates."""
  rng = np.random.default_rng(3)
  return [(_tree(rng), _tree(rng), _tree(rng)) for _ in range(_STEPS)]


def _run(link, steps, dtype=None):
  """What a link makes of the gradients."""
  cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
  link = optax.with_extra_args_support(link)
  state = link.init(cast(steps[0][1]))
  outputs = []
  for gradients, params, stale in steps:
    updates, state = link.update(
      cast(gradients), state, cast(params), stale_params=cast(stale)
    )
    outputs.append(updates)
  return outputs


# ---- The formulas once more, in NumPy, for one leaf: leaf, stage s of 3.
# Each is a function of the stage that returns step(t, g, w, w_stale, memory),
# with a dictionary that lasts from step to step.


def _shrink(factor):
  return lambda s: lambda t, g, w, stale, memory: g * factor ** (2 - s)


def _by_stage(factors):
  return lambda s: lambda t, g, w, stale, memory: g * factors[s]


def _stage_rates(offset):
  return _by_stage([offset + (1 - offset) * s / 3 for s in range(3)])


def _staleness(delays, steps=None):
  def stage(s):
    def step(t, g, w, stale, memory):
      power = 1.0 if steps is None else 1.0 - min(t / steps, 1.0)
      return g / max(delays[s], 1.0) ** power

    return step

  return stage


def _feedback(strengths):
  def stage(s):
    def step(t, g, w, stale, memory):
      last = memory.get("last", g)
      memory["last"] = g
      return g + strengths[s] * (g - last)

    return step

  return stage


def _compensation(strengths):
  return lambda s: (
    lambda t, g, w, stale, memory: g + strengths[s] * g * g * (w - stale)
  )


def _adaptive_compensation(strength, decay, epsilon):
  def stage(s):
    def step(t, g, w, stale, memory):
      memory["ms"] = decay * memory.get("ms", 0.0) + (1 - decay) * g * g
      adapted = strength / np.sqrt(memory["ms"] + epsilon)
      return g + adapted * g * g * (w - stale)

    return step

  return stage


def _gap(momentum, rate, decay, epsilon):
  def stage(s):
    def step(t, g, w, stale, memory):
      memory["rate"] = max(memory.get("rate", 0.0), rate(t))
      penalty = 1.0
      if t > 0:
        usual = np.sqrt(memory["ms"] / (1 - decay**t)) + epsilon
        penalty += np.abs(w - stale) / (memory["rate"] * usual)
      memory["v"] = momentum * memory.get("v", 0.0) + g / penalty
      memory["ms"] = (
        decay * memory.get("ms", 0.0) + (1 - decay) * memory["v"] ** 2
      )
      return g / penalty

    return step

  return stage


_RISING = lambda count: 0.1 + 0.05 * count
_FALLING = lambda count: 0.3 / (1 + count)

# name: (link, the same in NumPy).
_FORMULAS = {
  "shrink_half": (pbp.shrink_gradients(0.5), _shrink(0.5)),
  "shrink_little": (pbp.shrink_gradients(0.8), _shrink(0.8)),
  "shrink_given_hops": (
    pbp.shrink_gradients(0.8, hops=[4, 0, 1]),
    _by_stage([0.8**4, 1, 0.8]),
  ),
  "stage_factors": (pbp.scale_by_stage([3.0, 1, -2]), _by_stage([3, 1, -2])),
  "graphcore_rates": (
    pbp.scale_by_stage(pbp.stage_rate_factors(3)),
    _stage_rates(0.25),
  ),
  "graphcore_rates_of_an_offset": (
    pbp.scale_by_stage(pbp.stage_rate_factors(3, offset=0.6)),
    _stage_rates(0.6),
  ),
  "staleness": (
    pbp.scale_by_staleness([4.0, 2.0, 0.5]),
    _staleness([4.0, 2.0, 0.5]),
  ),
  "staleness_of_all": (
    pbp.scale_by_staleness(7),
    _staleness([7, 7, 7]),
  ),
  "pipemare_t1": (
    pbp.scale_by_staleness([4, 2, 0], annealing_steps=3),
    _staleness([4, 2, 0], 3),
  ),
  "pipemare_t1_slow": (
    pbp.scale_by_staleness([6.5, 2, 1], annealing_steps=40.0),
    _staleness([6.5, 2, 1], 40),
  ),
  "error_feedback": (pbp.error_feedback(), _feedback([1, 1, 1])),
  "error_feedback_by_stage": (
    pbp.error_feedback([0.3, 0.0, 2.0]),
    _feedback([0.3, 0.0, 2.0]),
  ),
  "dc_asgd": (pbp.delay_compensation(), _compensation([0.04] * 3)),
  "dc_asgd_by_stage": (
    pbp.delay_compensation([1.0, 0.0, 0.3]),
    _compensation([1.0, 0.0, 0.3]),
  ),
  "dc_asgd_adaptive": (
    pbp.adaptive_delay_compensation(),
    _adaptive_compensation(2.0, 0.95, 1e-7),
  ),
  "dc_asgd_adaptive_settings": (
    pbp.adaptive_delay_compensation(0.5, decay=0.5, epsilon=1e-2),
    _adaptive_compensation(0.5, 0.5, 1e-2),
  ),
  "gap_aware": (
    pbp.gap_aware(0.9, _RISING),
    _gap(0.9, _RISING, 0.999, 1e-8),
  ),
  "gap_aware_settings": (
    pbp.gap_aware(0.5, _FALLING, decay=0.5, epsilon=1e-2),
    _gap(0.5, _FALLING, 0.5, 1e-2),
  ),
}

# What leaves the gradients as they are; without their neutral setting all of
# these do change them (see the formulas).
_NEUTRAL = {
  "shrink": pbp.shrink_gradients(1.0),
  "stage_factors": pbp.scale_by_stage(1.0),
  "graphcore_rates": pbp.scale_by_stage(pbp.stage_rate_factors(3, offset=1.0)),
  "staleness": pbp.scale_by_staleness(0),
  "staleness_of_one": pbp.scale_by_staleness([1, 1, 0.25]),
  "pipemare_t1": pbp.scale_by_staleness(0, annealing_steps=3),
  "error_feedback": pbp.error_feedback(0.0),
  "dc_asgd": pbp.delay_compensation(0.0),
  "dc_asgd_adaptive": pbp.adaptive_delay_compensation(0.0),
}
_NEED_STALE_PARAMS = {
  "dc_asgd": pbp.delay_compensation(1.0),
  "dc_asgd_adaptive": pbp.adaptive_delay_compensation(1.0),
  "gap_aware": pbp.gap_aware(0.9, 0.1),
}


def _named(table):
  return [(name, name) for name in table]


class FormulasTest(parameterized.TestCase):
  @parameterized.named_parameters(_named(_FORMULAS))
  def test_link_computes_its_formula(self, name):
    link, formula = _FORMULAS[name]
    steps = _steps()
    memories = jax.tree.map(lambda _: {}, steps[0][0])
    with jax.enable_x64(True):
      outputs = _run(link, steps)
    for t, (got, (gradients, params, stale)) in enumerate(
      zip(outputs, steps, strict=True)
    ):
      for s, stage in enumerate(gradients):
        for leaf, gradient in stage.items():
          expected = formula(s)(
            t, gradient, params[s][leaf], stale[s][leaf], memories[s][leaf]
          )
          self.assertEqual(got[s][leaf].dtype, np.float64)
          np.testing.assert_allclose(got[s][leaf], expected, rtol=1e-12)

  @parameterized.named_parameters(_named(_NEUTRAL))
  def test_neutral_setting_is_the_identity_bit_for_bit(self, name):
    steps = _steps()
    for got, (gradients, _, _) in zip(
      _run(_NEUTRAL[name], steps, jnp.float32), steps, strict=True
    ):
      jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)),
        got,
        gradients,
      )

  @parameterized.named_parameters(_named(_NEED_STALE_PARAMS))
  def test_weights_that_have_not_moved_leave_the_gradient_alone(self, name):
    steps = [(g, w, w) for g, w, _ in _steps()]
    for got, (gradients, _, _) in zip(
      _run(_NEED_STALE_PARAMS[name], steps, jnp.float32), steps, strict=True
    ):
      jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)),
        got,
        gradients,
      )

  @parameterized.named_parameters(_named(_FORMULAS))
  def test_dtype_of_the_gradients_is_kept(self, name):
    for updates in _run(_FORMULAS[name][0], _steps(), jnp.bfloat16):
      for leaf in jax.tree.leaves(updates):
        self.assertEqual(leaf.dtype, jnp.bfloat16)

  def test_error_feedback_is_optimistic_gradient_on_updates(self):
    optimistic = optax.scale_by_optimistic_gradient(alpha=1.0, beta=0.7)
    with jax.enable_x64(True):
      ours = _run(pbp.error_feedback(0.7), _steps())
      theirs = _run(optimistic, _steps())
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-14),
      ours,
      theirs,
    )

  def test_gap_aware_at_a_rate_of_zero_leaves_the_gradient_alone(self):
    steps = _steps()
    got = _run(pbp.gap_aware(0.9, 0.0), steps, jnp.float32)
    np.testing.assert_array_equal(
      got[2][0]["w"], steps[2][0][0]["w"].astype(np.float32)
    )


class StageScalingTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("defaults", {}, 0.1), ("offset", {"offset": 0.4}, 0.4)
  )
  def test_stage_momenta_compute_their_formula(self, options, q):
    expected = [1 - (1 - 0.9) * (q + (1 - q) * s / 4) for s in range(4)]
    momenta = pbp.stage_momenta(0.9, 4, **options)
    np.testing.assert_allclose(momenta, expected, rtol=1e-15)

  def test_offset_of_one_leaves_all_momenta_alike(self):
    momenta = pbp.stage_momenta(0.75, 3, offset=1.0)
    np.testing.assert_array_equal(momenta, [0.75] * 3)

  def test_stage_momenta_make_momentum_that_differs_by_stage(self):
    momenta = pbp.stage_momenta(0.9, 3)
    by_stage = _run(pbp.spike_compensation(momenta, delay=0), _steps())
    last_alone = _run(optax.trace(float(momenta[2])), _steps())
    np.testing.assert_array_equal(by_stage[4][2]["w"], last_alone[4][2]["w"])


class ClippingTest(parameterized.TestCase):
  def test_a_norm_that_overflows_is_infinite_as_to_optax(self):
    update = jnp.array([3e20, 4e20], jnp.float32)
    for link in (pbp.clip_by_stage_norm(1.0), optax.clip_by_global_norm(1.0)):
      clipped, _ = link.update(update, link.init(update))
      np.testing.assert_array_equal(clipped, [0, 0])


class DerivativesTest(parameterized.TestCase):
  """At the ends of ranges, where formulas have removable gaps."""

  @parameterized.named_parameters(
    ("shrink_factor", lambda x: pbp.shrink_gradients(x, hops=1.0)),
    ("shrink_factor_no_hops", lambda x: pbp.shrink_gradients(x, hops=0.0)),
    ("shrink_hops", lambda x: pbp.shrink_gradients(0.5, hops=x)),
    ("gap_decay", lambda x: pbp.gap_aware(0.5, 0.1, decay=x)),
    ("discrepancy", lambda x: pbp.discrepancy_correction(x, 0.2)),
  )
  def test_derivative_at_zero_is_that_of_differences(self, make):
    self.enter_context(jax.enable_x64(True))

    def total(x):
      link = optax.with_extra_args_support(make(x))
      params = jnp.ones(())
      state, total = link.init(params), 0.0
      for t in range(3):
        update, state = link.update(
          (1.0 + t) * params, state, params, stale_params=0.9 * params
        )
        total += update + pbp.predict_params(state, params, "backward")
      return total

    slope = (total(1e-7) - total(0.0)) / 1e-7
    np.testing.assert_allclose(
      jax.grad(total)(0.0), slope, rtol=2e-6, atol=1e-6
    )


class StaleParamsTest(parameterized.TestCase):
  @parameterized.named_parameters(_named(_NEED_STALE_PARAMS))
  def test_missing_stale_params_are_refused(self, name):
    link = _NEED_STALE_PARAMS[name]
    params = jnp.ones(2)
    with self.assertRaisesRegex(ValueError, "needs the extra.*stale_params"):
      link.update(params, link.init(params), params)

  @parameterized.named_parameters(_named(_NEED_STALE_PARAMS))
  def test_missing_params_are_refused(self, name):
    link = _NEED_STALE_PARAMS[name]
    params = jnp.ones(2)
    with self.assertRaisesRegex(ValueError, "needs params, the newest"):
      link.update(params, link.init(params), stale_params=params)

  @parameterized.named_parameters(_named(_NEED_STALE_PARAMS))
  def test_stale_params_of_other_parameters_are_refused(self, name):
    link = _NEED_STALE_PARAMS[name]
    params = {"a": jnp.ones(2), "b": jnp.ones(1)}
    with self.assertRaisesRegex(ValueError, r"stale_params .*\['b'\]"):
      link.update(
        params, link.init(params), params, stale_params={"a": jnp.ones(2)}
      )

  @parameterized.named_parameters(_named(_NEED_STALE_PARAMS))
  def test_masked_link_takes_whole_stale_params(self, name):
    link = _NEED_STALE_PARAMS[name]
    mask = ({"w": True, "b": False}, {}, {"w": True})
    steps = _steps()
    masked = _run(optax.masked(link, mask), steps, jnp.float32)
    whole = _run(link, steps, jnp.float32)
    np.testing.assert_array_equal(masked[3][0]["w"], whole[3][0]["w"])
    np.testing.assert_array_equal(masked[3][2]["w"], whole[3][2]["w"])
    raw = steps[3][0][0]["b"].astype(np.float32)
    np.testing.assert_array_equal(masked[3][0]["b"], raw)

  @parameterized.named_parameters(
    (f"{name}_every_{interval}", name, interval)
    for name in _NEED_STALE_PARAMS
    for interval in (1, 2)
  )
  def test_simulator_tells_what_the_forward_passes_met(self, name, interval):
    """Against a loop that keeps all versions of one stage's weights."""
    self.enter_context(jax.enable_x64(True))
    delay, count, rate = 2, 12, 0.3
    optimizer = optax.chain(_NEED_STALE_PARAMS[name], optax.sgd(rate))
    schedule = pbp.schedules.uniform_delay(1, delay)
    if interval > 1:
      schedule = pbp.schedules.from_delays([delay], interval)
    schedule = schedule.with_weight_stashing()
    stage = pbp.Stage(
      init=lambda key, x: {"w": jnp.array([0.5, -0.25])},
      apply=lambda params, x: jnp.tanh(x @ params["w"]),
    )
    inputs = jax.random.normal(jax.random.key(0), (count, 2))
    loss_fn = lambda y, target: (y - target) ** 2
    simulator = pbp.Simulator([stage], loss_fn, optimizer, schedule)
    state = simulator.init(jax.random.key(0), inputs[0])
    state, _ = simulator.run(state, inputs, jnp.ones(count))

    params = ({"w": jnp.array([0.5, -0.25])},)
    opt_state, versions = optimizer.init(params), [params]
    gradient_of = jax.jit(
      jax.grad(lambda p, x: loss_fn(stage.apply(p[0], x), 1.0))
    )
    mean = lambda trees: jax.tree.map(lambda *x: sum(x) / interval, *trees)
    for first in range(0, count, interval):
      met = [
        versions[max(0, (i - delay) // interval)]
        for i in range(first, first + interval)
      ]
      gradients = mean(
        [gradient_of(p, inputs[first + j]) for j, p in enumerate(met)]
      )
      updates, opt_state = optimizer.update(
        gradients, opt_state, params, stale_params=mean(met)
      )
      params = optax.apply_updates(params, updates)
      versions.append(params)
    np.testing.assert_allclose(state.params[0]["w"], params[0]["w"], rtol=2e-6)


class RefusalsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("shrink_factor", lambda: pbp.shrink_gradients(1.5), "factor"),
    ("shrink_factors", lambda: pbp.shrink_gradients([0.5, 0.5]), "factor"),
    ("shrink_hops", lambda: pbp.shrink_gradients(0.5, hops=-1), "hops"),
    ("errors_factor", lambda: pbp.shrink_errors([jnp.sin], -0.5), "factor"),
    ("stages", lambda: pbp.stage_rate_factors(0), "num_stages"),
    ("rate_offset", lambda: pbp.stage_rate_factors(2, offset=2.0), "offset"),
    ("momentum", lambda: pbp.stage_momenta(1.5, 2), "momentum"),
    ("momentum_offset", lambda: pbp.stage_momenta(0.9, 2, -0.1), "offset"),
    ("stage_factor", lambda: pbp.scale_by_stage("all"), "factor"),
    ("delay", lambda: pbp.scale_by_staleness(-1), "delay"),
    ("steps", lambda: pbp.scale_by_staleness(1, 0), "annealing_steps"),
    ("feedback", lambda: pbp.error_feedback(-1.0), "strength"),
    ("dc", lambda: pbp.delay_compensation(-1.0), "strength"),
    ("dca", lambda: pbp.adaptive_delay_compensation(-1.0), "strength"),
    (
      "dca_decay",
      lambda: pbp.adaptive_delay_compensation(decay=1.5),
      "decay",
    ),
    (
      "dca_epsilon",
      lambda: pbp.adaptive_delay_compensation(epsilon=0.0),
      "epsilon",
    ),
    ("gap_momentum", lambda: pbp.gap_aware(2.0, 0.1), "momentum"),
    ("gap_rate", lambda: pbp.gap_aware(0.9, -0.1), "learning_rate"),
    ("gap_decay", lambda: pbp.gap_aware(0.9, 0.1, decay=1.0), "decay"),
    ("gap_epsilon", lambda: pbp.gap_aware(0.9, 0.1, epsilon=0.0), "epsilon"),
  )
  def test_number_out_of_range_is_refused(self, make, argument):
    with self.assertRaisesRegex(ValueError, f"^{argument} must "):
      make()

  def test_shrinking_needs_stages_or_hops(self):
    link = pbp.shrink_gradients(0.5)
    with self.assertRaisesRegex(ValueError, "needs hops.*dict"):
      link.update({"w": jnp.ones(2)}, optax.EmptyState())


if __name__ == "__main__":
  absltest.main()
