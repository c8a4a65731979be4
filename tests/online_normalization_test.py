"""Online Normalization, and states that the backward pass advances."""

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax.models import online_normalization
from tests import chain
from tests.reference import optimizers, pipeline, timetables
from tests.reference import stages as reference_stages

_DECAYS = {"forward_decay": 0.9, "backward_decay": 0.8, "epsilon": 1e-3}


def _start(channels):
  """A state that no symmetry of zeros and ones hides."""
  rng = np.random.default_rng(5)
  return {
    "mean": rng.normal(size=channels),
    "variance": rng.uniform(0.5, 2.0, channels),
    "u": rng.normal(size=channels),
    "v": rng.normal(size=channels),
  }


def _as_stage_state(state):
  arrays = {name: jnp.asarray(value) for name, value in state.items()}
  names = lambda *names: {name: arrays[name] for name in names}
  return {
    "forward_state": names("mean", "variance"),
    "backward_state": pbp.BackwardState(names("u", "v")),
  }


def _flat(stage_state):
  return {
    **stage_state["forward_state"],
    **stage_state["backward_state"].value,
  }


def _assert_close(got, expected, rtol=1e-10):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol),
    got,
    expected,
  )


class NormTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(
    ("image", (1, 3, 2, 4)), ("vector", (1, 4)), ("several_samples", (3, 2, 4))
  )
  def test_some_micro_batches_equal_the_equations(self, shape):
    rng = np.random.default_rng(0)
    params = {"scale": rng.normal(size=4), "bias": rng.normal(size=4)}
    expected = _start(4)
    state = _as_stage_state(expected)
    twin = reference_stages.online_norm(expected, **_DECAYS)
    stage = pbp.stateful_stage(online_normalization.OnlineNorm(**_DECAYS))

    @jax.jit
    def passes(params, state, x, dy):
      def forward(params, x, backward):
        state_now = {**state, "backward_state": backward}
        return stage.apply(params, state_now, x)

      y, pullback, state_after = jax.vjp(
        forward, params, x, state["backward_state"], has_aux=True
      )
      grads, dx, backward = pullback(dy)
      return y, grads, dx, {**state_after, "backward_state": backward}

    for _ in range(5):
      x, dy = rng.normal(size=shape), rng.normal(size=shape)
      y, grads, dx, state = passes(params, state, x, dy)
      y_twin, saved = twin.forward(params, x)
      grads_twin, dx_twin = twin.backward(params, saved, dy)
      _assert_close((y, grads, dx), (y_twin, grads_twin, dx_twin))
      _assert_close(_flat(state), expected)

  def test_starts_as_published(self):
    stage = pbp.stateful_stage(online_normalization.OnlineNorm())
    x = jnp.ones((1, 5, 3))
    state = _flat(stage.init_state(jax.random.key(0), x))
    zeros, ones = np.zeros(3), np.ones(3)
    expected = {"mean": zeros, "variance": ones, "u": zeros, "v": zeros}
    _assert_close(state, expected)
    module = online_normalization.OnlineNorm()
    self.assertEqual(
      (module.forward_decay, module.backward_decay, module.epsilon),
      (0.999, 0.99, 1e-5),
    )

  def test_statistics_and_outputs_settle_at_the_truth(self):
    """Mean 3, deviation 2, decays of a hundred samples."""
    norm = online_normalization.OnlineNorm(forward_decay=0.99)
    stage = pbp.stateful_stage(norm)
    inputs = 3 + 2 * jax.random.normal(jax.random.key(0), (1000, 1, 16, 2))
    params = stage.init(jax.random.key(0), inputs[0])
    state = stage.init_state(jax.random.key(0), inputs[0])
    advance = lambda state, x: (stage.apply(params, state, x)[1], None)
    state, _ = jax.lax.scan(advance, state, inputs)
    forward = state["forward_state"]
    np.testing.assert_allclose(forward["mean"], 3, atol=0.2)
    np.testing.assert_allclose(forward["variance"], 4, atol=0.4)

  def test_half_precision_stays_half_with_a_state_in_single(self):
    norm = online_normalization.OnlineNorm()
    x = jnp.ones((1, 4, 2), jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x)
    variables = {
      **variables,
      "params": jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), variables["params"]
      ),
    }
    y, _ = norm.apply(variables, x, mutable=["forward_state"])
    self.assertEqual(y.dtype, jnp.bfloat16)
    self.assertEqual(variables["backward_state"]["u"].dtype, jnp.float32)


