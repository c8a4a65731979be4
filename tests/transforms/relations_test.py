"""How the methods are related to each other, and to those of optax."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests.transforms import gradient_sequences

_RATE = 0.1
_M = 0.8
_D = 3


def _falling(count):
  return 0.1 / (count + 1)


def _after(core, *links, rate=_RATE):
  return optax.chain(core, optax.scale_by_learning_rate(rate), *links)


def _before_rate(core, *links, rate=_RATE):
  return optax.chain(core, *links, optax.scale_by_learning_rate(rate))


def _velocity(horizon, rate=_RATE):
  return pbp.linear_weight_prediction(horizon, "velocity", rate)


def _weight(horizon):
  return pbp.linear_weight_prediction(horizon, "weight")


def _sgdm(*links, rate=_RATE):
  return _after(optax.trace(_M), *links, rate=rate)


def _spikes_horizon(delay):
  return _M * (1 - _M**delay) / (1 - _M)


_BIT_FOR_BIT = (
  (
    "spike_compensation_of_no_delay_is_momentum",
    _after(pbp.spike_compensation(_M, 0)),
    _after(optax.trace(_M)),
  ),
  (
    "velocity_prediction_of_no_delay_is_no_prediction",
    _sgdm(_velocity(0)),
    _sgdm(),
  ),
  (
    "weight_prediction_of_no_delay_is_no_prediction",
    _sgdm(_weight(0)),
    _sgdm(),
  ),
  (
    "delay_gradients_of_no_delay_is_none",
    optax.chain(pbp.delay_gradients(0), _sgdm()),
    _sgdm(),
  ),
  (
    "xpipe_without_a_backward_horizon_is_pipeoptim",
    _before_rate(optax.scale_by_adam(), pbp.xpipe(_D, 0, _RATE)),
    _before_rate(optax.scale_by_adam(), pbp.pipeoptim(_D, _RATE)),
  ),
)

_CLOSE = (
  (
    "spike_compensation_of_one_update_is_nesterov",
    _after(pbp.spike_compensation(_M, 1)),
    _after(optax.trace(_M, nesterov=True)),
  ),
  (
    "velocity_and_weight_form_agree_for_momentum_at_a_constant_rate",
    _sgdm(_velocity(_D)),
    _sgdm(_weight(_D)),
  ),
  (
    "msnag_predicts_over_the_horizon_of_spike_compensation",
    _sgdm(pbp.msnag(_D, _M, _RATE)),
    _sgdm(_velocity(_spikes_horizon(_D))),
  ),
  (
    "msnag_of_a_constant_schedule_is_msnag_of_a_rate",
    _sgdm(pbp.msnag(_D, _M, optax.constant_schedule(_RATE))),
    _sgdm(pbp.msnag(_D, _M, _RATE)),
  ),
  (
    "msnag_with_no_first_moment_left_predicts_nothing",
    _after(
      optax.scale_by_adam(b1=0.0, b2=0.0), pbp.msnag_adam(_D, _RATE, 0, 0)
    ),
    _before_rate(optax.scale_by_adam(b1=0.0, b2=0.0), pbp.pipeoptim(0, _RATE)),
  ),
  (
    "spectrain_at_the_input_is_velocity_prediction",
    _sgdm(pbp.spectrain(_D, _falling, 0), rate=_falling),
    _sgdm(_velocity(_D, _falling), rate=_falling),
  ),
  (
    "pipeoptim_after_momentum_is_velocity_prediction",
    _before_rate(optax.trace(_M), pbp.pipeoptim(_D, _falling), rate=_falling),
    _sgdm(_velocity(_D, _falling), rate=_falling),
  ),
  (
    "pipeoptim_is_weight_prediction_at_a_constant_rate_after_adamw",
    _before_rate(
      optax.scale_by_adam(),
      optax.add_decayed_weights(0.2),
      pbp.pipeoptim(_D, _RATE),
    ),
    optax.chain(optax.adamw(_RATE, weight_decay=0.2), _weight(_D)),
  ),
  (
    "reconstructed_weights_are_a_discrepancy_correction",
    _sgdm(pbp.reconstructed_weights(_D)),
    _sgdm(pbp.discrepancy_correction(_D, (_D / (_D + 1)) ** _D)),
  ),
)


def _differ():
  """Pairs that a relation above must not be stretched to, with the reason."""
  return (
    (
      "forms_under_a_schedule",
      _sgdm(_velocity(_D, _falling), rate=_falling),
      _sgdm(_weight(_D), rate=_falling),
    ),
    (
      "forms_with_spike_compensation",
      _after(pbp.spike_compensation(_M, _D), _velocity(_D)),
      _after(pbp.spike_compensation(_M, _D), _weight(_D)),
    ),
    (
      "nadam_of_pytorch_and_of_optax",
      _after(pbp.scale_by_asynchronous_nadam(b1=0.9)),
      optax.nadam(_RATE),
    ),
  )


def _histories(*optimizers):
  """What each of the optimizers makes of the same gradients, in float64."""
  with jax.enable_x64(True):
    gradients = gradient_sequences.gradients()
    return [np.array(gradient_sequences.run(o, gradients)) for o in optimizers]


class RelationTest(parameterized.TestCase):
  @parameterized.named_parameters(*_BIT_FOR_BIT)
  def test_bit_for_bit(self, one, other):
    np.testing.assert_array_equal(*_histories(one, other))

  @parameterized.named_parameters(*_CLOSE)
  def test_to_rounding(self, one, other):
    np.testing.assert_allclose(*_histories(one, other), rtol=1e-12, atol=1e-14)

  @parameterized.named_parameters(*_differ())
  def test_not_the_same(self, one, other):
    one, other = _histories(one, other)
    self.assertGreater(np.abs(one - other).max(), 1e-3)

  def test_asynchronous_nesterov_predicts_by_its_momentum(self):
    """Its forward view is that of LWP with T = m, its rate lr (1 - m)."""
    rate = _RATE * (1 - _M)
    one, other = _histories(
      pbp.asynchronous_nesterov(_RATE, _M),
      _sgdm(_velocity(_M, rate), rate=rate),
    )
    np.testing.assert_allclose(one[:, :2], other[:, :2], rtol=1e-12, atol=1e-14)

  def test_past_weights_are_exact_for_equal_updates(self):
    """After equal updates for long, their average is that update."""
    with jax.enable_x64(True):
      gradients = np.ones((60, gradient_sequences.NUM_STAGES, 2))
      for link in (
        pbp.discrepancy_correction(1),
        pbp.reconstructed_weights(1),
      ):
        versions = gradient_sequences.run(
          optax.chain(optax.sgd(_RATE), link), gradients
        )
        np.testing.assert_allclose(versions[-1][2], versions[-2][0], rtol=1e-12)


class SimulatedRelationTest(parameterized.TestCase):
  """Views in a pipeline, where both passes matter."""

  def _losses(self, optimizer, schedule):
    stages = [
      pbp.Stage(
        init=lambda key, x, s=s: jnp.asarray(0.5 + 0.1 * s),
        apply=lambda w, x: jnp.tanh(w * x),
      )
      for s in range(4)
    ]
    with jax.enable_x64(True):
      simulator = pbp.Simulator(
        stages, lambda y, t: jnp.sum((y - t) ** 2), optimizer, schedule
      )
      inputs = jnp.sin(jnp.arange(12.0))[:, None]
      state = simulator.init(jax.random.key(0), inputs[0])
      return np.asarray(
        simulator.run(state, inputs, jnp.cos(inputs))[1]["loss"]
      )

  @parameterized.named_parameters(
    ("discrepancy_correction", pbp.discrepancy_correction),
    ("reconstructed_weights", pbp.reconstructed_weights),
  )
  def test_a_backward_view_is_of_no_effect_where_weights_are_stashed(
    self, make
  ):
    for stashed, same in ((True, True), (False, False)):
      schedule = pbp.schedules.pipelined_backprop(4)
      if stashed:
        schedule = schedule.with_weight_stashing()
      plain = self._losses(_sgdm(), schedule)
      got = self._losses(_sgdm(make(schedule.delay)), schedule)
      self.assertEqual(np.array_equal(got, plain), same)

  def test_spectrain_predicts_backward_passes_too(self):
    schedule = pbp.schedules.pipelined_backprop(4)
    forward_only = pbp.spectrain(schedule.delay + np.arange(4), _RATE, 0)
    self.assertFalse(
      np.allclose(
        self._losses(_sgdm(pbp.spectrain(schedule.delay, _RATE)), schedule),
        self._losses(_sgdm(forward_only), schedule),
      )
    )

  def test_spectrain_ends_at_one_version_for_all_passes(self):
    """Where weights move evenly, both passes see the same weights."""
    schedule = pbp.schedules.pipelined_backprop(4)
    link = pbp.spectrain(schedule.delay, 1.0)
    optimizer = optax.chain(
      optax.trace(0.0), optax.scale_by_learning_rate(1.0), link
    )
    params = [jnp.zeros(())] * 4
    state = optimizer.init(params)
    forward = []
    for _ in range(8):
      forward.append(pbp.predict_params(state, params))
      updates, state = optimizer.update([jnp.ones(())] * 4, state, params)
      params = optax.apply_updates(params, updates)
    backward = pbp.predict_params(state, params, "backward")
    for s, delay in enumerate(schedule.delay):
      # What stage s met in its forward pass is `delay` versions old now.
      met = ([*forward, pbp.predict_params(state, params)])[8 - delay][s]
      self.assertEqual(met, backward[s])
      # Weight and update are -1 a version; the micro-batch leaves s later.
      self.assertEqual(met, -(8 + s))


if __name__ == "__main__":
  absltest.main()
