"""When a change is first felt: before, at and after, by impulses."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_STAGES, _COUNT = 4, 30
_NO_STAGE = -1
_VERSION = 5
_TARGETS = np.zeros((_COUNT, 1, 3))


def _impulse(stage):
  """Weights that differ in one version of one stage, and never learn."""

  def update(updates, count, params=None):
    del params
    height = 0.125 * ((count == _VERSION - 1) - 1.0 * (count == _VERSION))
    pushed = tuple(
      jax.tree.map(lambda g, s=s: 0 * g + height * (s == stage), u)
      for s, u in enumerate(updates)
    )
    return pushed, count + 1

  return optax.GradientTransformation(
    lambda params: jnp.zeros([], jnp.int32), update
  )


def _learning(stage):
  """Only one stage learns."""
  return optax.stateless(
    lambda updates, _: tuple(
      jax.tree.map(lambda g, s=s: -0.1 * (s == stage) * g, u)
      for s, u in enumerate(updates)
    )
  )


def _losses(make_optimizer, schedule):
  """`losses(stage, targets)`, compiled once for all stages."""
  rng = np.random.default_rng(0)
  # Sixteenths, so that a push and its return leave no rounding error.
  sixteenths = lambda size: np.round(16 * rng.normal(size=size)) / 16
  params = [
    {"w": sixteenths((3, 3)), "b": sixteenths(3)} for _ in range(_STAGES)
  ]
  inputs = rng.normal(size=(_COUNT, 1, 3))

  @jax.jit
  def losses(stage, targets):
    simulator = pbp.Simulator(
      list(map(chain.given, params)),
      chain.squared_error,
      make_optimizer(stage),
      schedule,
    )
    state = simulator.init(jax.random.key(0), jnp.asarray(inputs[0]))
    return simulator.run(state, jnp.asarray(inputs), targets)[1]["loss"]

  return losses


def _moved(losses, baseline):
  return np.flatnonzero(np.asarray(losses != baseline)).tolist()


class ImpulseTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    schedule = pbp.schedules.pipelined_backprop(_STAGES)
    cls.pushed = staticmethod(_losses(_impulse, schedule))
    cls.taught = staticmethod(_losses(_learning, schedule))

  @parameterized.product(stage=list(range(_STAGES)))
  def test_pb_meets_a_version_two_stages_to_the_end_later(self, stage):
    moved = _moved(
      self.pushed(stage, _TARGETS), self.pushed(_NO_STAGE, _TARGETS)
    )
    self.assertEqual(moved, [_VERSION + 2 * (_STAGES - 1 - stage)])

  def test_1f1b_meets_a_version_one_stage_to_the_end_later(self):
    losses = _losses(_impulse, pbp.schedules.one_f_one_b(_STAGES))
    moved = _moved(losses(0, _TARGETS), losses(_NO_STAGE, _TARGETS))
    self.assertEqual(moved, [_VERSION + _STAGES - 1])

  def test_an_interval_of_micro_batches_meets_one_version(self):
    schedule = pbp.schedules.pipelined_backprop(_STAGES, update_interval=3)
    losses = _losses(_impulse, schedule)
    moved = _moved(losses(1, _TARGETS), losses(_NO_STAGE, _TARGETS))
    first = 3 * _VERSION + 2 * (_STAGES - 1 - 1)
    self.assertEqual(moved, [first, first + 1, first + 2])

  @parameterized.product(stage=list(range(_STAGES)))
  def test_a_micro_batch_teaches_those_that_come_a_delay_later(self, stage):
    """The target of micro-batch 4 is changed; one stage learns of it."""
    changed = _TARGETS.copy()
    changed[4] = 0.5
    # In float32 one of the small differences would round to none.
    with jax.enable_x64(True):
      moved = _moved(self.taught(stage, changed), self.taught(stage, _TARGETS))
    delay = 2 * (_STAGES - 1 - stage)
    self.assertEqual(moved[0], 4)  # Its own loss, and then:
    self.assertEqual(moved[1], 4 + 1 + delay)
    self.assertEqual(moved[1:], list(range(4 + 1 + delay, _COUNT)))


if __name__ == "__main__":
  absltest.main()
