"""Functions of (weights, input) of many kinds, each with its twin by hand."""

import functools
import typing

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.reference import two_version as by_hand

_W = {"w": (4, 3)}
_SQUARE = {"w": (4, 4)}
_X = (5, 4)


class Case(typing.NamedTuple):
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


_ONES = np.ones((4, 3), np.float32)


@jax.custom_vjp
def _peculiar_matmul_on_constants(x, w):
  return x @ (w * _ONES)


_peculiar_matmul_on_constants.defvjp(
  lambda x, w: (x @ (w * _ONES), (x, w)),
  lambda saved, g: (3 * g @ saved[1].T, 2 * (saved[0].T @ g) * _ONES),
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
  return Case(_linen(module), hand, shapes, x)


_DENSE = Case(
  _linen(nn.Dense(3)), by_hand.dense, {"kernel": (4, 3), "bias": (3,)}, _X
)
CASES = {
  "dense": _DENSE,
  "dense_relu_dense": Case(
    lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"],
    by_hand.dense_relu_dense,
    {"a": (4, 6), "b": (6, 3)},
    _X,
  ),
  "tied": Case(
    lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, by_hand.tied, _W, _X
  ),
  "low_rank": Case(
    lambda p, x: x @ (p["a"] @ p["b"]),
    by_hand.low_rank,
    {"a": (4, 2), "b": (2, 3)},
    _X,
  ),
  "conv": _conv_case((2, 5, 5, 2), padding=1),
  "strided_conv": _conv_case((2, 7, 7, 2), strides=2, padding=1),
  "unpadded_conv": _conv_case((1, 6, 5, 2)),
  "grouped_conv": _conv_case((2, 5, 5, 4), padding=1, groups=2, shapes=_CONV),
  "group_norm": Case(
    _linen(nn.GroupNorm(num_groups=3)),
    functools.partial(by_hand.normalization, axes=(1, 2), groups=3),
    _SCALE,
    (2, 4, 3, 6),
  ),
  "layer_norm": Case(
    _linen(nn.LayerNorm()),
    functools.partial(by_hand.normalization, axes=()),
    _SCALE,
    (5, 6),
  ),
  "attention": Case(
    _linen(nn.MultiHeadDotProductAttention(num_heads=2)),
    by_hand.attention,
    _ATTENTION,
    (2, 5, 6),
  ),
  "embed": Case(
    _linen(nn.Embed(7, 3)),
    by_hand.embed,
    {"embedding": (7, 3)},
    np.array([[0, 3, 3], [6, 1, 0]]),
  ),
  "weight_standardisation": Case(
    _standardised, by_hand.standardised_dense, _W, _X
  ),
  "quantiser_custom_vjp": Case(
    lambda p, x: x @ _round_straight_through(p["w"]),
    by_hand.quantised_dense,
    _W,
    _X,
  ),
  "quantiser_custom_jvp": Case(
    lambda p, x: x @ _round_by_jvp(p["w"]), by_hand.quantised_dense, _W, _X
  ),
  "quantiser_stop_gradient": Case(
    lambda p, x: (
      x @ (p["w"] + jax.lax.stop_gradient(jnp.round(p["w"]) - p["w"]))
    ),
    by_hand.quantised_dense,
    _W,
    _X,
  ),
  "custom_vjp_module": Case(
    _linen(_PeculiarDense()), by_hand.peculiar_dense, _W, _X
  ),
  "custom_vjp_with_static_argument": Case(
    lambda p, x: _peculiar_matmul_with_scale(2, x, p["w"]),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "custom_vjp_that_closes_over_arrays": Case(
    lambda p, x: _peculiar_matmul_on_constants(x, p["w"]),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "custom_vjp_inside_jit": Case(
    jax.jit(lambda p, x: _peculiar_matmul(x, p["w"])),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "custom_jvp": Case(
    lambda p, x: _peculiar_matmul_by_jvp(x, p["w"]),
    by_hand.peculiar_dense,
    _W,
    _X,
  ),
  "outputs_weight": Case(
    lambda p, x: (x @ p["w"], 2 * p["w"]), by_hand.outputs_weight, _W, _X
  ),
  "scan_over_time": Case(_recurrent, by_hand.recurrent, _RECURRENT, (6, 2, 4)),
  "scan_over_layers": Case(_layers, by_hand.layers, {"w": (3, 4, 4)}, _X),
  "scan_in_reverse": Case(
    _layers_backwards, by_hand.layers, {"w": (3, 4, 4)}, _X
  ),
  "fori_loop": Case(_layers_by_fori, by_hand.layers, {"w": (3, 4, 4)}, _X),
  "scan_that_carries_a_weight": Case(
    _powers, by_hand.powers, {"w": (4,)}, (3, 5, 4)
  ),
  "nested_jit": Case(
    jax.jit(lambda p, x: jax.jit(jnp.matmul)(x, p["kernel"]) + p["bias"][None]),
    by_hand.dense,
    _DENSE.shapes,
    _X,
  ),
  "remat": Case(
    jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T),
    by_hand.tied,
    _W,
    _X,
  ),
  "remat_module": Case(
    _linen(nn.remat(nn.Dense)(3)), by_hand.dense, _DENSE.shapes, _X
  ),
  "cond_true": Case(_branches, by_hand.branches, _TWO, np.ones(_X)),
  "cond_false": Case(_branches, by_hand.branches, _TWO, -np.ones(_X)),
  "switch": Case(_branches_by_switch, by_hand.branches, _TWO, np.ones(_X)),
  "vmap": Case(
    lambda p, x: jax.vmap(lambda row: row @ p["kernel"] + p["bias"])(x),
    by_hand.dense,
    _DENSE.shapes,
    _X,
  ),
  "vmapped_cond": Case(
    lambda p, x: jax.vmap(lambda row: _branches(p, row[None])[0])(x),
    by_hand.branches,
    _TWO,
    np.ones(_X),
  ),
  "tuple_of_activations": Case(
    lambda p, x: (x[0], jnp.tanh(x[1] @ p["w"])),
    by_hand.residual,
    _SQUARE,
    (_X, _X),
  ),
}
