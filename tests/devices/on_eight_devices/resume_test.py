"""Going on from a checkpoint, on as many devices and on another number."""

import dataclasses
import os
import pathlib

from absl.testing import absltest, parameterized
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import pbp_jax as pbp
from tests import chain

# Of the five stages, by the number of devices.
_STARTS = {2: [0, 3], 3: [0, 1, 4], 5: [0, 1, 2, 3, 4]}
_COUNT = 12  # micro-batches a run, six updates


def _optimizer(schedule):
  """Has leaves of every kind: momenta, a count, horizons, a rate."""
  settings = {"lwp": 1.0, "sc": 1.0, "form": "weight"}
  return optax.chain(
    optax.scale_by_schedule(lambda count: 0.9**count),
    chain.optimizer(settings, schedule.delay),
  )


def _simulator(num_devices):
  """Of the groups that so many devices have."""
  starts = np.array(_STARTS[num_devices])
  schedule = pbp.schedules.pipelined_backprop(num_devices, 2)
  return pbp.Simulator(
    pbp.devices.Partition(np.ones(5), starts).merge(chain.stages()),
    chain.squared_error,
    _optimizer(schedule),
    schedule,
  )


def _started_from(simulator, gathered):
  """The simulator of a pipeline that starts so, and its state."""
  there = dataclasses.replace(
    simulator,
    stages=pbp.with_params(simulator.stages, gathered.params),
    optimizer=simulator.optimizer._replace(
      init=lambda params: gathered.opt_state
    ),
  )
  return there, chain.started(there, _example()[0])


def _example():
  return jax.tree.map(lambda leaf: leaf[0], chain.samples(1))


def _samples(leg):
  return jax.tree.map(
    lambda leaf: leaf[leg * _COUNT : (leg + 1) * _COUNT], chain.samples()
  )


def _gathered(state):
  return pbp.devices.Gathered(state.params, state.opt_state, state.stage_state)


def _assert(compare, got, expected):
  jax.tree.map(
    lambda a, b: compare(np.asarray(a), np.asarray(b)), got, expected
  )


def _assert_close(got, expected):
  _assert(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10),
    got,
    expected,
  )


class ResumeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / "checkpoint"

  def _through_the_disk(self, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(self.path, tree)
      checkpointer.wait_until_finished()
      return checkpointer.restore(self.path, like)

  # To more devices: the program's smoke run, and here with PBP_LONG=1.
  @parameterized.parameters(
    [((3, 2),), ((2, 5),)][: 2 if "PBP_LONG" in os.environ else 1]
  )
  def test_on_another_number_it_is_that_numbers_simulator(self, numbers):
    """From the weights and the optimizer's state that were saved."""
    before, after = map(_simulator, numbers)
    pipeline = chain.on_devices(before, _example())
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.run(state, *_samples(0), drain=True)
    simulated = chain.started(before, _example()[0])
    simulated, expected = before.run(simulated, *_samples(0))
    _assert_close(metrics["loss"], expected["loss"])
    _assert_close(pipeline.gather(state), _gathered(simulated))

    # What is known of the saved run where only another number of devices is.
    like = _gathered(
      jax.eval_shape(before.init, jax.random.key(0), _example()[0])
    )
    saved = self._through_the_disk(pipeline.gather(state), like)
    pipeline = chain.on_devices(after, _example())
    state = pipeline.restore(state.key, saved, state.fed, before.optimizer)
    start = pipeline.gather(state)
    _assert(
      np.testing.assert_array_equal,
      jax.tree.leaves(start.params),
      jax.tree.leaves(saved.params),
    )
    # scale_by_schedule, trace and rate, prediction.
    schedule, (momentum, _, prediction) = start.opt_state
    self.assertEqual(schedule.count, _COUNT // 2)
    self.assertLen(momentum.trace, numbers[1])
    np.testing.assert_array_equal(prediction.horizon, after.schedule.delay)

    after, simulated = _started_from(after, start)
    state, metrics = pipeline.run(state, *_samples(1), drain=True)
    simulated, expected = after.run(simulated, *_samples(1))
    _assert_close(metrics["loss"], expected["loss"])
    _assert_close(pipeline.gather(state), _gathered(simulated))

  def test_on_the_same_number_nothing_is_lost_that_was_in_flight(self):
    """A state is saved as it is; the run is the one that was not broken off."""
    simulator = _simulator(2)
    pipeline = chain.on_devices(simulator, _example())
    state = pipeline.init(jax.random.key(0))
    state, _ = pipeline.run(state, *_samples(0))
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    saved = self._through_the_disk(state, like)
    ends = [
      pipeline.run(each, *_samples(1), drain=True) for each in (state, saved)
    ]
    _assert(np.testing.assert_array_equal, ends[0][1], ends[1][1])
    _assert(
      np.testing.assert_array_equal,
      *(pipeline.gather(end) for end, _ in ends),
    )


if __name__ == "__main__":
  absltest.main()
