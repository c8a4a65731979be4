"""The conformance table: what every link must stand, one row a link.

The rows are in `conformance_rows.py`; a public link without one fails here. All
numbers are compared in float64; what a wrapper must do to a link is told by the
link's own run without the wrapper.
"""

import functools

from absl.testing import absltest, parameterized
from flax import nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import conformance_rows
from tests.conformance_rows import RATE, ROWS

_STEPS = 3
_EACH_ROW = [(name, name) for name in ROWS]


def _params(dtype=None):
  """Three stages: a matrix and a scalar, nothing, a vector and an empty leaf.

  Args:
    dtype: The dtype of all leaves; by default float32 and bfloat16 are mixed.
  """
  return (
    {
      "scalar": jnp.asarray(0.5, dtype or jnp.float32),
      "matrix": jnp.linspace(-1, 1, 6, dtype=dtype or jnp.float32).reshape(
        3, 2
      ),
    },
    {},
    {
      "vector": jnp.linspace(0.5, 1, 4, dtype=dtype or jnp.bfloat16),
      "empty": jnp.zeros((0, 3), dtype or jnp.float32),
    },
  )


def _gradient(params, step):
  """Something that differs from step to step and from leaf to leaf."""
  return jax.tree.map(
    lambda w: ((1 + 0.5 * step) * jnp.cos(3 * w + step)).astype(w.dtype),
    params,
  )


def _update(optimizer, state, params, gradient):
  """An update, with the extra arguments that a simulator may pass."""
  optimizer = optax.with_extra_args_support(optimizer)
  stale = jax.tree.map(lambda w: (0.9 * w).astype(w.dtype), params)
  updates, state = optimizer.update(
    gradient, state, params, stale_params=stale, unknown=1.0
  )
  return optax.apply_updates(params, updates), state


def _views(state, params):
  return (
    params,
    pbp.predict_params(state, params),
    pbp.predict_params(state, params, "backward"),
  )


def _run(optimizer, params, steps=range(_STEPS), update=_update):
  """The last weights and their views."""
  state = optimizer.init(params)
  for step in steps:
    params, state = update(optimizer, state, params, _gradient(params, step))
  return _views(state, params)


_jitted_update = jax.jit(_update, static_argnums=0)


@functools.cache
def _plain_run(name):
  """The run of a row's chain, in float64 and without jit."""
  row = ROWS[name]
  return _run(row.chain(row.staged_link()), _params(float))


@functools.cache
def _scalar_run(name):
  """The same with the hyperparameters that fit any parameters."""
  row = ROWS[name]
  return _run(row.chain(row.link()), _params(float))


@functools.cache
def _other_run(name):
  """The same with all its numbers changed."""
  row = ROWS[name]
  return _run(row.chain(row.link(**row.others)), _params(float))


@functools.cache
def _run_without_link(name):
  return _run(ROWS[name].chain(optax.identity()), _params(float))


def _arrays(hyperparameters):
  return {k: jnp.asarray(v, float) for k, v in hyperparameters.items()}


def _assert_close(got, expected, rtol=1e-12):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14),
    got,
    expected,
  )


class CompletenessTest(parameterized.TestCase):
  def test_every_public_link_has_a_row(self):
    rows = {row.factory.__name__ for row in ROWS.values()}
    self.assertEqual(conformance_rows.public_links() - rows, set())

  def test_there_are_links_to_find(self):
    self.assertIn("spike_compensation", conformance_rows.public_links())

  def test_every_link_is_public(self):
    hidden = conformance_rows.links_on_disk() - conformance_rows.SHARED
    self.assertEqual(hidden - conformance_rows.public_links(), set())

  def test_every_public_function_says_what_it_returns(self):
    self.assertEqual(conformance_rows.functions_without_result_type(), set())

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_row_gives_every_number_a_second_value(self, name):
    row = ROWS[name]
    self.assertEqual(set(row.arguments), set(row.others) | set(row.static))


class RefusalTest(parameterized.TestCase):
  """What no link takes, told from the annotations of its arguments."""

  @parameterized.named_parameters(
    (f"{name}_{key}", name, key)
    for name, row in ROWS.items()
    for key in set(row.others) - conformance_rows.per_stage_arguments(row)
  )
  def test_one_number_is_not_one_a_stage(self, name, key):
    """Which would be broadcast against the axes of a weight."""
    row = ROWS[name]
    one = row.others[key]
    for value in ([one, one], np.array([one, one]), {"w": one}):
      with self.assertRaisesRegex(ValueError, f"^{key} must be one .*, got"):
        row.link(**{key: value})

    def traced(value):
      row.link(**{key: value})
      return value

    jax.eval_shape(traced, jnp.float32(0))
    with self.assertRaisesRegex(ValueError, f"^{key} must be one .*, got"):
      jax.eval_shape(traced, jnp.zeros(2))

  @parameterized.named_parameters(
    (f"{name}_{key}", name, key) for name in ROWS for key in ROWS[name].others
  )
  def test_no_number_is_infinite(self, name, key):
    for value in (np.inf, -np.inf, np.nan):
      with self.assertRaisesRegex(ValueError, f"^{key} must (hold|be one) "):
        ROWS[name].link(**{key: value})


