"""How a stage updates its weights, and what its passes see of them.

An optimizer is `init(params) -> state` and
`update(stage, params, state, grads, stale_params) -> (params, state)`; a view
is `view(stage, params, state) -> params`. Parameters are a dict of arrays; a
state is a dict of such dicts, and the count of updates. `stale_params` is the
mean of what the update's micro-batches met on their forward passes.
"""

import typing

import numpy as np


class Optimizer(typing.NamedTuple):
  init: typing.Callable
  update: typing.Callable


def tree_map(function, *trees):
  return {key: function(*(t[key] for t in trees)) for key in trees[0]}


def _rate(learning_rate, count):
  return learning_rate(count) if callable(learning_rate) else learning_rate


def _init(*names):
  def init(params):
    zeros = {name: tree_map(np.zeros_like, params) for name in names}
    return {"count": 0, "last_update": tree_map(np.zeros_like, params), **zeros}

  return init


def _apply(params, state, updates, **new_state):
  state = {**state, **new_state, "last_update": updates}
  return tree_map(np.add, params, updates), {
    **state,
    "count": state["count"] + 1,
  }


def sgdm(learning_rate, momentum=0.0, weight_decay=0.0, compensation=None):
  """v = m v + g, w = w - rate (a v + b g), where g holds the weight decay.

  `compensation(stage) -> (a, b)`: spike compensation; without it a, b = 1, 0.
  """
  compensation = compensation or (lambda stage: (1.0, 0.0))

  def update(stage, params, state, grads, stale_params):
    del stale_params
    a, b = compensation(stage)
    rate = _rate(learning_rate, state["count"])
    grads = tree_map(lambda g, w: g + weight_decay * w, grads, params)
    trace = tree_map(lambda v, g: momentum * v + g, state["trace"], grads)
    updates = tree_map(lambda v, g: -rate * (a * v + b * g), trace, grads)
    return _apply(params, state, updates, trace=trace)

  return Optimizer(_init("trace"), update)


def spike_compensation(momentum, delays):
  """The (a, b) of every stage for a delay in updates."""

  def compensation(stage):
    a = momentum ** delays[stage]
    return a, (1 - a) / (1 - momentum)

  return compensation


def adam(learning_rate, b1=0.9, b2=0.999, eps=1e-8):
  """Adam with bias correction."""

  def update(stage, params, state, grads, stale_params):
    del stage, stale_params
    count = state["count"] + 1
    mu = tree_map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], grads)
    nu = tree_map(lambda v, g: b2 * v + (1 - b2) * g**2, state["nu"], grads)
    rate = _rate(learning_rate, state["count"])

    def step(m, v):
      m_hat = m / (1 - b1**count)
      return -rate * m_hat / (np.sqrt(v / (1 - b2**count)) + eps)

    return _apply(params, state, tree_map(step, mu, nu), mu=mu, nu=nu)

  return Optimizer(_init("mu", "nu"), update)


def raw(stage, params, state):
  """The view of the weights as they are."""
  del stage, state
  return params


def velocity_prediction(horizons, learning_rate):
  """LWP, velocity form: w - rate T v."""

  def view(stage, params, state):
    step = _rate(learning_rate, state["count"]) * horizons[stage]
    return tree_map(lambda w, v: w - step * v, params, state["trace"])

  return view


def weight_prediction(horizons):
  """LWP, weight form: w_t + T (w_t - w_(t-1))."""

  def view(stage, params, state):
    horizon = horizons[stage]
    return tree_map(lambda w, u: w + horizon * u, params, state["last_update"])

  return view
