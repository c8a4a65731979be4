"""What a device computes, as functions of packed arrays.

One function a device, or one for all devices whose stages are the same object
on inputs of the same shapes; `choose` runs that of this device, or nothing.
"""

from collections.abc import Callable, Hashable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pbp_jax import backward_state, schedules, two_version_vjp
from pbp_jax import stages as stages_lib
from pbp_jax.devices import layout as layout_lib
from pbp_jax.devices import packing
from pbp_jax.stages import PyTree
from pbp_jax.transforms import views


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
  """The functions of the devices, one for each different one.

  Attributes:
    functions: The different functions.
    which: For each device the index of its function.
  """

  functions: tuple[Callable[..., Any], ...]
  which: np.ndarray

  def choose(
    self,
    device: jax.Array,
    is_busy: jax.Array,
    idle: Callable[..., Any],
    *operands: Any,
  ) -> Any:
    """Runs the function of a device, or `idle` if the device is not busy.

    Args:
      device: The device's place in the pipeline.
      is_busy: Whether it has anything to do.
      idle: A function of the same operands with results of the same shapes.
      *operands: The operands.

    Returns:
      The result.
    """
    own = jnp.asarray(self.which, jnp.int32)[device]
    branch = jnp.where(is_busy, own, len(self.functions))
    return jax.lax.switch(branch, [*self.functions, idle], *operands)


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
  """The passes and updates of a pipeline's devices.

  Attributes:
    stages: The stage of each device.
    loss_fn: The loss of outputs and targets.
    optimizer: An optimizer of the tuple of all devices' weights.
    schedule: The schedule.
    backward: "saved" or "recompute", for weights that are not stashed.
    layout: The form of what the functions take and return.
    reads_stale_params: Whether the optimizer makes use of the weights that the
      forwards met.
  """

  stages: tuple[stages_lib.Stage, ...]
  loss_fn: Callable[..., Any]
  optimizer: optax.GradientTransformationExtraArgs
  schedule: schedules.Schedule
  backward: str
  layout: layout_lib.Layout
  reads_stale_params: bool

  @functools.cached_property
  def loss_shape(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the loss."""
    outputs = self.layout.activations.shapes()[-1]
    loss = jax.eval_shape(self.loss_fn, outputs, self.layout.targets)
    if not isinstance(loss, jax.ShapeDtypeStruct):
      raise ValueError(
        f"loss_fn must return a real scalar, got {type(loss).__name__}."
      )
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
      raise ValueError(
        "loss_fn must return a real scalar, got shape"
        f" {loss.shape} of {loss.dtype}."
      )
    return loss

  @functools.cached_property
  def predicts(self) -> bool:
    """Whether a pass sees anything but the raw weights."""
    opt_state = self.layout.opt_state.shapes()[0]
    return any(True for _ in views.find_predictions(opt_state))

  @property
  def keeps_weights(self) -> bool:
    """Whether a backward needs the weights that the forward met."""
    return (
      self.schedule.is_stashed
      or self.backward == "saved"
      or self.reads_stale_params
    )

  @functools.cached_property
  def forwards(self) -> Programs:
    """`(params, state, x, key) -> (y, state, 1)`."""
    return self._distinct(self._forward, self._kind)

  @functools.cached_property
  def backwards(self) -> Programs:
    """The backward passes, functions of what they meet.

    `(params_fwd, params_bwd, met_state, state, x, key, dy) -> (gradients, dx,
    state, 1)`, where `met_state` is what the forward met, and `state` the
    newest, whose backward states are met and advanced.
    """
    return self._distinct(self._backward, self._kind)

  @functools.cached_property
  def losses(self) -> Programs:
    """`(y, targets) -> (loss, dy)`, for the last device."""
    return self._distinct(lambda p: self._loss, lambda p: None)

  @functools.cached_property
  def updates(self) -> Programs:
    """`(params, opt_state, gradients, params_fwd) -> (params, opt_state)`."""
    return self._distinct(self._update, lambda p: p)

  def sights(self, which: views.Which) -> Programs:
    """`(params, opt_state) -> params` as a pass sees them."""
    return self._distinct(lambda p: self._view(p, which), lambda p: p)

  def _distinct(
    self,
    make: Callable[[int], Callable[..., Any]],
    kind: Callable[[int], Hashable],
  ) -> Programs:
    """One function for all devices of a kind."""
    kinds = [kind(p) for p in range(len(self.stages))]
    first = list(dict.fromkeys(kinds))
    return Programs(
      tuple(make(kinds.index(k)) for k in first),
      np.array([first.index(k) for k in kinds]),
    )

  def _kind(self, p: int) -> Hashable:
    layout = self.layout
    return (
      id(self.stages[p]),
      layout.params.signature(p),
      layout.stage_state.signature(p),
      layout.activations.signature(p),
      layout.activations.signature(p + 1),
    )

  def _forward(self, p: int) -> Callable[..., Any]:
    layout = self.layout

    def forward(params, state, x, key):
      y, state = self._apply(
        p,
        layout.params.unpack(params, p),
        layout.activations.unpack(x, p),
        layout.stage_state.unpack(state, p),
        key,
      )
      return (
        layout.activations.pack(y, p + 1),
        layout.stage_state.pack(state, p),
        1,
      )

    return forward

  def _backward(self, p: int) -> Callable[..., Any]:
    layout = self.layout

    def backward(params_fwd, params_bwd, met_state, state, x, key, dy):
      params_fwd = layout.params.unpack(params_fwd, p)
      params_bwd = layout.params.unpack(params_bwd, p)
      met_state = layout.stage_state.unpack(met_state, p)
      state = layout.stage_state.unpack(state, p)
      apply = lambda *arguments: self._apply(p, *arguments)[0]
      if self.schedule.is_stashed:
        params_bwd = params_fwd
      elif self.backward == "saved" and jax.tree.leaves(params_fwd):
        apply = functools.partial(two_version_vjp.saved(apply), params_fwd)
      y, pullback = jax.vjp(
        lambda params, x, values: apply(
          params, x, backward_state.put(met_state, values), key
        ),
        params_bwd,
        layout.activations.unpack(x, p),
        backward_state.get(state),
      )
      dy = layout.activations.unpack(dy, p + 1)
      gradients, dx, values = pullback(jax.tree.map(as_cotangent, dy, y))
      return (
        layout.params.pack(gradients, p),
        layout.activations.pack(jax.tree.map(_as_array, dx), p),
        layout.stage_state.pack(backward_state.put(state, values), p),
        1,
      )

    return backward

  def _apply(self, p, params, x, state, key):
    stage = self.stages[p]
    return stage(params, state, x, key if stage.stochastic else None)

  def _loss(self, y: packing.Packed, targets: PyTree) -> Any:
    last = len(self.stages)
    activations = self.layout.activations
    loss, pullback = jax.vjp(
      lambda y: self.loss_fn(y, targets), activations.unpack(y, last)
    )
    (dy,) = pullback(jnp.ones_like(loss))
    return loss, activations.pack(jax.tree.map(_as_array, dy), last)

  def _update(self, p: int) -> Callable[..., Any]:
    layout = self.layout

    def update(params, opt_state, gradients, params_fwd):
      params, gradients = self._whole(params, p), self._whole(gradients, p)
      if params_fwd is not None:
        params_fwd = self._whole(params_fwd, p)
      updates, opt_state = self.optimizer.update(
        gradients,
        layout.opt_state.unpack(opt_state, p),
        params,
        stale_params=params_fwd,
      )
      params = optax.apply_updates(params, updates)
      return (
        layout.params.pack(params, p),
        layout.opt_state.pack(opt_state, p),
      )

    return update

  def _whole(self, packed: packing.Packed, p: int) -> tuple[PyTree, ...]:
    params = self.layout.params.unpack(packed, p)
    return layout_lib.alone(params, p, len(self.stages))

  def _view(self, p: int, which: views.Which) -> Callable[..., Any]:
    layout = self.layout

    def view(params, opt_state):
      seen = views.predict_params(
        layout.opt_state.unpack(opt_state, p),
        self._whole(params, p),
        which,
      )
      return layout.params.pack(seen, p)

    return view


def as_cotangent(dy: jax.Array, y: jax.Array) -> Any:
  """The cotangent of an output; that of integers has a dtype of its own."""
  if jnp.issubdtype(y.dtype, jnp.inexact):
    return dy
  return np.zeros(y.shape, jax.dtypes.float0)


def _as_array(cotangent: Any) -> Any:
  """What travels as an error: zeros for integers."""
  if cotangent.dtype == jax.dtypes.float0:
    return np.zeros(cotangent.shape, bool)
  return cotangent
