"""Backward on other weights, against backward passes written by hand."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import two_version_vjp
from tests import two_version_cases, xla
from tests.reference import two_version as by_hand

_NAMES = [(name, name) for name in two_version_cases.CASES]


def _normal(rng, shapes):
  if isinstance(shapes, np.ndarray):
    return shapes
  if isinstance(shapes, dict):
    return {name: _normal(rng, shape) for name, shape in shapes.items()}
  if isinstance(shapes[0], tuple):
    return tuple(_normal(rng, shape) for shape in shapes)
  return rng.normal(size=shapes)


def _arguments(case):
  """Forward and backward weights, unequal, and an input."""
  rng = np.random.default_rng(0)
  return [_normal(rng, tree) for tree in (case.shapes, case.shapes, case.x)]


def _both_passes(two_version, fwd, bwd, x):
  """The value, a cotangent, and the gradients of both versions and x."""
  shapes = jax.eval_shape(two_version, fwd, bwd, x)
  rng = np.random.default_rng(1)
  dy = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)

  @jax.jit
  def passes(fwd, bwd, x, dy):
    y, pullback = jax.vjp(two_version, fwd, bwd, x)
    d_fwd, d_bwd, dx = pullback(dy)
    is_whole = lambda leaf: leaf.dtype == jax.dtypes.float0
    return (
      y,
      d_fwd,
      d_bwd,
      None if any(map(is_whole, jax.tree.leaves(dx))) else dx,
    )

  y, *gradients = passes(fwd, bwd, x, dy)
  return y, dy, *gradients


def _assert_close(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12),
    got,
    expected,
  )


class UnequalVersionsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(_NAMES)
  def test_saved_uses_forward_activations_and_backward_weights(self, name):
    case = two_version_cases.CASES[name]
    fwd, bwd, x = _arguments(case)
    y, dy, d_fwd, d_bwd, dx = _both_passes(
      two_version_vjp.saved(case.function), fwd, bwd, x
    )
    self._check(y, d_fwd, d_bwd, dx, case.hand(fwd, bwd, x, dy))

  @parameterized.named_parameters(_NAMES)
  def test_recompute_uses_backward_weights_throughout(self, name):
    case = two_version_cases.CASES[name]
    fwd, bwd, x = _arguments(case)
    y, dy, d_fwd, d_bwd, dx = _both_passes(
      two_version_vjp.recompute(case.function), fwd, bwd, x
    )
    value, _, _ = case.hand(fwd, fwd, x, dy)
    _, grads, d_input = case.hand(bwd, bwd, x, dy)
    self._check(y, d_fwd, d_bwd, dx, (value, grads, d_input))

  def _check(self, y, d_fwd, d_bwd, dx, expected):
    value, grads, d_input = expected
    _assert_close(y, value)
    _assert_close(d_bwd, grads)
    _assert_close(d_fwd, jax.tree.map(np.zeros_like, grads))
    _assert_close(dx, d_input)

  @parameterized.named_parameters(
    ("saved", two_version_vjp.saved), ("recompute", two_version_vjp.recompute)
  )
  def test_further_arguments_are_constants_to_both_passes(self, make):
    def dropout(params, x, key):
      keep = jax.random.bernoulli(key, 0.5, (5, 3))
      return jnp.where(keep, x @ params["w"], 0.0)

    rng = np.random.default_rng(0)
    fwd, bwd = (_normal(rng, {"w": (4, 3)}) for _ in range(2))
    x, dy = rng.normal(size=(5, 4)), rng.normal(size=(5, 3))
    key = jax.random.key(2)
    _, pullback = jax.vjp(
      lambda bwd, x: make(dropout)(fwd, bwd, x, key), bwd, x
    )
    d_bwd, dx = pullback(jnp.asarray(dy))
    mask = np.array(jax.random.bernoulli(key, 0.5, (5, 3)))
    _, grads, d_input = by_hand.masked_dense(fwd, bwd, x, dy, mask)
    _assert_close(d_bwd, grads)
    _assert_close(dx, d_input)

  @parameterized.named_parameters(
    ("saved", two_version_vjp.saved), ("recompute", two_version_vjp.recompute)
  )
  def test_replicas_by_vmap_are_each_alone(self, make):
    case = two_version_cases.CASES["scan_over_time"]
    rng = np.random.default_rng(0)
    replicas = [
      [_normal(rng, tree) for tree in (case.shapes, case.shapes, case.x)]
      for _ in range(3)
    ]
    loss = lambda bwd, fwd, x: jnp.sum(make(case.function)(fwd, bwd, x) ** 2)
    gradients = lambda fwd, bwd, x: jax.grad(loss, (0, 2))(bwd, fwd, x)
    together = jax.jit(jax.vmap(gradients))(
      *jax.tree.map(lambda *leaves: np.stack(leaves), *replicas)
    )
    alone = jax.jit(gradients)
    for j, replica in enumerate(replicas):
      _assert_close(
        jax.tree.map(lambda leaf, j=j: leaf[j], together), alone(*replica)
      )


class EqualVersionsTest(parameterized.TestCase):
  @parameterized.named_parameters(_NAMES)
  def test_saved_is_plain_back_propagation_bit_for_bit(self, name):
    # What XLA fuses with the sums of a standardisation, and so how they round,
    # differs from CPU to CPU: op by op nothing is fused.
    with jax.disable_jit(name == "weight_standardisation"):
      self._check(two_version_cases.CASES[name], two_version_vjp.saved)

  @parameterized.named_parameters(
    (name, name) for name in ("dense_relu_dense", "attention", "remat")
  )
  def test_recompute_is_plain_back_propagation_bit_for_bit(self, name):
    self._check(two_version_cases.CASES[name], two_version_vjp.recompute)

  def _check(self, case, make):
    params, _, x = _arguments(case)
    two_version = make(case.function)

    @jax.jit
    def passes(params, x):
      both = (
        jax.vjp(case.function, params, x),
        jax.vjp(lambda bwd, x: two_version(params, bwd, x), params, x),
      )
      return [
        (y, pullback(jax.tree.map(lambda leaf: jnp.cos(1.0 + leaf), y)))
        for y, pullback in both
      ]

    plain, got = passes(params, x)
    jax.tree.map(np.testing.assert_array_equal, got, plain)


class CostTest(absltest.TestCase):
  def test_saved_has_the_matrix_products_of_plain_back_propagation(self):
    def chain(params, x):
      for w in params:
        x = jnp.tanh(x @ w)
      return x

    params = [jnp.ones((8, 8))] * 4
    x = jnp.ones((2, 8))
    two_version = two_version_vjp.saved(chain)
    plain = jax.grad(lambda p, x: chain(p, x).sum(), (0, 1))
    saved = jax.grad(lambda p, fwd, x: two_version(fwd, p, x).sum(), (0, 2))
    self.assertEqual(
      _count_products(saved, params, params, x),
      _count_products(plain, params, x),
    )


def _count_products(function, *arguments):
  text = jax.jit(function).lower(*arguments).compile(xla.AS_ELSEWHERE).as_text()
  return text.count(" dot(")


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      "while_loop",
      lambda w, x: jax.lax.while_loop(
        lambda carry: carry.sum() < 100, lambda carry: carry * w + 1, x
      ),
      "while",
    ),
    (
      "cond_on_a_weight",
      lambda w, x: jax.lax.cond(w.sum() > 0, lambda: x * w, lambda: x),
      "cond",
    ),
    (
      "while_loop_inside_jit",
      jax.jit(
        lambda w, x: jax.lax.while_loop(
          lambda carry: carry.sum() < 100, lambda carry: carry * w + 1, x
        )
      ),
      "while",
    ),
  )
  def test_names_what_cannot_be_taken_apart(self, function, name):
    w = x = jnp.ones(3)
    with self.assertRaisesRegex(ValueError, f"{name}.*recompute"):
      two_version_vjp.saved(function)(w, w, x)

  def test_a_weight_closed_over_by_a_custom_vjp_is_refused_as_by_jax(self):
    def function(weights, x):
      @jax.custom_vjp
      def scaled(y):
        return y * weights["scale"]

      scaled.defvjp(lambda y: (y, None), lambda _, g: (g,))
      return scaled(x * weights["w"]).sum()

    weights, x = {"scale": jnp.ones(3), "w": jnp.ones(3)}, jnp.ones(3)
    saved = two_version_vjp.saved(function)
    for loss in (jax.jit(function), lambda bwd, x: saved(weights, bwd, x)):
      with self.assertRaisesRegex(Exception, "closed-over value"):
        jax.grad(loss)(weights, x)


if __name__ == "__main__":
  absltest.main()
