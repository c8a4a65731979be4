"""When a change is first felt: before, at and after, by impulses."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_STAGES, _COUNT = 4, 30
_VERSION = 5


def _impulse(stage):
  """Weights that differ in one version of one stage, and never learn."""

  def update(updates, count, params=None):
    del params
    height = 0.125 * ((count == _VERSION - 1) - 1.0 * (count == _VERSION))
    updates = jax.tree.map(jnp.zeros_like, updates)
    pushed = jax.tree.map(lambda u: u + height, updates[stage])
    updates = (*updates[:stage], pushed, *updates[stage + 1 :])
    return updates, count + 1

  return optax.GradientTransformation(
    lambda params: jnp.zeros([], jnp.int32), update
  )


def _losses(optimizer, schedule, targets=None):
  rng = np.random.default_rng(0)
  # Sixteenths, so that a push and its return leave no rounding error.
  sixteenths = lambda size: np.round(16 * rng.normal(size=size)) / 16
  params = [
    {"w": sixteenths((3, 3)), "b": sixteenths(3)} for _ in range(_STAGES)
  ]
  inputs = jnp.asarray(rng.normal(size=(_COUNT, 1, 3)), jnp.float32)
  if targets is None:
    targets = jnp.zeros_like(inputs)
  simulator = pbp.Simulator(
    list(map(chain.given, params)), chain.squared_error, optimizer, schedule
  )
  state = chain.started(simulator, inputs[0])
  _, metrics = simulator.run(state, inputs, targets)
  return np.asarray(metrics["loss"])


def _moved(losses, baseline):
  return np.flatnonzero(losses != baseline).tolist()


class ImpulseTest(parameterized.TestCase):
  @parameterized.product(stage=list(range(_STAGES)))
  def test_pb_meets_a_version_two_stages_to_the_end_later(self, stage):
    schedule = pbp.schedules.pipelined_backprop(_STAGES)
    baseline = _losses(optax.set_to_zero(), schedule)
    moved = _moved(_losses(_impulse(stage), schedule), baseline)
    self.assertEqual(moved, [_VERSION + 2 * (_STAGES - 1 - stage)])

  def test_1f1b_meets_a_version_one_stage_to_the_end_later(self):
    schedule = pbp.schedules.one_f_one_b(_STAGES)
    baseline = _losses(optax.set_to_zero(), schedule)
    moved = _moved(_losses(_impulse(stage=0), schedule), baseline)
    self.assertEqual(moved, [_VERSION + _STAGES - 1])

  def test_an_interval_of_micro_batches_meets_one_version(self):
    schedule = pbp.schedules.pipelined_backprop(_STAGES, update_interval=3)
    baseline = _losses(optax.set_to_zero(), schedule)
    moved = _moved(_losses(_impulse(stage=1), schedule), baseline)
    first = 3 * _VERSION + 2 * (_STAGES - 1 - 1)
    self.assertEqual(moved, [first, first + 1, first + 2])

  @parameterized.product(stage=list(range(_STAGES)))
  def test_a_micro_batch_teaches_those_that_come_a_delay_later(self, stage):
    """Only one stage learns; the target of micro-batch 4 is changed."""
    schedule = pbp.schedules.pipelined_backprop(_STAGES)
    learns = [0.1 if s == stage else 0.0 for s in range(_STAGES)]
    optimizer = optax.stateless(
      lambda updates, _: tuple(
        jax.tree.map(lambda g, rate=rate: -rate * g, u)
        for rate, u in zip(learns, updates, strict=True)
      )
    )
    targets = jnp.zeros((_COUNT, 1, 3))
    moved = _moved(
      _losses(optimizer, schedule, targets.at[4].set(0.5)),
      _losses(optimizer, schedule, targets),
    )
    delay = 2 * (_STAGES - 1 - stage)
    self.assertEqual(moved[0], 4)  # Its own loss, and then:
    self.assertEqual(moved[1], 4 + 1 + delay)
    self.assertEqual(moved[1:], list(range(4 + 1 + delay, _COUNT)))


if __name__ == "__main__":
  absltest.main()
