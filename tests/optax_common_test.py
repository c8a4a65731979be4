"""Optax's own common tests for contributed optimizers, run on our links.

They ship in the optax wheel, as a module that is private to optax; what it
tests of its own optimizers is read off and run on every row of the conformance
table. A link stands in a chain with a rate at which it can converge.

`PBP_LONG=1 pytest tests/optax_common_test.py` takes all of optax's dtypes and
targets, of which two each tell most.
"""

import functools
import inspect
import os
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import optax
from optax.contrib import _common_test as common

from tests.conformance_rows import ROWS

_EACH_ROW = [(name, name) for name in ROWS]


def _optimizer(name):
  """The row's link, in a chain that can be called as optax calls its own."""
  row = ROWS[name]
  optimizer = row.chain(row.link(), rate=row.rate)
  if not row.reads_stale_params:
    return optimizer

  def update(updates, state, params=None, **extra):
    """Gives what a loop without a delay would give: the newest weights."""
    return optimizer.update(
      updates, state, params, stale_params=params, **extra
    )

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _common(test_name):
  """A test of optax's as it was before it was parameterized."""
  for name, method in vars(common.ContribTest).items():
    if name.rstrip("0123456789") == test_name:
      return inspect.unwrap(method)
  raise AssertionError(f"This optax has no common test {test_name}.")


def _each_row_and(values, more=()):
  """Named parameters: every row with every value, at length with more."""
  values = [*values, *(more if "PBP_LONG" in os.environ else ())]
  return [(f"{name}_{value}", name, value) for name in ROWS for value in values]


class OptaxCommonTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # Optax adds vectors to scalars' rows in its targets.
    self.enter_context(jax.numpy_rank_promotion("allow"))

  def _run(self, test_name, name, factory=None, kwargs=None, **arguments):
    make = factory or functools.partial(_optimizer, name)
    with mock.patch.object(common, "_get_opt_factory", lambda _: make):
      _common(test_name)(
        self,
        opt_name=name,
        opt_kwargs=kwargs or {},
        wrapper_name=None,
        wrapper_kwargs=None,
        **arguments,
      )

  @parameterized.named_parameters(_EACH_ROW)
  def test_extra_arguments_are_accepted(self, name):
    self._run("test_optimizers_accept_extra_args", name, wrap=False)

  @parameterized.named_parameters(
    (name, name)
    for name, row in ROWS.items()
    if not row.reads_stale_params
    and not any(isinstance(row.arguments[key], int) for key in row.static)
  )
  def test_it_can_be_wrapped_in_inject_hyperparams(self, name):
    """The link alone, as far as optax's test knows what it needs.

    It gives no extra arguments and has its own list of static ones; the
    conformance table injects the other rows too.
    """
    self._run(
      "test_optimizers_can_be_wrapped_in_inject_hyperparams",
      name,
      factory=ROWS[name].factory,
      kwargs=ROWS[name].arguments,
    )

  @parameterized.named_parameters(_each_row_and(["bfloat16", "float32"]))
  def test_updates_have_the_dtype_of_the_parameters(self, name, dtype):
    self._run("test_preserve_dtype", name, dtype=dtype)

  @parameterized.named_parameters(_each_row_and(["bfloat16"], ["float32"]))
  def test_gradients_accumulate_in_multi_steps(self, name, dtype):
    self._run("test_gradient_accumulation", name, dtype=dtype)

  @parameterized.named_parameters(
    _each_row_and(["bfloat16", "float32"], ["float16", "float64"])
  )
  def test_states_are_stable(self, name, dtype):
    self._run(
      "test_state_shape_dtype_shard_stability", name, dtype=jnp.dtype(dtype)
    )

  @parameterized.named_parameters(
    _each_row_and(
      ["rosenbrock", "mixed_tensor_target"], ["parabola", "matrix_parabola"]
    )
  )
  def test_it_converges(self, name, target):
    if ROWS[name].never_converges:
      self.skipTest(ROWS[name].never_converges)
    self._run(
      "test_optimizers",
      name,
      target=getattr(common, f"_setup_{target}"),
      dtype="float32",
    )


if __name__ == "__main__":
  absltest.main()
