"""Backward on other weights, against backward passes written by hand."""

import functools
import typing

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import two_version_vjp
from tests.reference import two_version as by_hand

_W = {"w": (4, 3)}
_SQUARE = {"w": (4, 4)}
_X = (5, 4)


class _Case(typing.NamedTuple):
  function: typing.Callable  # f(params, x)
  hand: typing.Callable  # The same by hand, both passes.
  shapes: typing.Any  # Of the parameters.
  x: typing.Any  # Shapes of the input, or the input.


def _linen(module):
  return lambda params, x: module.apply({"params": params}, x)


@jax.custom_vjp
def _round_straight_through(w):
  return jnp.round(w)


_round_straight_through.defvjp(
  lambda w: (jnp.round(w), None), lambda _, g: (g,)
)


@jax.custom_jvp
def _round_by_jvp(w):
  return jnp.round(w)


_round_by_jvp.defjvp(lambda primals, tangents: (jnp.round(*primals), *tangents))


@jax.custom_vjp
def _peculiar_matmul(x, w):
  return x @ w


_peculiar_matmul.defvjp(
  lambda x, w: (x @ w, (x, w)),
  lambda saved, g: (3 * g @ saved[1].T, 2 * saved[0].T @ g),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _peculiar_matmul_with_scale(scale, x, w):
  del scale
  return x @ w


_peculiar_matmul_with_scale.defvjp(
  lambda scale, x, w: (x @ w, (x, w)),
  lambda scale, saved, g: (
    (scale + 1) * g @ saved[1].T,
    scale * saved[0].T @ g,
  ),
)


@jax.custom_jvp
def _peculiar_matmul_by_jvp(x, w):
  return x @ w


@_peculiar_matmul_by_jvp.defjvp
def _(primals, tangents):
  (x, w), (dx, dw) = primals, tangents
  return x @ w, 3 * dx @ w + 2 * x @ dw


class _PeculiarDense(nn.Module):
  """A module whose one operation has a backward rule of its own."""

  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 3))
    return _peculiar_matmul(x, w)


def _standardised(params, x):
  w = params["w"]
  centred = w - jnp.mean(w, axis=0, keepdims=True)
  deviation = jnp.sqrt(jnp.mean(centred**2, axis=0, keepdims=True))
  return x @ (centred / deviation)


def _recurrent(params, x):
  def step(hidden, x_t):
    hidden = jnp.tanh(hidden @ params["w"] + x_t @ params["u"])
    return hidden, hidden

  start = jnp.broadcast_to(params["start"][None], (x.shape[1], 3))
  return jax.lax.scan(step, start, x)[1]


def _layers(params, x):
  step = lambda hidden, w: (jnp.tanh(hidden @ w), None)
  return jax.lax.scan(step, x, params["w"])[0]


def _layers_backwards(params, x):
  step = lambda hidden, w: (jnp.tanh(hidden @ w), None)
  return jax.lax.scan(step, x, params["w"][::-1], reverse=True)[0]


def _layers_by_fori(params, x):
  step = lambda i, hidden: jnp.tanh(hidden @ params["w"][i])
  return jax.lax.fori_loop(0, 3, step, x)


def _powers(params, x):
  def step(power, x_t):
    power = power * params["w"]
    return power, x_t * power[None]

  return jax.lax.scan(step, jnp.ones_like(params["w"]), x)[1]


def _branches(params, x):
  return jax.lax.cond(
    x.sum() > 0, lambda: x @ params["a"], lambda: jnp.tanh(x @ params["b"])
  )


def _branches_by_switch(params, x):
  return jax.lax.switch(
    jnp.where(x.sum() > 0, 2, 0),
    [
      lambda p, x: jnp.tanh(x @ p["b"]),
      lambda p, x: 7 * x @ p["a"],
      lambda p, x: x @ p["a"],
    ],
    params,
    x,
  )


_CONV = {"kernel": (3, 3, 2, 4), "bias": (4,)}
_SCALE = {"scale": (6,), "bias": (6,)}
_HEADS = {"kernel": (6, 2, 3), "bias": (2, 3)}
_ATTENTION = {
  "query": _HEADS,
  "key": _HEADS,
  "value": _HEADS,
  "out": {"kernel": (2, 3, 6), "bias": (6,)},
}
_RECURRENT = {"w": (3, 3), "u": (4, 3), "start": (3,)}
_TWO = {"a": (4, 3), "b": (4, 3)}


def _conv_case(x, strides=1, padding=0, groups=1, shapes=_CONV):
  module = nn.Conv(
    4,
    (3, 3),
    strides=strides,
    padding=[(padding, padding)] * 2,
    feature_group_count=groups,
  )
  hand = functools.partial(
    by_hand.conv, stride=strides, padding=padding, groups=groups
  )
  return _Case(_linen(module), hand, shapes, x)