class ConformanceTest(parameterized.TestCase):
  """In float64, on parameters whose top level is a tuple of stages."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_link_does_something(self, name):
    """Lest a comparison below compare identities."""
    got, without = _plain_run(name), _run_without_link(name)
    gaps = jax.tree.map(
      lambda a, b: np.abs(a - b).max(initial=0.0), got, without
    )
    self.assertGreater(max(jax.tree.leaves(gaps)), 1e-4)

  @parameterized.named_parameters(
    (f"{name}_{key}", name, key) for name in ROWS for key in ROWS[name].others
  )
  def test_every_number_counts(self, name, key):
    row = ROWS[name]
    changed = _run(
      row.chain(row.link(**{key: row.others[key]})), _params(float)
    )
    gaps = jax.tree.map(
      lambda a, b: np.abs(a - b).max(initial=0.0), changed, _scalar_run(name)
    )
    self.assertGreater(max(jax.tree.leaves(gaps)), 1e-9)

  @parameterized.named_parameters(_EACH_ROW)
  def test_jit_is_no_jit(self, name):
    row = ROWS[name]
    optimizer = row.chain(row.staged_link())
    got = _run(optimizer, _params(float), update=_jitted_update)
    _assert_close(got, _plain_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_injected_hyperparameters_are_the_given_ones(self, name):
    row = ROWS[name]
    got = _run(row.chain(row.injected_link()), _params(float))
    _assert_close(got, _scalar_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_injected_hyperparameters_may_be_changed(self, name):
    row = ROWS[name]
    optimizer = row.chain(row.injected_link())
    params = _params(float)
    state = optimizer.init(params)
    state = tuple(
      link._replace(hyperparams=_arrays({**link.hyperparams, **row.others}))
      if hasattr(link, "hyperparams")
      else link
      for link in state
    )
    for step in range(_STEPS):
      gradient = _gradient(params, step)
      params, state = _update(optimizer, state, params, gradient)
    _assert_close(_views(state, params), _other_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_masked_leaves_are_left_alone(self, name):
    row = ROWS[name]
    mask = (True, True, False)
    got = _run(row.chain(optax.masked(row.staged_link(), mask)), _params(float))
    expected, without = _plain_run(name), _run_without_link(name)
    for view in range(3):
      _assert_close(got[view][0], expected[view][0])
      _assert_close(got[view][2], without[view][2])

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_part_of_a_partition_is_on_its_own(self, name):
    row = ROWS[name]
    # With a momentum and an Adam of its own, which no view of ours may take.
    theirs = optax.chain(optax.scale_by_adam(), optax.sgd(RATE, 0.5))
    optimizer = optax.partition(
      {"ours": row.chain(row.staged_link()), "theirs": theirs},
      ("ours", "ours", "theirs"),
    )
    got, expected = _run(optimizer, _params(float)), _plain_run(name)
    plain = _run(theirs, _params(float))
    for view in range(3):
      _assert_close(got[view][0], expected[view][0])
      _assert_close(got[view][2], plain[view][2])

  @parameterized.named_parameters(_EACH_ROW)
  def test_multi_steps_of_equal_gradients_are_single_steps(self, name):
    row = ROWS[name]
    several = optax.MultiSteps(
      row.chain(row.staged_link()), 2, accumulator_dtype=jnp.float64
    )
    # Its own gradient_transformation() would drop the extra arguments.
    optimizer = optax.GradientTransformationExtraArgs(
      several.init, several.update
    )
    params = _params(float)
    state = optimizer.init(params)
    update = jax.jit(functools.partial(_update, optimizer))
    for step in range(_STEPS):
      gradient = _gradient(params, step)
      for _ in range(2):
        params, state = update(state, params, gradient)
    _assert_close(_views(state, params), _plain_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_not_finite_gradients_leave_no_trace(self, name):
    row = ROWS[name]
    optimizer = optax.apply_if_finite(row.chain(row.staged_link()), 5)
    params = _params(float)
    state = optimizer.init(params)
    update = jax.jit(functools.partial(_update, optimizer))
    for step in range(_STEPS):
      gradient = _gradient(params, step)
      bad = jax.tree.map(lambda g: g * np.nan, gradient)
      params, state = update(state, params, bad)
      params, state = update(state, params, gradient)
    _assert_close(_views(state, params), _plain_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_vmap_over_hyperparameters_is_a_loop(self, name):
    row = ROWS[name]
    if not row.others:
      self.skipTest("Its hyperparameters shape the state.")

    def run(hyperparameters):
      return _run(row.chain(row.link(**hyperparameters)), _params(float))

    first = {key: row.arguments[key] for key in row.others}
    both = jax.tree.map(
      lambda *values: jnp.asarray(values, float), first, dict(row.others)
    )
    got = jax.jit(jax.vmap(run))(both)
    for i, expected in enumerate((_scalar_run(name), _other_run(name))):
      _assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], got), expected)

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_train_state_of_flax_takes_it(self, name):
    row = ROWS[name]
    state = train_state.TrainState.create(
      apply_fn=None, params=_params(float), tx=row.chain(row.staged_link())
    )
    for step in range(_STEPS):
      gradient = _gradient(state.params, step)
      if row.reads_stale_params:  # apply_gradients takes no extra arguments
        params, opt_state = _update(
          state.tx, state.opt_state, state.params, gradient
        )
        state = state.replace(params=params, opt_state=opt_state)
      else:
        state = state.apply_gradients(grads=gradient)
    _assert_close(_views(state.opt_state, state.params), _plain_run(name))

  @parameterized.named_parameters(_EACH_ROW)
  def test_an_optimizer_of_nnx_takes_it(self, name):
    row = ROWS[name]
    params = _params(float)[0]
    model = nnx.Dict({key: nnx.Param(leaf) for key, leaf in params.items()})
    optimizer = nnx.Optimizer(model, row.chain(row.link()), wrt=nnx.Param)
    for step in range(_STEPS):
      weights = nnx.state(model, nnx.Param)
      stale = {"stale_params": jax.tree.map(lambda w: 0.9 * w, weights)}
      optimizer.update(
        model,
        _gradient(weights, step),
        **(stale if row.reads_stale_params else {}),
      )
    got = _views(optimizer.opt_state, nnx.state(model, nnx.Param))
    expected = _run(row.chain(row.link()), params)
    for seen, leaves in zip(got, expected, strict=True):
      self.assertIsInstance(seen, nnx.State)
      _assert_close(nnx.to_pure_dict(seen), leaves)


class DtypeTest(parameterized.TestCase):
  """With x64 off, in float32 and bfloat16 mixed."""

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_step_keeps_structure_shapes_and_dtypes(self, name):
    row = ROWS[name]
    optimizer = row.chain(row.staged_link())
    params = _params()
    state = optimizer.init(params)

    def step(carry, step):
      state, params = carry
      params, state = _update(optimizer, state, params, _gradient(params, step))
      for view in _views(state, params):
        jax.tree.map(_assert_same_type, view, params)
      return (state, params), None

    # A scan refuses a carry whose structure, shapes, dtypes or weak types move.
    (after, _), _ = jax.eval_shape(
      lambda carry: jax.lax.scan(step, carry, jnp.arange(2.0)), (state, params)
    )
    jax.tree.map(_assert_same_type, after, state)

  @parameterized.named_parameters(_EACH_ROW)
  def test_a_second_call_does_not_trace_again(self, name):
    row = ROWS[name]
    params = _params()
    optimizer = row.chain(row.staged_link())
    traces = []

    @jax.jit
    def step(state, params, gradient):
      traces.append(None)
      params, state = _update(optimizer, state, params, gradient)
      return state, params, _views(state, params)

    carry = (optimizer.init(params), params)
    for _ in range(3):  # traced as in a call, but not compiled
      carry = step.eval_shape(*carry, _gradient(params, 0))[:2]
    self.assertLen(traces, 1)

  @parameterized.named_parameters(_EACH_ROW)
  def test_bfloat16_stays_near_float32_and_leaves_it_alone(self, name):
    row = ROWS[name]
    got = _run(row.chain(row.staged_link()), _params())
    expected = _run(row.chain(row.staged_link()), _params(jnp.float32))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
        a.astype(np.float32), b, rtol=0, atol=0.05 if a.dtype != b.dtype else 0
      ),
      got,
      expected,
    )

  @parameterized.named_parameters(_EACH_ROW)
  def test_map_params_of_optax_works(self, name):
    row = ROWS[name]
    params = _params()
    for link in (row.staged_link(), row.injected_link()):
      optimizer = row.chain(link)
      state = optimizer.init(params)
      mapped = optax.tree.map_params(optimizer, lambda leaf: leaf, state)
      self.assertEqual(jax.tree.structure(mapped), jax.tree.structure(state))

  @parameterized.named_parameters(_EACH_ROW)
  def test_parameters_may_be_empty(self, name):
    row = ROWS[name]
    optimizer = row.chain(row.link())
    params, state = _update(optimizer, optimizer.init(()), (), ())
    self.assertEqual(_views(state, params), ((), (), ()))


def _assert_same_type(leaf, like):
  assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), (leaf, like)


if __name__ == "__main__":
  absltest.main()
