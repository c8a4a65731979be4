"""What a stage computes: forward, and backward by hand.

`forward(params, x) -> (y, saved)` and
`backward(params, saved, dy) -> (dparams, dx)`. Parameters are a dict of
arrays; activations are arrays with a leading batch axis, or tuples of them.
The backward takes activations from `saved` and weights from its `params`
only, so the two may belong to different versions. A stage with a state keeps
it to itself, and has `recompute(params, x, saved) -> saved`, which runs the
forward again without advancing it.
"""

import typing

import numpy as np


class Stage(typing.NamedTuple):
  forward: typing.Callable
  backward: typing.Callable
  recompute: typing.Callable | None = None


def _dense_tanh_forward(params, x):
  y = np.tanh(x @ params["w"] + params["b"])
  return y, (x, y)


def _dense_tanh_backward(params, saved, dy):
  x, y = saved
  dz = dy * (1 - y**2)
  return {"w": x.T @ dz, "b": dz.sum(axis=0)}, dz @ params["w"].T


# y = tanh(x w + b).
dense_tanh = Stage(_dense_tanh_forward, _dense_tanh_backward)


def _open_branch_forward(params, x):
  y, saved = _dense_tanh_forward(params, x)
  return (x, y), saved


def _open_branch_backward(params, saved, dy):
  d_skip, d_branch = dy
  grads, dx = _dense_tanh_backward(params, saved, d_branch)
  return grads, d_skip + dx


# x becomes the tuple (x, tanh(x w + b)): a residual branch begins.
open_branch = Stage(_open_branch_forward, _open_branch_backward)


def _in_branch_forward(params, x):
  skip, branch = x
  y, saved = _dense_tanh_forward(params, branch)
  return (skip, y), saved


def _in_branch_backward(params, saved, dy):
  d_skip, d_branch = dy
  grads, dx = _dense_tanh_backward(params, saved, d_branch)
  return grads, (d_skip, dx)


# (skip, h) becomes (skip, tanh(h w + b)).
in_branch = Stage(_in_branch_forward, _in_branch_backward)

# (skip, h) becomes skip + h: a stage without parameters.
close_branch = Stage(
  lambda params, x: (x[0] + x[1], None),
  lambda params, saved, dy: ({}, (dy, dy)),
)

# Stands for the loss.
identity = Stage(
  lambda params, x: (x, None), lambda params, saved, dy: ({}, dy)
)


def online_norm(state, forward_decay, backward_decay, epsilon):
  """Online Normalization of the last axis, with layer scaling.

  `state` is a dict of the arrays mean, variance, u and v, advanced in place:
  the first two by the forward passes, the others by the backward passes.
  """

  def normalise(params, x, mean, variance):
    deviation = np.sqrt(variance + epsilon)
    y = (x - mean) / deviation
    z = params["scale"] * y + params["bias"]
    others = tuple(range(1, z.ndim))
    size = np.sqrt((z**2).mean(others, keepdims=True) + epsilon)
    return z / size, (y, deviation, z / size, size, mean, variance)

  def forward(params, x):
    mean, variance = state["mean"], state["variance"]
    positions, a = tuple(range(x.ndim - 1)), forward_decay
    m, s = x.mean(positions), x.var(positions)
    state["variance"] = (
      a * variance + (1 - a) * s + a * (1 - a) * (m - mean) ** 2
    )
    state["mean"] = a * mean + (1 - a) * m
    return normalise(params, x, mean, variance)

  def recompute(params, x, saved):
    return normalise(params, x, *saved[-2:])[1]

  def backward(params, saved, dy):
    y, deviation, output, size, *_ = saved
    positions, others = tuple(range(dy.ndim - 1)), tuple(range(1, dy.ndim))
    dz = (dy - output * (dy * output).mean(others, keepdims=True)) / size
    error = dz * params["scale"] - (1 - backward_decay) * state["v"] * y
    state["v"] = state["v"] + (error * y).mean(positions)
    dx = error / deviation - (1 - backward_decay) * state["u"]
    state["u"] = state["u"] + dx.mean(positions)
    return {"scale": (dz * y).sum(positions), "bias": dz.sum(positions)}, dx

  return Stage(forward, backward, recompute)


def squared_error(y, target):
  """The loss 0.5 sum (y - t)^2 and its gradient."""
  return 0.5 * np.sum((y - target) ** 2), y - target
