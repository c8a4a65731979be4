"""What the simulator must be when the pipeline does not matter."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain, xla

_COUNT = 24
_SGDM = optax.sgd(0.05, momentum=0.9)


def _plain(optimizer, params, inputs, targets):
  """An ordinary optax loop as one scan: final parameters and losses."""

  def loss_fn(params, x, target):
    for weights in params:
      x = chain.dense_tanh(weights, x)
    return chain.squared_error(x, target)

  def step(carry, batch):
    params, opt_state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  carry = (params, optimizer.init(params))
  run = jax.jit(lambda carry, *data: jax.lax.scan(step, carry, data))
  (params, _), losses = run(carry, inputs, targets)
  return params, losses


def _simulated(
  optimizer,
  schedule,
  count=_COUNT,
  backward="saved",
  stages=None,
  compiler_options=None,
):
  simulator = pbp.Simulator(
    chain.stages() if stages is None else stages,
    chain.squared_error,
    optimizer,
    schedule,
    backward=backward,
  )
  inputs, targets = chain.samples(count)
  if stages is not None:
    targets = targets[..., :1] * jnp.ones((1, 1, 4))
  state = chain.started(simulator, inputs[0])
  run = simulator.run
  if compiler_options:
    run = jax.jit(run, compiler_options=compiler_options)
  state, metrics = run(state, inputs, targets)
  return state.params, metrics["loss"]


@functools.cache
def _pipelined(optimizer):
  """Compiled as elsewhere, as to which bits are claimed to be the same."""
  schedule = pbp.schedules.pipelined_backprop(chain.NUM_STAGES)
  return _simulated(optimizer, schedule, compiler_options=xla.AS_ELSEWHERE)


def _assert_same_bits(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def _start():
  return tuple(stage.init(jax.random.key(0), None) for stage in chain.stages())


class BitForBitTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("saved_sgdm", "saved", _SGDM),
    ("recompute_sgdm", "recompute", _SGDM),
    ("saved_adamw", "saved", optax.adamw(0.01)),
  )
  def test_zero_delay_is_a_plain_optax_loop(self, backward, optimizer):
    schedule = pbp.schedules.synchronous(chain.NUM_STAGES)
    got = _simulated(optimizer, schedule, backward=backward)
    _assert_same_bits(got, _plain(optimizer, _start(), *chain.samples(_COUNT)))

  def test_one_stage_is_a_plain_optax_loop(self):
    stage = chain.stages()[:1]
    schedule = pbp.schedules.pipelined_backprop(1)
    got = _simulated(_SGDM, schedule, stages=stage)
    inputs, targets = chain.samples(_COUNT)
    targets = targets[..., :1] * jnp.ones((1, 1, 4))
    _assert_same_bits(got, _plain(_SGDM, _start()[:1], inputs, targets))

  @parameterized.named_parameters(
    ("saved", "saved"), ("recompute", "recompute"), ("stashed", "stashed")
  )
  def test_backward_makes_no_difference_where_weights_are_stashed(
    self, backward
  ):
    schedule = pbp.schedules.one_f_one_b(chain.NUM_STAGES)
    expected = _simulated(_SGDM, schedule)
    _assert_same_bits(_simulated(_SGDM, schedule, backward=backward), expected)

  def test_stashing_makes_no_difference_without_delay(self):
    schedule = pbp.schedules.synchronous(chain.NUM_STAGES)
    _assert_same_bits(
      _simulated(_SGDM, schedule.with_weight_stashing(), backward="stashed"),
      _simulated(_SGDM, schedule),
    )

  @parameterized.named_parameters(
    (
      "spike_compensation",
      optax.chain(
        pbp.spike_compensation(0.9, delay=0), optax.scale_by_learning_rate(0.05)
      ),
    ),
    (
      "velocity_prediction",
      optax.chain(_SGDM, pbp.linear_weight_prediction(0.0, learning_rate=0.05)),
    ),
    (
      "weight_prediction",
      optax.chain(_SGDM, pbp.linear_weight_prediction(0.0, form="weight")),
    ),
  )
  def test_a_neutral_mitigation_changes_nothing(self, optimizer):
    _assert_same_bits(_pipelined(optimizer), _pipelined(_SGDM))

  def test_a_delay_does_make_a_difference(self):
    """Lest the tests above compare what can't differ."""
    count = chain.NUM_STAGES
    _, plain = _simulated(_SGDM, pbp.schedules.synchronous(count))
    for schedule in (
      pbp.schedules.pipelined_backprop(count),
      pbp.schedules.one_f_one_b(count),
    ):
      _, losses = _simulated(_SGDM, schedule)
      self.assertGreater(np.abs(losses - plain)[2:].min(), 1e-6)


class Float64Test(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  def _assert_close(self, got, expected):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
      got,
      expected,
    )

  @parameterized.named_parameters(("sgdm", _SGDM), ("adam", optax.adam(0.01)))
  def test_fill_drain_is_multi_steps(self, optimizer):
    """The last two of 26 micro-batches make no update in either."""
    schedule = pbp.schedules.fill_drain(chain.NUM_STAGES, 4)
    multi_steps = optax.MultiSteps(
      optimizer, every_k_schedule=4, accumulator_dtype=jnp.float64
    )
    expected = _plain(
      multi_steps.gradient_transformation(), _start(), *chain.samples(26)
    )
    self._assert_close(_simulated(optimizer, schedule, count=26), expected)

  @parameterized.named_parameters(
    ("sgd", optax.sgd(0.05)),
    ("sgdm", _SGDM),
    (
      "spike_compensation",
      optax.chain(
        pbp.spike_compensation(0.9, delay=3), optax.scale_by_learning_rate(0.05)
      ),
    ),
  )
  def test_uniform_stashed_delay_is_delayed_gradients(self, optimizer):
    delay = 3
    schedule = pbp.schedules.uniform_delay(chain.NUM_STAGES, delay)
    params, losses = _simulated(optimizer, schedule.with_weight_stashing())
    delayed = optax.chain(pbp.delay_gradients(delay), optimizer)
    later, delayed_losses = _plain(
      delayed, _start(), *chain.samples(_COUNT + delay)
    )
    self._assert_close(losses, delayed_losses[:_COUNT])
    self._assert_close(params, later)


if __name__ == "__main__":
  absltest.main()
