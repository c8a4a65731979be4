"""Evaluation one operation at a time: what comes out, and what is compiled."""

import contextlib

from absl.testing import absltest, parameterized
import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import network
from pbp_jax.op_by_op import op_by_op

_EXAMPLE = np.ones((1, 4), np.float32)


def _function(key, tree, scale=2.0):
  noise = jax.random.normal(key)
  return {
    "noisy": jax.tree.map(lambda x: scale * x + noise.astype(x.dtype), tree),
    "none": None,
    "key": jax.random.fold_in(key, 1),
    "count": 3,
  }


def _bare(tree):
  """Arrays in the place of random keys."""
  is_key = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if is_key(x) else x, tree
  )


@contextlib.contextmanager
def _counting_compilations():
  """A list that gets an entry for each program that XLA compiles."""
  seconds = []

  def listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
      seconds.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def _simulator(stages):
  return pbp.Simulator(
    stages,
    lambda out, target: jnp.mean((out - target) ** 2),
    optax.sgd(0.1),
    pbp.schedules.pipelined_backprop(len(stages)),
  )


class OpByOpTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("as_it_is", lambda function: function),
    ("jitted", jax.jit),
    ("mapped", lambda function: lambda key, tree, **scale: jax.vmap(
      lambda tree: function(key, tree, **scale), out_axes={
        "noisy": 0, "none": None, "key": None, "count": None})(tree)),
    ("derivative", lambda function: lambda key, tree, **scale: jax.jvp(
      lambda tree: function(key, tree, **scale)["noisy"], (tree,), (tree,))),
  )  # fmt: skip
  def test_results_are_the_functions(self, transform):
    key = jax.random.key(0)
    tree = [np.ones((2, 3), np.float32), (jnp.zeros((2, 3), jnp.float16),)]
    for arguments in ({}, {"scale": 3.0}):
      got = transform(op_by_op(_function))(key, tree, **arguments)
      want = transform(_function)(key, tree, **arguments)
      chex.assert_trees_all_equal_structs(got, want)
      chex.assert_trees_all_close(_bare(got), _bare(want), rtol=1e-6)

  def test_what_is_not_needed_is_not_run(self):
    called = []

    def function(x):
      shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
      y = jax.pure_callback(lambda x: called.append(1) or x, shape, x)
      return 2 * x if x.ndim else y

    self.assertEqual(op_by_op(function)(jnp.ones(1)), 2)
    self.assertEmpty(called)
    self.assertEqual(op_by_op(function)(jnp.float32(3)), 3)
    self.assertNotEmpty(called)

  def test_an_argument_that_is_not_needed_may_be_a_shape(self):
    function = op_by_op(lambda x, y: x + y.size)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    self.assertEqual(function(jnp.float32(1), shape), 5)
    with self.assertRaises(TypeError):
      function(shape, jnp.ones(4))

  def test_results_are_new_arrays(self):
    x = jnp.ones(3)
    results = op_by_op(lambda y: (x, x, y, y))(x)
    places = {result.unsafe_buffer_pointer() for result in (x, *results)}
    self.assertLen(places, 5)

  def test_traces_once(self):
    traces = []
    function = op_by_op(lambda x: traces.append(1) or 2 * x)
    for x in (1.0, 2.0):
      self.assertEqual(function(jnp.float32(x)), 2 * x)
    self.assertLen(traces, 1)


class InitTest(parameterized.TestCase):
  def test_equal_stages_compile_once(self):
    programs = []
    for num_stages in (6, 12, 24):
      simulator = _simulator([nn.Dense(4) for _ in range(num_stages)])
      with _counting_compilations() as compiled:
        simulator.init(jax.random.key(0), _EXAMPLE)
      programs.append(len(compiled))
    # The numbers of the first stages; the state that the run starts in.
    self.assertEqual(programs[1:], [1, 1])

  @parameterized.parameters("residual_mlp", "resnet8")
  def test_draws_what_a_program_draws(self, model):
    stages = pbp.models.get(model)
    side, channels = (8, 1) if model == "residual_mlp" else (32, 3)
    example = np.zeros((1, side, side, channels), np.float32)
    simulator = _simulator(stages)
    keys = jax.random.split(jax.random.key(0), 2)
    one = simulator.init(keys[1], example).params
    mapped = jax.vmap(lambda key: simulator.init(key, example).params)(keys)
    chex.assert_trees_all_equal(one, jax.tree.map(lambda x: x[1], mapped))
    compiled = jax.jit(simulator.init)(keys[1], example).params
    # Normal numbers are rounded as those near 1 are.
    chex.assert_trees_all_close(one, compiled, rtol=1e-6, atol=1e-7)
    drawn = network.init(
      simulator.stages, jax.random.split(keys[1])[0], example
    )
    chex.assert_trees_all_equal(one, drawn[0])

  def test_devices_draw_what_the_simulator_draws(self):
    stages = pbp.models.get("resnet8")
    example = np.zeros((1, 32, 32, 3), np.float32), np.zeros((1, 10))
    on_one = pbp.devices.Partition(np.ones(len(stages)), np.array([0]))
    simulator = _simulator(on_one.merge(stages))
    pipeline = pbp.devices.Pipeline(
      simulator.stages,
      simulator.loss_fn,
      simulator.optimizer,
      simulator.schedule,
      example=example,
    )
    key = jax.random.key(0)
    chex.assert_trees_all_equal(
      pipeline.gather(pipeline.init(key)).params,
      jax.device_get(simulator.init(key, example[0]).params),
    )

  def test_a_shape_is_example_enough(self):
    simulator = _simulator([nn.Dense(4)] * 2)
    shape = jax.ShapeDtypeStruct(_EXAMPLE.shape, _EXAMPLE.dtype)
    states = [simulator.init(jax.random.key(0), x) for x in (_EXAMPLE, shape)]
    chex.assert_trees_all_equal(*map(_bare, states))

  def test_weights_may_depend_on_the_example(self):
    stage = pbp.Stage(
      init=lambda key, x: {"mean": x.mean()},
      apply=lambda params, x: x + params["mean"],
    )
    state = _simulator([stage] * 3).init(jax.random.key(0), _EXAMPLE)
    means = [float(params["mean"]) for params in state.params]
    self.assertEqual(means, [1.0, 2.0, 4.0])

  def test_given_weights_outlive_a_run_that_takes_its_state(self):
    stages = pbp.as_stages([nn.Dense(4)] * 3)
    given = _simulator(stages).init(jax.random.key(0), _EXAMPLE).params
    simulator = _simulator(pbp.with_params(stages, given))
    state = simulator.init(jax.random.key(1), _EXAMPLE)
    data = np.ones((5, *_EXAMPLE.shape), np.float32)
    simulator.run(state, data, data, donate=True)
    before = _simulator(stages).init(jax.random.key(0), _EXAMPLE).params
    chex.assert_trees_all_equal(given, before)


if __name__ == "__main__":
  absltest.main()
