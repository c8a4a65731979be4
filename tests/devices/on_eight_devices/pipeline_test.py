"""How runs on devices are started, cut, ended, restored and refused."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain

_SETTINGS = {"accumulate": 3, "lwp": 1.0, "sc": 1.0}


def _pipeline(settings=None, **options):
  simulator = chain.simulator(settings)
  arguments = {
    "stages": simulator.stages,
    "loss_fn": simulator.loss_fn,
    "optimizer": simulator.optimizer,
    "schedule": simulator.schedule,
    "example": tuple(jax.tree.map(lambda leaf: leaf[0], chain.samples())),
    **options,
  }
  return pbp.devices.Pipeline(**arguments)


def _equal_stages():
  """One and the same stage three times, which is compiled once."""
  params = {"w": np.cos(np.arange(9.0).reshape(3, 3)), "b": np.zeros(3)}
  return (chain.given(params),) * 3


@functools.cache
def _short_pipeline():
  """One that is quick to compile, and has all that a run carries on."""
  schedule = pbp.schedules.pipelined_backprop(3, 2)
  return _pipeline(
    stages=_equal_stages(),
    optimizer=chain.optimizer(_SETTINGS, schedule.delay),
    schedule=schedule,
    example=(jnp.ones((2, 3)), jnp.ones((2, 3))),
  )


def _short_samples(count):
  made = np.random.default_rng(0).normal(size=(2, count, 2, 3))
  return jnp.asarray(made[0]), jnp.asarray(made[1])


def _assert_equal(got, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
    got,
    expected,
  )


def _assert_same_but_for_rounding(got, expected):
  """For results of two programs, which the compiler may round differently."""
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15),
    got,
    expected,
  )


class RunTest(absltest.TestCase):
  def test_init_draws_what_the_simulator_draws(self):
    stage = pbp.Stage(
      lambda key, x: {"w": jax.random.normal(key, (x.shape[-1], 2))},
      lambda params, x: x @ params["w"],
    )
    schedule = pbp.schedules.pipelined_backprop(3)
    example = jnp.ones((1, 4)), jnp.ones((1, 2))
    arguments = (stage,) * 3, chain.squared_error, optax.sgd(0.1), schedule
    pipeline = pbp.devices.Pipeline(*arguments, example)
    key = jax.random.key(5)
    state = pipeline.init(key)
    expected = pbp.Simulator(*arguments).init(key, example[0])
    _assert_same_but_for_rounding(
      pipeline.gather(state).params, expected.params
    )
    _assert_equal(
      jax.random.key_data(state.key), jax.random.key_data(expected.key)
    )

  def test_chunks_are_their_concatenation(self):
    """The first ends in the middle of an update."""
    pipeline = _short_pipeline()
    inputs, targets = _short_samples(14)
    start = pipeline.init(jax.random.key(0))
    whole, metrics = pipeline.run(start, inputs, targets, drain=True)
    state, parts = start, []
    for chunk in (slice(0, 7), slice(7, 14)):
      state, part = pipeline.run(
        state, inputs[chunk], targets[chunk], donate=True
      )
      parts.append(part)
    with self.assertRaisesRegex(ValueError, "4 micro-batches in flight"):
      pipeline.gather(state)
    state, rest = pipeline.drain(state)
    for name in ("loss", "micro_batch", "busy"):
      _assert_same_but_for_rounding(
        np.concatenate([np.asarray(part[name]) for part in (*parts, rest)]),
        metrics[name],
      )
    _assert_same_but_for_rounding(
      pipeline.gather(state), pipeline.gather(whole)
    )
    np.testing.assert_array_equal(parts[1]["micro_batch"], np.arange(5, 12))
    np.testing.assert_array_equal(rest["micro_batch"], np.arange(12, 14))

  def test_a_restored_run_goes_on_as_the_drained_one(self):
    pipeline = _short_pipeline()
    inputs, targets = _short_samples(28)
    state = pipeline.init(jax.random.key(0))
    state, _ = pipeline.run(state, inputs[:14], targets[:14], drain=True)
    restored = pipeline.restore(state.key, pipeline.gather(state), state.fed)
    ends = [
      pipeline.run(each, inputs[14:], targets[14:], drain=True)
      for each in (state, restored)
    ]
    _assert_equal(ends[0][1], ends[1][1])
    _assert_equal(pipeline.gather(ends[0][0]), pipeline.gather(ends[1][0]))
    np.testing.assert_array_equal(ends[0][1]["micro_batch"], np.arange(14, 28))


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("backward", {"backward": "stashed"}, 'backward must be "saved"'),
    (
      "size",
      {"schedule": pbp.schedules.pipelined_backprop(4)},
      "schedule must have as many stages.*5.*has 4",
    ),
    (
      "old_weights",
      {"schedule": pbp.schedules.vertical_sync(5)},
      "vertical_sync the forward of micro-batch .* meets version",
    ),
    (
      "no_timetable",
      {"schedule": pbp.schedules.uniform_delay(5, 2)},
      "without a timetable",
    ),
    (
      "interleaved",
      {
        "stages": chain.stages()[:4],
        "schedule": pbp.schedules.interleaved(2, 2),
      },
      "several stages",
    ),
    ("example", {"example": jnp.ones(3)}, "example must be a pair"),
    ("names", {"example": ("f4", "f4")}, "example must be arrays.*'f4', 'f4'"),
    ("optimizer", {"optimizer": 0.1}, "optimizer must be.*got 0.1"),
    ("loss", {"loss_fn": None}, "loss_fn must be a function, got None"),
    ("mesh", {"mesh": jax.make_mesh((5,), ("stage",))}, "make_mesh"),
  )
  def test_of_arguments(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      _pipeline(**options)

  def test_of_too_few_devices(self):
    with self.assertRaisesRegex(ValueError, "needs 18 devices, got 8"):
      pbp.devices.make_mesh(9, num_replicas=2)

  def test_of_a_loss_that_is_no_scalar(self):
    pipeline = _pipeline(loss_fn=lambda y, target: y - target)
    state = pipeline.init(jax.random.key(0))
    with self.assertRaisesRegex(ValueError, "loss_fn must return a real"):
      pipeline.run(state, *chain.samples(3))

  @parameterized.named_parameters(
    # Size-1 axes would be broadcast, other sizes padded.
    (
      "inputs_to_broadcast",
      "inputs",
      lambda x: x[:, :1],
      r"\(2, 3\).*\(1, 3\)",
    ),
    ("targets_to_broadcast", "targets", lambda x: x[..., :1], r"got \(2, 1\)"),
    ("targets_of_another_size", "targets", lambda x: x[..., :2], r"\(2, 2\)"),
    ("one_micro_batch", "inputs", lambda x: x[0], r"got \(3,\)"),
    ("ints", "inputs", lambda x: x.astype(int), "float64.*got.*int64"),
    ("bools", "targets", lambda x: x > 0, "float64.*got.*bool"),
    ("fewer", "targets", lambda x: x[:2], r"leading axes \[\(2,\), \(3,\)\]"),
    ("none", "inputs", lambda x: x[:0], "leading axes"),
    ("a_list_of_arrays", "inputs", list, "np.stack"),
    ("a_list_of_numbers", "targets", lambda x: [1.0, 2.0], "np.stack"),
    ("a_number", "inputs", lambda x: 1.0, "an array.*got 1.0"),
    ("nothing", "targets", lambda x: None, r"PyTreeDef\(None\)"),
    ("letters", "targets", lambda x: x.astype(str), "numbers.*<U"),
    (
      "keys",
      "inputs",
      lambda x: jax.random.key(0)[None],
      "numbers, got random keys",
    ),
  )
  def test_of_micro_batches_that_are_not_as_the_example(
    self, name, change, message
  ):
    data = dict(zip(("inputs", "targets"), _short_samples(3), strict=True))
    data[name] = change(np.asarray(data[name]))
    state = pbp.devices.State(0, 0, 0, jax.random.key(0), held=None)
    with self.assertRaisesRegex(ValueError, f"{name}.* must be.*{message}"):
      _short_pipeline().run(state, **data)

  def test_of_states_that_are_none(self):
    pipeline, data = _short_pipeline(), _short_samples(3)
    for function in (
      pipeline.gather,
      pipeline.drain,
      lambda state: pipeline.run(state, *data),
      lambda state: pbp.devices.record(pipeline, state, *data),
    ):
      with self.assertRaisesRegex(ValueError, "state must be.*got tuple"):
        function((None, {}))

  def test_of_states_of_other_pipelines(self):
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0)).replace(fed=1)
    wider = dataclasses.replace(
      pipeline, example=(jnp.ones((4, 3)), jnp.ones((4, 3)))
    )
    for other, message in (
      (wider, r"float64\[1, 3, 4, 3\] in state\.held.*got.*\[1, 3, 2, 3\]"),
      (
        dataclasses.replace(pipeline, optimizer=optax.sgd(0.1)),
        r"ask for nothing in state\.held\.opt_state.*got float64",
      ),
    ):
      for function in (other.gather, other.drain):
        with self.assertRaisesRegex(ValueError, f"state must be.*{message}"):
          function(state)

  def test_of_draining_an_empty_pipeline(self):
    pipeline = _pipeline()
    with self.assertRaisesRegex(ValueError, "in flight"):
      pipeline.drain(pipeline.init(jax.random.key(0)))

  def test_of_gathering_what_is_in_flight(self):
    """Nothing of this runs: the state of a run says how far it is."""
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0))
    # The last device brings back the first micro-batch at tick 2, the first
    # device at tick 4.
    begun = state.replace(fed=5, tick=5)
    with self.assertRaisesRegex(
      ValueError, "state must be drained, got one with 4 micro-batches"
    ):
      pipeline.gather(begun)
    _assert_equal(
      pipeline.gather(begun.replace(tick=9)), pipeline.gather(state)
    )

  @parameterized.named_parameters(
    ("the_middle_of_an_update", {"fed": 7}, "update interval, 2, got 7"),
    ("fed_below_zero", {"fed": -8}, "fed must be an int >= 0, got -8"),
    ("fed_in_floating_point", {"fed": 10.0}, "fed must be.*got 10.0"),
    ("fed_as_bool", {"fed": True}, "fed must be.*got True"),
    ("no_key", {"key": 0}, "key must be one random key.*got 0"),
    ("nothing", {"gathered": None}, "gathered must be.*got NoneType"),
    ("a_tuple", {"gathered": ((), (), ())}, "gathered must be.*got tuple"),
    ("no_optimizer", {"optimizer": 3}, "optimizer must be.*got 3"),
  )
  def test_of_restoring(self, options, message):
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0))
    arguments = {
      "key": state.key, "gathered": pipeline.gather(state), "fed": 0, **options
    }  # fmt: skip
    with self.assertRaisesRegex(ValueError, message):
      pipeline.restore(**arguments)

  @parameterized.named_parameters(
    (
      "in_other_groups",
      "params",
      lambda params: (params,),
      r"unless the optimizer of other.*gathered\.params\[0\]",
    ),
    (
      "cut",
      "params",
      lambda params: jax.tree.map(lambda w: w[:2], params),
      r"float64\[3\] in gathered\.params\[0\]\['b'\], got float64\[2\]",
    ),
    (
      "of_another_dtype",
      "params",
      lambda params: jax.tree.map(lambda w: w.astype("f4"), params),
      "float64.*got float32",
    ),
    (
      "without_a_stage",
      "params",
      lambda params: params[:2],
      r"gathered\.params\[2\].*got nothing",
    ),
    ("of_names", "params", lambda params: "weights", "got nothing"),
    (
      "with_another_optimizer_state",
      "opt_state",
      lambda state: state[:1],
      r"gathered\.opt_state\[.*got nothing",
    ),
    (
      "with_a_cut_optimizer_state",
      "opt_state",
      lambda state: jax.tree.map(lambda leaf: np.ravel(leaf)[:1], state),
      r"float64\[3\] in gathered\.opt_state.*trace.*got float64\[1\]",
    ),
    (
      "with_a_stage_state",
      "stage_state",
      lambda state: (np.ones(2),) * 3,
      r"nothing in gathered\.stage_state\[0\], got float64\[2\]",
    ),
  )
  def test_of_restoring_weights(self, field, change, message):
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0))
    gathered = pipeline.gather(state)
    other = gathered._replace(**{field: change(getattr(gathered, field))})
    with self.assertRaisesRegex(ValueError, message):
      pipeline.restore(state.key, other, 0)

  def test_of_an_optimizer_state_that_is_not_of_the_optimizer_given(self):
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0))
    gathered = pipeline.gather(state)
    other = gathered._replace(
      opt_state=jax.tree.map(
        lambda leaf: np.ravel(leaf)[:1], gathered.opt_state
      )
    )
    with self.assertRaisesRegex(ValueError, r"in gathered\.opt_state"):
      pipeline.restore(state.key, other, 0, pipeline.optimizer)

  def test_of_micro_batches_that_replicas_cannot_share(self):
    stages = chain.stages()[:1] + chain.stages()[-1:]
    pipeline = _pipeline(
      stages=stages,
      optimizer=optax.sgd(0.1),
      schedule=pbp.schedules.pipelined_backprop(2),
      mesh=pbp.devices.make_mesh(2, num_replicas=4),
    )
    with self.assertRaisesRegex(ValueError, "share evenly"):
      pipeline.init(jax.random.key(0))

  def test_of_more_than_the_schedule_has(self):
    table = pbp.schedules.pipelined_backprop(5).timetable(4)
    pipeline = _pipeline(
      optimizer=optax.sgd(0.1), schedule=pbp.schedules.from_timetable(table)
    )
    state = pipeline.init(jax.random.key(0))
    with self.assertRaisesRegex(ValueError, "ends after 4 micro-batches"):
      pipeline.run(state, *chain.samples(5))


class TimelineTest(absltest.TestCase):
  def test_a_run_is_as_busy_as_its_timetable(self):
    pipeline = _pipeline(optimizer=optax.sgd(0.02))
    state = pipeline.init(jax.random.key(0))
    data = chain.samples(9)
    after, metrics, timeline = pbp.devices.record(pipeline, state, *data)
    expected, _ = pipeline.run(state, *data, drain=True)
    _assert_equal(pipeline.gather(after), pipeline.gather(expected))
    self.assertLen(metrics["loss"], 9)
    np.testing.assert_array_equal(timeline.busy, timeline.predicted)
    self.assertEqual(timeline.utilization, 9 / (9 + 2 * 4))
    self.assertEqual(timeline.predicted_utilization, 9 / (9 + 2 * 4))
    self.assertEqual(timeline.seconds_per_tick, timeline.seconds / 17)
    passes = timeline.busy_time(np.arange(5) * timeline.seconds / 100)
    self.assertAlmostEqual(passes, 9 * (0 + 1 + 2 + 3 + 4) / 100 / 5)
    lines = str(timeline).splitlines()
    self.assertEqual(lines[-5], "device 0 FFFFFFFFXBBBBBBBB")
    self.assertEqual(lines[-1], "device 4 ....XXXXXXXXX....")

  def test_micro_batches_in_flight_are_refused(self):
    pipeline = _short_pipeline()
    state = pipeline.init(jax.random.key(0)).replace(fed=9)
    with self.assertRaisesRegex(ValueError, "empty pipeline; 9 micro-batches"):
      pbp.devices.record(pipeline, state, *_short_samples(9))


class MemoryTest(absltest.TestCase):
  def test_counts_what_each_device_holds(self):
    pipeline = _pipeline({})
    weights = np.array([3 * 4 + 4, 20, 20, 20, 4 * 2 + 2])
    memory = pipeline.memory()
    np.testing.assert_array_equal(memory["params"], 8 * weights)
    np.testing.assert_array_equal(memory["opt_state"], 8 * weights)
    np.testing.assert_array_equal(memory["weights"], 9 * 8 * weights)
    np.testing.assert_array_equal(
      memory["inputs"], 9 * 8 * np.array([3, 4, 4, 4, 4])
    )
    recomputing = dataclasses.replace(pipeline, backward="recompute")
    self.assertEqual(recomputing.memory()["weights"].sum(), 0)


if __name__ == "__main__":
  absltest.main()
