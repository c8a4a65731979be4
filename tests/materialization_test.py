"""Results that are kept in memory: same numbers, and XLA does keep them."""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import materialization
from pbp_jax.models import convolution, normalization
from tests import xla


def _row(table, index, factor=2):
  return factor * table[index]


_kept_row = materialization.materialized(static_argnums=2)(_row)


def _merged(function, *arguments):
  """The computations in which a row is looked up and used at once."""
  compiled = jax.jit(function).lower(*arguments).compile(xla.AS_ELSEWHERE)
  return [
    computation
    for computation in compiled.as_text().split("\n\n")
    if " dynamic-slice(" in computation and " sine(" in computation
  ]


class MaterializationTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("as_it_is", lambda function: function),
    ("jitted", jax.jit),
    ("mapped", lambda function: lambda table, index: jax.vmap(function)(
      jnp.stack([table, -table]), jnp.stack([index, index]))),
    ("derivative", lambda function: jax.grad(
      lambda table, index: (function(table, index) ** 3).sum())),
  )  # fmt: skip
  def test_value_and_derivatives_are_unchanged(self, transform):
    table = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(
      transform(_kept_row)(table, jnp.array(2)),
      transform(_row)(table, jnp.array(2)),
    )

  def test_static_arguments_are_static(self):
    table = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(_kept_row(table, 1, 5), 5 * table[1])

  def test_xla_merges_what_is_not_kept_only(self):
    arguments = jnp.ones((4, 32)), jnp.ones((16, 32)), jnp.array(2)
    use = lambda row: lambda table, x, i: jnp.sin(x + row(table, i)[None])
    self.assertEmpty(_merged(use(_kept_row), *arguments))
    self.assertNotEmpty(_merged(use(_row), *arguments))

  def test_what_is_called_inside_may_be_inlined(self):
    inner = jax.jit(jnp.sin)
    kept = materialization.materialized()(lambda x: inner(x) + 1)
    text = jax.jit(lambda x: kept(x)).lower(jnp.ones(3)).as_text()
    self.assertEqual(text.count("inlineable"), 1)

  @parameterized.named_parameters(("gpu", "gpu"), ("tpu", "tpu"))
  def test_other_backends_merge_as_they_like(self, backend):
    lower = lambda: (
      jax.jit(lambda *args: _kept_row(*args))
      .lower(jnp.ones((4, 3)), jnp.array(2))
      .as_text()
    )
    self.assertIn("inlineable", lower())
    with mock.patch.object(jax, "default_backend", lambda: backend):
      self.assertNotIn("inlineable", lower())

  def test_no_loop_looks_up_the_group_of_a_channel(self):
    """Where it does, a block's convolution takes several times as long."""
    scale, bias, kernel = jnp.ones(16), jnp.zeros(16), jnp.ones((3, 3, 16, 16))

    def block(x):
      y = normalization.group_norm(x, scale, bias, 8, 1e-6)
      y = convolution.separable_convolution(jax.nn.relu(y), kernel)
      return (y**2).sum()

    compiled = (
      jax.jit(jax.grad(block))
      .lower(jnp.ones((1, 32, 32, 16)))
      .compile(xla.AS_ELSEWHERE)
    )
    shifts = [
      computation
      for computation in compiled.as_text().split("\n\n")
      if " concatenate(" in computation
    ]
    self.assertNotEmpty(shifts)
    for computation in shifts:
      self.assertNotIn("f32[1,8]", computation)


if __name__ == "__main__":
  absltest.main()
