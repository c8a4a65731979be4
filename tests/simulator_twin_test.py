"""The scan against the tick-level twin, on a chain with a residual branch."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain
from tests.reference import optimizers, pipeline, timetables
from tests.reference import stages as reference_stages


def _run(simulator, inputs, targets):
  state = chain.started(simulator, inputs[0])
  state, metrics = simulator.run(state, inputs, targets)
  return np.asarray(metrics["loss"]), state.params


def _assert_close(got, expected, atol):
  got, expected = list(got), list(expected)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol),
    got,
    expected,
  )


# A longer chain with a residual branch and a parameter-free loss stage.
_WIDTH, _COUNT, _BATCH = 3, 29, 2
_BRANCHED = (
  reference_stages.dense_tanh,
  reference_stages.open_branch,
  reference_stages.in_branch,
  reference_stages.close_branch,
  reference_stages.dense_tanh,
  reference_stages.identity,
)
_APPLY = {
  reference_stages.dense_tanh: chain.dense_tanh,
  reference_stages.open_branch: lambda p, x: (x, chain.dense_tanh(p, x)),
  reference_stages.in_branch: lambda p, x: (x[0], chain.dense_tanh(p, x[1])),
  reference_stages.close_branch: lambda p, x: x[0] + x[1],
  reference_stages.identity: lambda p, x: x,
}
_STAGES = len(_BRANCHED)
_RATE, _MOMENTUM = 0.1, 0.8
_DECAYING_RATE = lambda count: 0.1 / (1 + 0.05 * count)


def _branched_params():
  rng = np.random.default_rng(0)
  bare = (reference_stages.close_branch, reference_stages.identity)
  return [
    {}
    if stage in bare
    else {"w": rng.normal(size=(_WIDTH, _WIDTH)), "b": rng.normal(size=_WIDTH)}
    for stage in _BRANCHED
  ]


# Schedules with the twin's timetable: a function of the update interval.
_SCHEDULES = {
  "pb": (pbp.schedules.pipelined_backprop, timetables.pipelined_backprop),
  "1f1b": (pbp.schedules.one_f_one_b, timetables.one_f_one_b),
}
_HORIZONS = [5.0, 4.0, 2.5, 0.0, 1.0, 0.0]

# name: (pbp optimizer, twin's optimizer, twin's forward view).
_OPTIMIZERS = {
  "sgdm": (
    optax.sgd(_RATE, _MOMENTUM),
    optimizers.sgdm(_RATE, _MOMENTUM),
    optimizers.raw,
  ),
  "sgd_of_a_decaying_rate_lwpv": (
    optax.chain(
      optax.trace(_MOMENTUM),
      optax.scale_by_learning_rate(_DECAYING_RATE),
      pbp.linear_weight_prediction(_HORIZONS, learning_rate=_DECAYING_RATE),
    ),
    optimizers.sgdm(_DECAYING_RATE, _MOMENTUM),
    optimizers.velocity_prediction(_HORIZONS, _DECAYING_RATE),
  ),
  "generalised_sc": (
    optax.chain(
      pbp.spike_compensation(_MOMENTUM, a=0.7, b=1.5),
      optax.scale_by_learning_rate(_RATE),
    ),
    optimizers.sgdm(_RATE, _MOMENTUM, compensation=lambda stage: (0.7, 1.5)),
    optimizers.raw,
  ),
  "adam_lwpw": (
    optax.chain(
      optax.adam(0.02), pbp.linear_weight_prediction(_HORIZONS, form="weight")
    ),
    optimizers.adam(0.02),
    optimizers.weight_prediction(_HORIZONS),
  ),
}
_COMBINATIONS = [
  # schedule, update interval, stashed, backward, optimizer
  ("pb", 1, False, "saved", "sgdm"),
  ("pb", 1, False, "recompute", "sgd_of_a_decaying_rate_lwpv"),
  ("pb", 1, True, "saved", "adam_lwpw"),
  ("pb", 4, False, "saved", "sgd_of_a_decaying_rate_lwpv"),
  ("pb", 4, False, "recompute", "adam_lwpw"),
  ("pb", 7, True, "saved", "generalised_sc"),
  ("1f1b", 1, True, "saved", "sgdm"),
  ("1f1b", 2, True, "stashed", "generalised_sc"),
  ("1f1b", 3, False, "recompute", "sgd_of_a_decaying_rate_lwpv"),
]


class TwinTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    rng = np.random.default_rng(1)
    self.inputs, self.targets = rng.normal(size=(2, _COUNT, _BATCH, _WIDTH))

  @parameterized.named_parameters(
    ("_".join(map(str, combination)), *combination)
    for combination in _COMBINATIONS
  )
  def test_scan_computes_what_the_ticks_compute(
    self, schedule, interval, stashed, backward, optimizer
  ):
    make, ticks = _SCHEDULES[schedule]
    ours, theirs, view = _OPTIMIZERS[optimizer]
    made = make(_STAGES, interval).with_consistency(
      "stashed" if stashed else "inconsistent"
    )
    self._check(
      made,
      ticks(_STAGES, _COUNT),
      backward,
      "stashed" if stashed else backward,
      ours,
      theirs,
      view,
    )

  def test_fill_drain_computes_what_the_ticks_compute(self):
    self._check(
      pbp.schedules.fill_drain(_STAGES, 5),
      timetables.fill_drain(_STAGES, _COUNT, 5),
      "saved",
      "saved",
      *_OPTIMIZERS["sgd_of_a_decaying_rate_lwpv"],
    )

  @parameterized.product(interval=[1, 3], stashed=[False, True])
  def test_given_delays_read_the_versions_they_name(self, interval, stashed):
    delays = [3, 0, 5, 2, 1, 0]
    made = pbp.schedules.from_delays(delays, interval)
    self._check(
      made.with_weight_stashing() if stashed else made,
      timetables.synchronous(_STAGES, _COUNT),
      "saved",
      "stashed" if stashed else "saved",
      *_OPTIMIZERS["sgdm"],
      read_version=lambda s, i, newest: max(0, (i - delays[s]) // interval),
    )

  @parameterized.product(interval=[1, 3])
  def test_stale_params_are_the_mean_of_the_forward_views(self, interval):
    """An optimizer that pulls towards the weights that the forwards met."""

    def pull(grads, params, stale_params):
      return jax.tree.map(
        lambda g, w, stale: g + 0.3 * (w - stale), grads, params, stale_params
      )

    link = optax.GradientTransformationExtraArgs(
      optax.init_empty_state,
      lambda updates, state, params=None, *, stale_params, **extra: (
        pull(updates, params, stale_params),
        state,
      ),
    )
    base, theirs, view = _OPTIMIZERS["sgd_of_a_decaying_rate_lwpv"]

    def update(stage, params, state, grads, stale_params):
      grads = optimizers.tree_map(
        lambda g, w, stale: g + 0.3 * (w - stale), grads, params, stale_params
      )
      return theirs.update(stage, params, state, grads, stale_params)

    self._check(
      pbp.schedules.pipelined_backprop(_STAGES, interval),
      timetables.pipelined_backprop(_STAGES, _COUNT),
      "saved",
      "saved",
      optax.chain(link, base),
      optimizers.Optimizer(theirs.init, update),
      view,
    )

  def _check(
    self, schedule, ticks, backward, consistency, ours, theirs, view, **options
  ):
    params = _branched_params()
    expected = pipeline.run(
      ticks,
      _BRANCHED,
      params,
      theirs,
      reference_stages.squared_error,
      self.inputs,
      self.targets,
      update_interval=schedule.update_interval,
      consistency=consistency,
      forward_view=view,
      **options,
    )
    stages = [
      chain.given(p, _APPLY[stage])
      for p, stage in zip(params, _BRANCHED, strict=True)
    ]
    simulator = pbp.Simulator(
      stages, chain.squared_error, ours, schedule, backward=backward
    )
    losses, final = _run(
      simulator, jnp.asarray(self.inputs), jnp.asarray(self.targets)
    )
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-10)
    _assert_close(final, expected.params, atol=1e-10)


if __name__ == "__main__":
  absltest.main()
