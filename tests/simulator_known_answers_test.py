"""The scan against the eighteen known answers, in both precisions.

`PBP_LONG=1 pytest tests/simulator_known_answers_test.py` runs all in float32
too, and not only those that share most of their program.
"""

import os

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests import chain
from tests.reference import known_answers

_CASES = known_answers.load("pipeline_chain")


def _run(simulator):
  inputs, targets = chain.samples()
  state = chain.started(simulator, inputs[0])
  state, metrics = simulator.run(state, inputs, targets)
  return metrics["loss"], state.params


def _assert_close(got, expected, atol):
  got, expected = list(got), list(expected)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol),
    got,
    expected,
  )


class Float64Test(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in _CASES)
  def test_agrees_to_ten_digits(self, name):
    case = _CASES[name]
    with jax.enable_x64(True):
      losses, params = _run(chain.simulator(case["settings"]))
    losses = np.asarray(losses)
    self.assertEqual(losses.dtype, np.float64)
    _assert_close(
      [losses[:3], losses[-3:], losses.mean()],
      [
        np.array(case["loss_first"]),
        np.array(case["loss_last"]),
        np.array(case["loss_mean"]),
      ],
      atol=1e-10,
    )
    final = [
      {leaf: np.array(value) for leaf, value in stage.items()}
      for stage in case["final_params"]
    ]
    _assert_close(params, final, atol=1e-10)


# Settings that make another program; the rest are numbers, traced below.
_STATIC = ("pipelined", "consistency", "accumulate", "form")
_TRACED = ("sc", "lwp", "weight_decay")


def _groups():
  """The cases, in groups that one compiled program runs at once."""
  groups = {}
  for name, case in _CASES.items():
    static = {k: v for k, v in case["settings"].items() if k in _STATIC}
    groups.setdefault(str(static), (static, []))[1].append(name)
  made = [(names[0], static, names) for static, names in groups.values()]
  return sorted(made, key=lambda group: len(group[2]), reverse=True)


_NUM_GROUPS = None if "PBP_LONG" in os.environ else 3


class Float32Test(parameterized.TestCase):
  def test_every_case_is_in_a_group(self):
    self.assertLen(sum((names for _, _, names in _groups()), []), len(_CASES))

  @parameterized.named_parameters(_groups()[:_NUM_GROUPS])
  def test_agrees_as_far_as_perturbations_grow(self, static, names):
    """Cases that differ in numbers only run side by side, by vmap."""
    schedule = chain.schedule(static)
    form = static.get("form", "velocity")

    def run(sc, lwp, weight_decay):
      optimizer = optax.chain(
        optax.add_decayed_weights(weight_decay),
        pbp.spike_compensation(chain.MOMENTUM, sc * schedule.delay),
        optax.scale_by_learning_rate(chain.LEARNING_RATE),
        pbp.linear_weight_prediction(
          lwp * schedule.delay,
          form,
          chain.LEARNING_RATE if form == "velocity" else None,
        ),
      )
      return _run(chain.simulator(static, optimizer=optimizer))

    settings = [_CASES[name]["settings"] for name in names]
    numbers = [
      jnp.array([each.get(key, 0.0) for each in settings]) for key in _TRACED
    ]
    losses, params = jax.jit(jax.vmap(run))(*numbers)
    self.assertEqual(losses.dtype, np.float32)
    for j, each in enumerate(settings):
      twin = known_answers.run(each)
      _assert_close(losses[j, :50], twin.losses[:50], atol=1e-5)
      _assert_close(losses[j], twin.losses, atol=5e-3)
      mine = jax.tree.map(lambda leaf, j=j: leaf[j], params)
      _assert_close(mine, twin.params, atol=5e-3)


if __name__ == "__main__":
  absltest.main()