class TwinTest(parameterized.TestCase):
  """The scan against the pipeline with wires: delay keeps the order."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(
    ("saved", "saved", 1),
    ("saved_every_third", "saved", 3),
    ("recompute", "recompute", 1),
    ("stashed", "stashed", 1),
  )
  def test_equals_the_pipeline_by_ticks(self, consistency, interval):
    rng = np.random.default_rng(1)
    width, count = 3, 30
    kinds = ["dense", "norm", "dense", "norm", "dense"]
    params, states = [], []
    for kind in kinds:
      vector = lambda: rng.normal(size=width)
      is_norm = kind == "norm"
      params.append(
        {"scale": vector(), "bias": vector()}
        if is_norm
        else {"w": rng.normal(size=(width, width)), "b": vector()}
      )
      states.append(_start(width) if is_norm else None)
    inputs, targets = rng.normal(size=(2, count, 2, width))

    norm = pbp.stateful_stage(online_normalization.OnlineNorm(**_DECAYS))
    stages = [
      pbp.Stage(
        init=lambda key, x, p=p: jax.tree.map(jnp.asarray, p),
        apply=norm.apply,
        init_state=lambda key, x, state=state: state,
      )
      if state
      else chain.given(p)
      for p, state in zip(
        params, [s and _as_stage_state(s) for s in states], strict=True
      )
    ]
    schedule = pbp.schedules.pipelined_backprop(len(kinds), interval)
    if consistency == "stashed":
      schedule = schedule.with_weight_stashing()
    simulator = pbp.Simulator(
      stages,
      chain.squared_error,
      optax.sgd(0.02, 0.5),
      schedule,
      backward=consistency,
    )
    state = simulator.init(jax.random.key(0), inputs[0])
    for part in (slice(0, 7), slice(7, count)):
      state, metrics = simulator.run(state, inputs[part], targets[part])

    expected = pipeline.run(
      timetables.pipelined_backprop(len(kinds), count),
      [
        reference_stages.online_norm(s, **_DECAYS)
        if s
        else reference_stages.dense_tanh
        for s in states
      ],
      params,
      optimizers.sgdm(0.02, 0.5),
      reference_stages.squared_error,
      inputs,
      targets,
      update_interval=interval,
      consistency=consistency,
    )
    _assert_close(metrics["loss"], expected.losses[7:])
    _assert_close(list(state.params), expected.params)
    for got, wanted in zip(state.stage_state, states, strict=True):
      if wanted:
        _assert_close(_flat(got), wanted)


@jax.custom_vjp
def _count_errors(x, count):
  del count
  return x


_count_errors.defvjp(
  lambda x, count: (x, count), lambda count, error: (error, count + 1)
)
_COUNTING = pbp.Stage(
  init=lambda key, x: {"w": jnp.ones([])},
  apply=lambda params, state, x: (
    _count_errors(params["w"] * x, state["count"].value),
    {**state, "seen": state["seen"] + 1},
  ),
  init_state=lambda key, x: {
    "count": pbp.BackwardState(jnp.zeros([])),
    "seen": jnp.zeros([], jnp.int32),
  },
)


class BackwardStateTest(parameterized.TestCase):
  def _simulator(self, stages, **options):
    return pbp.Simulator(
      stages,
      lambda y, t: jnp.sum(y),
      optax.sgd(0.0),
      pbp.schedules.pipelined_backprop(len(stages), update_interval=2),
      **options,
    )

  @parameterized.named_parameters(
    ("saved", {"backward": "saved"}),
    ("recompute", {"backward": "recompute"}),
    ("measured", {"diagnostics": ("gradient_cosine",)}),
  )
  def test_advances_once_a_micro_batch(self, options):
    simulator = self._simulator([_COUNTING, _COUNTING], **options)
    state = simulator.init(jax.random.key(0), jnp.ones(3))
    state, _ = simulator.run(state, jnp.ones((5, 3)), jnp.ones(5))
    for stage_state in state.stage_state:
      self.assertEqual(stage_state["count"].value, 5)
      self.assertEqual(stage_state["seen"], 5)

  def test_advances_in_every_seed(self):
    simulator = self._simulator([_COUNTING])
    axes = pbp.PipelineState.vmap_axes()
    init = jax.vmap(simulator.init, (0, None), axes)
    state = init(jax.random.split(jax.random.key(0), 3), jnp.ones(3))
    run = jax.vmap(simulator.run, (axes, None, None), (axes, 0))
    state, _ = run(state, jnp.ones((5, 3)), jnp.ones(5))
    np.testing.assert_array_equal(state.stage_state[0]["count"].value, [5] * 3)

  def test_counts_through_a_stage_that_shrinks_its_errors(self):
    simulator = self._simulator(pbp.shrink_errors([_COUNTING], 0.5))
    state = simulator.init(jax.random.key(0), jnp.ones(3))
    state, _ = simulator.run(state, jnp.ones((5, 3)), jnp.ones(5))
    self.assertEqual(state.stage_state[0]["count"].value, 5)

  def test_refuses_what_has_no_gradient(self):
    stage = pbp.Stage(
      init=lambda key, x: {},
      apply=lambda params, state, x: (x, state),
      init_state=lambda key, x: pbp.BackwardState(jnp.zeros([], jnp.int32)),
    )
    simulator = self._simulator([stage])
    state = simulator.init(jax.random.key(0), jnp.ones(3))
    with self.assertRaisesRegex(ValueError, "BackwardState.*floating.*int32"):
      simulator.run(state, jnp.ones((5, 3)), jnp.ones(5))


class _Noisy(nn.Module):
  """Dropout that counts its calls."""

  @nn.compact
  def __call__(self, x, deterministic):
    seen = self.variable("forward_state", "seen", jnp.zeros, ())
    if not self.is_initializing():
      seen.value += 1
    return nn.Dropout(0.5)(x, deterministic=deterministic)


class StatefulStageTest(absltest.TestCase):
  def test_a_module_may_have_both_noise_and_state(self):
    stage = pbp.stateful_stage(_Noisy())
    self.assertTrue(stage.stochastic)
    x = jnp.ones(100)
    state = stage.init_state(jax.random.key(0), x)
    y, state = stage.apply({}, state, x, jax.random.key(1))
    self.assertEqual(set(np.unique(y)), {0.0, 2.0})
    y, state = stage.apply({}, state, x, None)
    np.testing.assert_array_equal(y, x)
    self.assertEqual(state["forward_state"]["seen"], 2)

  def test_a_module_without_a_state_has_an_empty_one(self):
    stage = pbp.stateful_stage(nn.Dense(2))
    x = jnp.ones((1, 3))
    params = stage.init(jax.random.key(0), x)
    state = stage.init_state(jax.random.key(0), x)
    self.assertEmpty(jax.tree.leaves(state))
    y, after = stage.apply(params, state, x)
    self.assertEqual(jax.tree.structure(after), jax.tree.structure(state))
    np.testing.assert_array_equal(y, nn.Dense(2).apply({"params": params}, x))

  def test_running_statistics_of_batches_are_refused(self):
    stage = pbp.stateful_stage(nn.BatchNorm(use_running_average=False))
    with self.assertRaisesRegex(ValueError, "BatchNorm.*batch_stats"):
      stage.init(jax.random.key(0), jnp.ones((1, 3)))


if __name__ == "__main__":
  absltest.main()