_DENSE = _Case(
  _linen(nn.Dense(3)), by_hand.dense, {"kernel": (4, 3), "bias": (3,)}, _X
)
_CASES = {
  "dense": _DENSE,
  "dense_relu_dense": _Case(
    lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"],
    by_hand.dense_relu_dense,
    {"a": (4, 6), "b": (6, 3)},
    _X,
  ),
  "tied": _Case(
    lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, by_hand.tied, _W, _X
  ),
  "low_rank": _Case(
    lambda p, x: x @ (p["a"] @ p["b"]),
    by_hand.low_rank,
    {"a": (4, 2), "b": (2, 3)},
    _X,
  ),
  "conv": _conv_case((2, 5, 5, 2), padding=1),
  "strided_conv": _conv_case((2, 7, 7, 2), strides=2, padding=1),
  "unpadded_conv": _conv_case((1, 6, 5, 2)),
  "grouped_conv": _conv_case((2, 5, 5, 4), padding=1, groups=2, shapes=_CONV),
  "group_norm": _Case(
    _linen(nn.GroupNorm(num_groups=3)),
    functools.partial(by_hand.normalization, axes=(1, 2), groups=3),
    _SCALE,
    (2, 4, 3, 6),
  ),
  "layer_norm": _Case(
    _linen(nn.LayerNorm()),
    functools.partial(by_hand.normalization, axes=()),
    _SCALE,
    (5, 6),
  ),
  "attention": _Case(
    _linen(nn.MultiHeadDotProductAttention(num_heads=2)),
    by_hand.attention,
    _ATTENTION,
    (2, 5, 6),
  ),
  "embed": _Case(
    _linen(nn.Embed(7, 3)),
    by_hand.embed,
    {"embedding": (7, 3)},
    np.array([[0, 3, 3], [6, 1, 0]]),
  ),
  "weight_standardisation": _Case(
    _standardised, by_hand.standardised_dense, _W, _X
  ),
  "quantiser_custom_vjp": _Case(
    lambda p, x: x @ _round_straight_through(p["w"]),
    by_hand.quantised_dense,
    _W,
    _X,
  ),
  "quantiser_custom_jvp": _Case(
    lambda p, x: x @ _round_by_jvp(p["w"]), by_hand.quantised_dense, _W, _X
  ),
  "quantiser_stop_gradient": _Case(
    lambda p, x: (
      x @ (p["w"] + jax.lax.stop_gradient(jnp.round(p["w"]) - p["w"]))
    ),
    by_hand.quantised_dense,
    _W,
    _X,
  ),
  "custom_vjp_module": _Case(
    _linen(_PeculiarDense()), by_hand.peculiar_dense, _W, _X
  ),
  "custom_vjp_with_static_argument": _Case(
    lambda p, x: _peculiar_matmul_with_scale(2, x, p["w"]),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "custom_vjp_inside_jit": _Case(
    jax.jit(lambda p, x: _peculiar_matmul(x, p["w"])),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "custom_jvp": _Case(
    lambda p, x: _peculiar_matmul_by_jvp(x, p["w"]),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "outputs_weight": _Case(
    lambda p, x: (x @ p["w"], 2 * p["w"]), by_hand.outputs_weight, _W, _X
  ),
  "scan_over_time": _Case(_recurrent, by_hand.recurrent, _RECURRENT, (6, 2, 4)),
  "scan_over_layers": _Case(_layers, by_hand.layers, {"w": (3, 4, 4)}, _X),
  "scan_in_reverse": _Case(
    _layers_backwards, by_hand.layers, {"w": (3, 4, 4)}, _X
  ),
  "fori_loop": _Case(_layers_by_fori, by_hand.layers, {"w": (3, 4, 4)}, _X),
  "scan_that_carries_a_weight": _Case(
    _powers, by_hand.powers, {"w": (4,)}, (3, 5, 4)
  ),
  "nested_jit": _Case(
    jax.jit(lambda p, x: jax.jit(jnp.matmul)(x, p["kernel"]) + p["bias"][None]),
    by_hand.dense,
    _DENSE.shapes,
    _X,
  ),
  "remat": _Case(
    jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T),
    by_hand.tied,
    _W,
    _X,
  ),
  "remat_module": _Case(
    _linen(nn.remat(nn.Dense)(3)), by_hand.dense, _DENSE.shapes, _X
  ),
  "cond_true": _Case(_branches, by_hand.branches, _TWO, np.ones(_X)),
  "cond_false": _Case(_branches, by_hand.branches, _TWO, -np.ones(_X)),
  "switch": _Case(_branches_by_switch, by_hand.branches, _TWO, np.ones(_X)),
  "vmap": _Case(
    lambda p, x: jax.vmap(lambda row: row @ p["kernel"] + p["bias"])(x),
    by_hand.dense,
    _DENSE.shapes,
    _X,
  ),
  "vmapped_cond": _Case(
    lambda p, x: jax.vmap(lambda row: _branches(p, row[None])[0])(x),
    by_hand.branches,
    _TWO,
    np.ones(_X),
  ),
  "tuple_of_activations": _Case(
    lambda p, x: (x[0], jnp.tanh(x[1] @ p["w"])),
    by_hand.residual,
    _SQUARE,
    (_X, _X),
  ),
}
_NAMES = [(name, name) for name in _CASES]


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
    case = _CASES[name]
    fwd, bwd, x = _arguments(case)
    y, dy, d_fwd, d_bwd, dx = _both_passes(
      two_version_vjp.saved(case.function), fwd, bwd, x
    )
    self._check(y, d_fwd, d_bwd, dx, case.hand(fwd, bwd, x, dy))

  @parameterized.named_parameters(_NAMES)
  def test_recompute_uses_backward_weights_throughout(self, name):
    case = _CASES[name]
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
    fwd, bwd = _normal(rng, _W), _normal(rng, _W)
    x, dy = rng.normal(size=_X), rng.normal(size=(5, 3))
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
    case = _CASES["scan_over_time"]
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
    self._check(_CASES[name], two_version_vjp.saved)

  @parameterized.named_parameters(
    (name, name) for name in ("dense_relu_dense", "attention", "remat")
  )
  def test_recompute_is_plain_back_propagation_bit_for_bit(self, name):
    self._check(_CASES[name], two_version_vjp.recompute)

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
  text = jax.jit(function).lower(*arguments).compile().as_text()
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


if __name__ == "__main__":
  absltest.main()
