"""Wrong uses: each is refused at construction or trace time, by name."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_S = 3
_PB = pbp.schedules.pipelined_backprop(_S)
_STAGES = pbp.as_stages([nn.Dense(4), nn.Dense(4), nn.Dense(2)])
_INPUTS = jnp.zeros((6, 1, 4))
_TARGETS = jnp.zeros((6, 1, 2))


def _mean_square(y, target):
  return jnp.mean((y - target) ** 2)


def _simulator(optimizer=None, **changes):
  arguments = {
    "stages": _STAGES,
    "loss_fn": _mean_square,
    "optimizer": optimizer or optax.sgd(0.1, 0.9),
    "schedule": _PB,
    **changes,
  }
  return pbp.Simulator(**arguments)


def _init(*arguments, example=_INPUTS[0], **changes):
  return _simulator(*arguments, **changes).init(jax.random.key(0), example)


def _run(inputs=_INPUTS, targets=_TARGETS, lags=None, **changes):
  simulator = _simulator(**changes)
  state = jax.eval_shape(simulator.init, jax.random.key(0), _INPUTS[0])
  run = functools.partial(simulator.run, lags=lags)
  return jax.eval_shape(run, state, inputs, targets)


def _go_on(of, wanted=None, by_step=False, inputs=_INPUTS):
  """Runs or steps a simulator from the state of another one."""
  key = jax.random.key(0)
  state = jax.eval_shape(_simulator(**of).init, key, _INPUTS[0])
  simulator = _simulator(**(wanted or {}))
  if by_step:
    return jax.eval_shape(simulator.step, state, _INPUTS[0], _TARGETS[0])
  run = lambda state: simulator.run(state, inputs, _TARGETS)
  return jax.eval_shape(run, state)


def _go_on_from(what):
  return _simulator().run(what, _INPUTS, _TARGETS)


def _with_whole_weights():
  stage = pbp.Stage(
    lambda key, x: {"n": jnp.ones(4, int)},
    lambda params, x: x * params["n"][None],
  )
  return [stage, *_STAGES[1:]]


def _lwp(*links, **options):
  return optax.chain(*links, pbp.linear_weight_prediction(**options))


_TRACE = optax.trace(0.9)
_BATCH_NORM = nn.BatchNorm(use_running_average=False)

# name: (what is done, what the error must say, in this order).
_WRONG_USES = {
  "negative_delay_of_a_schedule": (
    lambda: pbp.schedules.from_delays([2, -1, 0]),
    ("delays", "-1"),
  ),
  "fractional_delay_of_a_schedule": (
    lambda: pbp.schedules.uniform_delay(_S, 1.5),
    ("delay", "int", "1.5"),
  ),
  "negative_delay_of_gradients": (
    lambda: pbp.delay_gradients(-1),
    ("delay", "-1"),
  ),
  "fractional_delay_of_gradients": (
    lambda: pbp.delay_gradients([1.5, 0, 0]),
    ("delay", "int", "1.5"),
  ),
  "negative_delay_of_spike_compensation": (
    lambda: pbp.spike_compensation(0.9, delay=[-2.0, 0, 0]),
    ("delay", "-2.0"),
  ),
  "negative_horizon": (
    lambda: pbp.linear_weight_prediction(-1.0, learning_rate=0.1),
    ("horizon", "-1.0"),
  ),
  "horizon_of_wrong_length": (
    lambda: _init(_lwp(_TRACE, horizon=[4.0, 2.0], learning_rate=0.1)),
    ("horizon", r"\[4.0, 2.0\]", "list of 2.*tuple of 3"),
  ),
  "delay_of_wrong_length": (
    lambda: _init(optax.chain(pbp.delay_gradients([1, 2, 3, 4]))),
    ("delay", r"\[1, 2, 3, 4\]", "list of 4.*tuple of 3"),
  ),
  "momentum_above_one": (
    lambda: pbp.spike_compensation(1.5, delay=1),
    ("momentum", "1.5"),
  ),
  "velocity_form_without_momentum_buffer": (
    lambda: _init(_lwp(optax.sgd(0.1), horizon=1.0, learning_rate=0.1)),
    ("velocity", "momentum buffer", "weight"),
  ),
  "velocity_form_with_two_momentum_buffers": (
    lambda: _init(_lwp(_TRACE, _TRACE, horizon=1.0, learning_rate=0.1)),
    ("velocity", "2 momentum"),
  ),
  "velocity_form_without_rate": (
    lambda: pbp.linear_weight_prediction(1.0, form="velocity"),
    ("learning_rate", "None"),
  ),
  "unknown_form": (
    lambda: pbp.linear_weight_prediction(1.0, form="momentum"),
    ("form", "velocity.*weight", "'momentum'"),
  ),
  "batch_statistics_of_linen": (
    lambda: _init(stages=[_BATCH_NORM, *_STAGES[1:]]),
    ("BatchNorm", "batch_stats", "GroupNorm"),
  ),
  "batch_statistics_of_nnx": (
    lambda: pbp.as_stages([lambda rngs: nnx.BatchNorm(4, rngs=rngs)]),
    ("BatchNorm", "BatchStat", "GroupNorm"),
  ),
  "shapes_that_do_not_fit_between_stages": (
    lambda: _init(
      stages=pbp.as_stages(
        [nn.Dense(4), lambda rngs: nnx.Linear(5, 4, rngs=rngs), nn.tanh]
      )
    ),
    ("Stage 1", "Linear", "1,4"),
  ),
  "example_that_does_not_fit_the_first_stage": (
    lambda: _init(
      stages=pbp.as_stages(
        [lambda rngs: nnx.Linear(5, 4, rngs=rngs), nn.tanh, nn.tanh]
      )
    ),
    ("Stage 0", "Linear", "1,4"),
  ),
  "inputs_that_do_not_fit_the_first_stage": (
    lambda: _run(inputs=jnp.zeros((6, 1, 5))),
    ("Stage 0", "1,5"),
  ),
  "loss_that_is_no_scalar": (
    lambda: _run(loss_fn=lambda y, t: (y - t) ** 2),
    ("loss_fn", "scalar", r"\(1, 2\)"),
  ),
  "loss_that_is_whole": (
    lambda: _run(loss_fn=lambda y, t: jnp.argmax(y)),
    ("loss_fn", "real scalar", "int32"),
  ),
  "aux_that_is_not_announced": (
    lambda: _run(loss_fn=lambda y, t: (_mean_square(y, t), y)),
    ("loss_fn", "scalar"),
  ),
  "aux_that_is_announced_and_missing": (
    lambda: _run(has_aux=True),
    ("loss_fn", "aux"),
  ),
  "inputs_longer_than_targets": (
    lambda: _run(targets=_TARGETS[:5]),
    ("leading axis", "5.*6"),
  ),
  "inputs_without_micro_batches": (
    lambda: _run(inputs=jnp.zeros([])),
    ("leading axis",),
  ),
  "inputs_in_a_list": (
    lambda: _run(inputs=list(_INPUTS)),
    ("leading axis", "1.*6", "a list is a tree of its items"),
  ),
  "inputs_that_are_numbers_in_a_dict": (
    lambda: _go_on({}, inputs={"x": [0.0] * 6}),
    ("leading axis", "a list is a tree of its items"),
  ),
  "lags_of_wrong_shape": (
    lambda: _run(lags=jnp.zeros((_S, 5), int)),
    ("lags", r"\(3, 6\)", r"\(3, 5\)"),
  ),
  "lags_in_a_list": (
    lambda: _run(lags=np.zeros((_S, 6), int).tolist()),
    ("lags must be an array", "got list"),
  ),
  "lags_that_are_objects": (
    lambda: _run(lags=np.full((_S, 6), None)),
    ("lags must be ints", "got object"),
  ),
  "lags_beyond_the_ring": (
    lambda: _run(lags=np.full((_S, 6), [[4], [3], [0]])),
    ("lags", "max_lag, 2 for stage 1", "got 3 for its micro-batch 0"),
  ),
  "lags_below_zero": (
    lambda: _run(lags=np.full((_S, 6), [[4], [2], [-1]])),
    ("lags", ">= 0", "0 for stage 2", "got -1"),
  ),
  "lags_that_are_not_whole": (
    lambda: _run(lags=jnp.zeros((_S, 6))),
    ("lags", "ints", "float32"),
  ),
  "inputs_that_are_lists": (
    lambda: _go_on({}, inputs=[[[0.0] * 4]] * 6),
    ("leading axis", "give an array"),
  ),
  "state_of_another_schedule": (
    lambda: _go_on({"schedule": pbp.schedules.uniform_delay(_S, 9)}),
    ("float32.5, 4. in state.history", r"got float32\[10, 4\]"),
  ),
  "state_of_another_schedule_for_a_step": (
    lambda: _go_on(
      {"schedule": pbp.schedules.uniform_delay(_S, 9)}, by_step=True
    ),
    ("float32.5, 4. in state.history", r"got float32\[10, 4\]"),
  ),
  "state_of_another_update_interval": (
    lambda: _go_on({}, {"schedule": pbp.schedules.uniform_delay(_S, 2, 3)}),
    ("state",),
  ),
  "state_of_another_optimizer": (
    lambda: _go_on({"optimizer": optax.adam(0.1)}),
    ("state.opt_state", "got nothing"),
  ),
  "state_with_another_history_dtype": (
    lambda: _go_on({"history_dtype": jnp.bfloat16}),
    ("history", "float32.*got bfloat16"),
  ),
  "state_of_other_stages": (
    lambda: _go_on(
      {
        "stages": _STAGES[:2],
        "schedule": pbp.schedules.pipelined_backprop(2),
      }
    ),
    ("params", "3 stages", "2 of them"),
  ),
  "state_that_is_none": (
    lambda: _go_on_from(None),
    ("state", "PipelineState", "NoneType"),
  ),
  "state_that_is_weights": (
    lambda: _go_on_from(({"w": 1.0},)),
    ("state", "PipelineState", "tuple"),
  ),
  "weights_of_fewer_stages": (
    lambda: _simulator().predict(({},) * 2, _INPUTS[0]),
    ("params", "3 stages", "got 2 of them"),
  ),
  "weights_that_are_a_state": (
    lambda: _simulator().predict(_init(), _INPUTS[0]),
    ("params", "state.params", "got PipelineState"),
  ),
  "weights_that_are_whole": (
    lambda: _init(stages=_with_whole_weights()),
    ("floating point", "stage 0", "int32"),
  ),
  "key_that_is_a_seed": (
    lambda: _simulator().init(0, _INPUTS[0]),
    ("key", "random key", "got 0"),
  ),
  "keys_for_a_key": (
    lambda: _simulator().init(jax.random.split(jax.random.key(0)), _INPUTS[0]),
    ("key", "one random key"),
  ),
  "history_dtype_that_is_none": (
    lambda: _simulator(history_dtype="foo"),
    ("history_dtype", "'foo'"),
  ),
  "optimizer_that_has_to_be_asked_for_one": (
    lambda: _simulator(optax.MultiSteps(optax.sgd(0.1), 2)),
    ("optimizer", "gradient_transformation"),
  ),
  "batch_function_without_a_pair": (
    lambda: _run(batch_fn=lambda key, x, y: None),
    ("batch_fn", "pair", "None"),
  ),
  "traced_step_without_a_period": (
    lambda: _run(schedule=dataclasses.replace(_PB, period=None)),
    ("no period", "traced", "lags"),
  ),
  "schedule_of_another_pipeline": (
    lambda: _simulator(schedule=pbp.schedules.pipelined_backprop(5)),
    ("schedule", "3", "5"),
  ),
  "schedule_that_is_none": (
    lambda: _simulator(schedule=[4, 2, 0]),
    ("schedule", r"\[4, 2, 0\]"),
  ),
  "unknown_backward": (
    lambda: _simulator(backward="stored"),
    ("backward", "saved.*recompute", "'stored'"),
  ),
  "stashed_backward_without_stashing": (
    lambda: _simulator(backward="stashed"),
    ("backward", "'stashed'", "with_weight_stashing"),
  ),
  "optimizer_that_is_a_function": (
    lambda: _simulator(optimizer=optax.sgd),
    ("optimizer", "GradientTransformation", "sgd"),
  ),
  "stages_that_are_one_module": (
    lambda: _simulator(stages=nn.Dense(4)),
    ("layers", "sequence", "Dense"),
  ),
  "loss_that_is_no_function": (
    lambda: _simulator(loss_fn=0.5),
    ("loss_fn", "0.5"),
  ),
  "batch_function_that_is_no_function": (
    lambda: _simulator(batch_fn=3),
    ("batch_fn", "3"),
  ),
  "loop_that_cannot_be_taken_apart": (
    lambda: _run(
      stages=[
        pbp.Stage(
          lambda key, x: {"w": jnp.ones(4)},
          lambda params, x: jax.lax.while_loop(
            lambda y: y.sum() < 9, lambda y: y * params["w"][None] + 1, x
          ),
        ),
        *_STAGES[1:],
      ]
    ),
    ("Stage 0", "while", "recompute"),
  ),
  "unknown_view": (
    lambda: pbp.predict_params(optax.EmptyState(), {}, which="sideways"),
    ("which", "forward.*backward", "'sideways'"),
  ),
}


class WrongUseTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name, *use) for name, use in _WRONG_USES.items()
  )
  def test_is_refused_by_name_and_value(self, use, says):
    with self.assertRaisesRegex(ValueError, "(?s)" + ".*".join(says)):
      use()

  def test_the_same_things_done_right_are_not_refused(self):
    """Lest a broken helper raises in place of what is tested."""
    optimizer = _lwp(_TRACE, horizon=[4.0, 2.0, 0.0], learning_rate=0.1)
    _run(optimizer=optimizer, backward="recompute")
    _run(schedule=_PB.with_weight_stashing(), backward="stashed")

  def test_stashed_weights_meet_one_ordinary_backward(self):
    """So a stage that `saved` can't take apart is fine there."""
    stage = pbp.Stage(
      lambda key, x: {"w": jnp.ones([])},
      lambda params, x: jax.lax.cond(
        params["w"] > 0, lambda: x * params["w"], lambda: x
      ),
    )
    _run(stages=[stage, *_STAGES[1:]], schedule=_PB.with_weight_stashing())


if __name__ == "__main__":
  absltest.main()
