"""The simulator: asynchronous pipelined training as a pure scan.

Every stage is re-indexed by micro-batch instead of by tick. One step is then
one ordinary forward and backward pass of one micro-batch, whose weights lag by
what the schedule says, and the last views of the weights are all that has to
be remembered. The numbers are those of the pipeline that works in ticks, unless
something couples stages by tick: clipping by the global norm (there is
`clip_by_stage_norm`) or a learning rate by wall-clock tick.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import core as jax_core
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np
import optax

from pbp_jax import (
  argument_checks,
  backward_state,
  diagnostics,
  network,
  schedules,
  two_version_vjp,
  weight_history,
)
from pbp_jax import stages as stages_lib
from pbp_jax.op_by_op import op_by_op
from pbp_jax.pipeline_state import PipelineState
from pbp_jax.stages import PyTree
from pbp_jax.transforms import stale_params, views

_BACKWARD = {
  "saved": two_version_vjp.saved,
  "recompute": two_version_vjp.recompute,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Simulator:
  """Trains a pipeline of stages by an asynchronous schedule.

  The forward pass of micro-batch i at stage s runs on the forward view of
  version `max(0, k(i) - lag)`; its backward pass on the backward view of the
  newest version, or, if the schedule stashes weights, on what the forward read.
  The gradients of an update's micro-batches are averaged. A view is the raw
  weights unless the optimizer's state holds a prediction (`predict_params`).

  `jax.grad` through `run` (for a hyperparameter, say) works in reverse mode and
  is right for schedules whose two passes meet the same weights: fill-and-drain
  and stashed ones. For others it is NOT the derivative of the run, without any
  error: passes on two versions have derivative rules of their own, which send
  to the backward's weights what the forward's would get. On a CPU it is refused
  through old weights kept in bfloat16 or in floats of eight bits.

  Attributes:
    stages: The pipeline, input first (`as_stages`, `pbp.models`).
    loss_fn: `loss_fn(outputs, targets) -> scalar`, for one micro-batch.
    optimizer: Any optax optimizer; its extra argument `stale_params` is the
      forward views, averaged over the update's micro-batches.
    schedule: The timetable (`pbp.schedules`) of as many stages.
    backward: Which backward the schedule's weights go through, if it is not
      stashed: "saved" (saved activations, newest weights) or "recompute" (the
      stage is run again on the newest weights). "stashed" may be said of a
      stashed schedule; it makes no difference.
    batch_fn: `batch_fn(key, inputs_i, targets_i) -> (inputs, targets)`, run
      inside the scan: augmentation, or fetching by index from data on the
      device.
    has_aux: Whether `loss_fn` returns `(loss, aux)`. A dict joins the metrics
      under its own names, anything else as "aux".
    history_dtype: The floating-point dtype in which old weights are kept, such
      as `jnp.bfloat16`, which halves the memory of float32 ones and rounds what
      delayed passes meet. None keeps them as they are. On a CPU each call of
      `run` and of `step` works on a copy of what is kept in bfloat16.
    diagnostics: Names of measurements of staleness that join the metrics, one
      number a stage (`pbp.diagnostics.NAMES`).

  Raises:
    ValueError: If an argument is not of the kind described.

  Example:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax
    >>> import pbp_jax as pbp
    >>> stages = pbp.as_stages([nn.Dense(8), nn.tanh, nn.Dense(1)])
    >>> schedule = pbp.schedules.pipelined_backprop(len(stages))
    >>> simulator = pbp.Simulator(
    ...   stages, lambda y, t: jnp.mean((y - t) ** 2), optax.sgd(0.05),
    ...   schedule)
    >>> x = jax.random.normal(jax.random.key(1), (500, 1, 4))
    >>> state = simulator.init(jax.random.key(0), x[0])
    >>> state, metrics = simulator.run(state, x, x.sum(-1, keepdims=True))
    >>> bool(metrics["loss"][-50:].mean() < 0.1 * metrics["loss"][:50].mean())
    True
  """

  stages: tuple[stages_lib.Stage, ...]
  loss_fn: Callable[..., Any]
  optimizer: optax.GradientTransformation
  schedule: schedules.Schedule
  backward: str = "saved"
  batch_fn: Callable[..., tuple[PyTree, PyTree]] | None = None
  has_aux: bool = False
  history_dtype: DTypeLike | None = None
  diagnostics: tuple[str, ...] = ()

  def __post_init__(self):
    object.__setattr__(self, "stages", stages_lib.as_stages(self.stages))
    names = diagnostics.check_names(self.diagnostics)
    object.__setattr__(self, "diagnostics", names)
    for name, optional in (("loss_fn", False), ("batch_fn", True)):
      value = getattr(self, name)
      if not callable(value) and not (optional and value is None):
        raise ValueError(f"{name} must be a function, got {value!r}.")
    schedules.check_schedule(self.schedule, len(self.stages))
    allowed = [*_BACKWARD, *(["stashed"] if self.schedule.is_stashed else [])]
    if self.backward not in allowed:
      hint = (
        ' "stashed" needs a stashed schedule (schedule.with_weight_stashing()).'
        if self.backward == "stashed"
        else ""
      )
      raise ValueError(
        f"backward must be one of {allowed} with {self.schedule.name}, got"
        f" {self.backward!r}.{hint}"
      )
    argument_checks.check_dtype(self.history_dtype)
    argument_checks.check_optimizer(self.optimizer)

  # ---- The public functions, all pure; run and predict are compiled.

  def init(self, key: jax.Array, example: PyTree) -> PipelineState:
    """The state before the first micro-batch.

    Args:
      key: A random key; parameters and all noise of the run follow from it.
      example: One micro-batch of inputs, as stage 0 gets it (after `batch_fn`).

    Returns:
      The state. Under an outer `jit` the weights may differ by rounding.

    Raises:
      ValueError: If a stage can't take what the stage before it gives, or the
        optimizer does not fit the parameters.
    """
    argument_checks.check_key(key)
    key_draw, key_run = jax.random.split(key)
    params, stage_state = self._draw(key_draw, example)
    argument_checks.check_trainable(params, self.stages)
    return self._compiled_start(key_run, params, stage_state)

  def step(
    self, state: PipelineState, inputs: PyTree, targets: PyTree
  ) -> tuple[PipelineState, dict[str, Any]]:
    """Trains on one micro-batch.

    Args:
      state: The state; `state.step` is the micro-batch's index.
      inputs: One micro-batch of inputs.
      targets: Its targets.

    Returns:
      The next state, and the metrics of this micro-batch.

    Raises:
      ValueError: If the state is another simulator's, the loss is not a scalar,
        or an aperiodic schedule meets a traced `state.step`.
    """
    argument_checks.check_is_state(state)
    self._check_state(state)
    lags = self._lags(state.step, 1)[0]
    return weight_history.on_rings(self._step, state, lags, inputs, targets)

  def run(
    self,
    state: PipelineState,
    inputs: PyTree,
    targets: PyTree,
    *,
    lags: ArrayLike | None = None,
    donate: bool = False,
  ) -> tuple[PipelineState, dict[str, Any]]:
    """Trains on micro-batches one after the other, in one `lax.scan`.

    Nothing is drained at the end: what is in flight stays in the state, and
    running two chunks is running their concatenation.

    Args:
      state: The state to go on from.
      inputs: The micro-batches' inputs, stacked along a leading axis.
      targets: Their targets, likewise.
      lags: The micro-batches' forward lags, `schedule.lags(start, count)[0]`,
        `[S, count]` ints from 0 to `schedule.max_lag`, in the place of the
        schedule's own: needed only where an aperiodic schedule meets a traced
        `state.step`, that is under an outer `jit`.
      donate: Whether the memory of `state` may be reused; it can't be used
        afterwards. Of no effect under an outer `jit` or `vmap`.

    Returns:
      The state after the last micro-batch, and metrics with the same leading
      axis; `metrics["loss"][i]` is the loss that micro-batch i met on its
      forward views.

    Raises:
      ValueError: If the leading axes differ, lags are none of the schedule, or
        as in `step`.
    """
    argument_checks.check_is_state(state)
    count = argument_checks.count_micro_batches(inputs, targets)
    if lags is not None:
      argument_checks.check_lags(lags, self.schedule.max_lag, count)
      lags = jnp.asarray(lags).T
    elif self.schedule.period is None:
      lags = self._lags(state.step, count)
    leaves = jax.tree.leaves((state, inputs, targets))
    if donate and not any(isinstance(x, jax_core.Tracer) for x in leaves):
      return self._compiled_donating_run(state, inputs, targets, lags)
    return self._compiled_run(state, inputs, targets, lags)

  def predict(
    self,
    params: tuple[PyTree, ...],
    inputs: PyTree,
    stage_state: tuple[PyTree, ...] | None = None,
  ) -> PyTree:
    """The pipeline's outputs in evaluation mode.

    Args:
      params: The weights, `state.params`: the newest, raw.
      inputs: One micro-batch of inputs.
      stage_state: `state.stage_state`, needed if a stage has a state.

    Returns:
      The outputs of the last stage.

    Raises:
      ValueError: If a stage has a state and none is given, or params aren't
        weights of so many stages.
    """
    argument_checks.check_weights(params, self.stages)
    stateful = [s.name for s in self.stages if s.init_state is not None]
    if stateful and stage_state is None:
      raise ValueError(
        "stage_state must be given (state.stage_state), since these stages have"
        f" a state: {', '.join(stateful)}; got None."
      )
    return self._compiled_predict(params, inputs, stage_state)

  @functools.cached_property
  def _optimizer(self) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(self.optimizer)

  @functools.cached_property
  def _draw(self):
    return op_by_op(functools.partial(network.init, self.stages))

  @functools.cached_property
  def _compiled_start(self):
    return jax.jit(self._start)

  @functools.cached_property
  def _compiled_run(self):
    return jax.jit(self._run)

  @functools.cached_property
  def _compiled_donating_run(self):
    return jax.jit(self._run, donate_argnums=0)

  @functools.cached_property
  def _compiled_predict(self):
    return jax.jit(self._predict)

  # ---- What they compute.

  def _start(self, key, params, stage_state) -> PipelineState:
    """The state before the first micro-batch, from given weights."""
    opt_state = self._optimizer.init(params)
    view = views.predict_params(opt_state, params)
    accumulates = self.schedule.update_interval > 1
    measures_raw = "stale_weight_distance" in self.diagnostics
    zeros = optax.tree.zeros_like(params)
    return PipelineState(
      step=jnp.zeros([], jnp.int32),
      key=key,
      params=params,
      opt_state=opt_state,
      history=weight_history.init(
        view, self.schedule.max_lag, self.history_dtype
      ),
      raw_history=weight_history.init(
        params, self.schedule.max_lag, self.history_dtype
      )
      if measures_raw and view is not params
      else None,
      stage_state=stage_state,
      gradients=zeros if accumulates else None,
      stale_params=zeros
      if accumulates
      and stale_params.is_read(self._optimizer, params, opt_state)
      else None,
    )

  def _check_state(self, state: PipelineState) -> None:
    """Raises a ValueError if the state is another simulator's."""
    argument_checks.check_weights(state.params, self.stages)
    like = jax.eval_shape(
      self._start, state.key, state.params, state.stage_state
    )
    argument_checks.check_state(state, like)

  def _run(self, state, inputs, targets, lags):
    self._check_state(state)

    def body(state, xs):
      inputs, targets, lags = xs
      if lags is None:
        lags = self._lags(state.step, 1)[0]
      return self._step(state, lags, inputs, targets)

    scan = functools.partial(jax.lax.scan, body)
    return weight_history.on_rings(scan, state, (inputs, targets, lags))

  def _predict(self, params, inputs, stage_state):
    if stage_state is None:
      stage_state = (None,) * len(self.stages)
    return network.apply(self.stages, params, params, stage_state, inputs)[0]

  def _step(self, state, lags, inputs, targets):
    """One micro-batch, whose forward lags by `lags`, `[S]`."""
    key = jax.random.fold_in(state.key, state.step)
    if self.batch_fn is not None:
      batch_key = jax.random.fold_in(key, len(self.stages))
      inputs, targets = argument_checks.as_pair(
        self.batch_fn(batch_key, inputs, targets)
      )
    newest_view = views.predict_params(state.opt_state, state.params)
    version = state.step // self.schedule.update_interval
    params_fwd, history = weight_history.meet(
      state.history, newest_view, version, lags
    )
    params_stale, raw_history = params_fwd, None
    if state.raw_history is not None:
      params_stale, raw_history = weight_history.meet(
        state.raw_history, state.params, version, lags
      )
    if self.schedule.is_stashed:
      params_bwd = params_fwd
    else:
      params_bwd = views.predict_params(
        state.opt_state, state.params, "backward"
      )

    def loss_and_gradients(params_fwd, params_bwd):
      # Differentiation hides that two weights are one object: ask before.
      is_one = [f is b for f, b in zip(params_fwd, params_bwd, strict=True)]

      def loss(params_bwd, backward_states):
        met = tuple(
          bwd if one else fwd
          for one, fwd, bwd in zip(is_one, params_fwd, params_bwd, strict=True)
        )
        stage_state = backward_state.put(state.stage_state, backward_states)
        return self._loss(met, params_bwd, stage_state, key, inputs, targets)

      return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        params_bwd, backward_state.get(state.stage_state)
      )

    (loss, (aux, stage_state)), (gradients, backward_states) = (
      loss_and_gradients(params_fwd, params_bwd)
    )
    stage_state = backward_state.put(stage_state, backward_states)
    measured = diagnostics.measure(
      self.diagnostics,
      lags=jnp.minimum(jnp.asarray(lags), version),
      params=state.params,
      params_fwd=params_fwd,
      params_stale=params_stale,
      gradients=gradients,
      make_fresh_gradients=lambda: loss_and_gradients(
        state.params, state.params
      )[1][0],
    )
    state = self._update(
      state.replace(
        history=history, raw_history=raw_history, stage_state=stage_state
      ),
      gradients,
      params_fwd,
    )
    state = state.replace(step=state.step + 1)
    return state, _metrics(loss, aux, measured)

  def _loss(self, params_fwd, params_bwd, stage_state, key, inputs, targets):
    """The loss on params_fwd, with the gradient that params_bwd carry."""
    outputs, stage_state = network.apply(
      self.stages,
      params_fwd,
      params_bwd,
      stage_state,
      inputs,
      key,
      _BACKWARD.get(self.backward),
    )
    loss, aux = self.loss_fn(outputs, targets), {}
    if self.has_aux:
      if not isinstance(loss, tuple) or len(loss) != 2:
        raise ValueError(
          "loss_fn must return a pair (loss, aux) with has_aux=True, got"
          f" {loss!r}."
        )
      loss, aux = loss
    elif isinstance(loss, tuple | list | dict):
      raise ValueError(
        "loss_fn must return a real scalar, or (loss, aux) with has_aux=True;"
        f" got {type(loss).__name__} with has_aux=False."
      )
    if jnp.shape(loss) or not jnp.issubdtype(
      jnp.result_type(loss), jnp.floating
    ):
      raise ValueError(
        "loss_fn must return a real scalar, got shape"
        f" {jnp.shape(loss)} of {jnp.result_type(loss)}."
      )
    return loss, (aux, stage_state)

  def _update(self, state, gradients, params_fwd):
    """Counts one micro-batch's gradients in, and updates when it is time."""
    interval = self.schedule.update_interval

    def update(params, opt_state, gradients, stale_params):
      updates, opt_state = self._optimizer.update(
        gradients, opt_state, params, stale_params=stale_params
      )
      return optax.apply_updates(params, updates), opt_state

    if interval == 1:
      params, opt_state = update(
        state.params, state.opt_state, gradients, params_fwd
      )
      return state.replace(params=params, opt_state=opt_state)

    def update_by_means(params, opt_state, sums):
      means = jax.tree.map(lambda total: total / interval, sums)
      return *update(params, opt_state, *means), optax.tree.zeros_like(sums)

    stale_sum = state.stale_params
    if stale_sum is not None:
      stale_sum = optax.tree.add(stale_sum, params_fwd)
    # The rings stay outside of the branches, which might copy them.
    params, opt_state, sums = jax.lax.cond(
      (state.step + 1) % interval == 0,
      update_by_means,
      lambda *unchanged: unchanged,
      state.params,
      state.opt_state,
      (optax.tree.add(state.gradients, gradients), stale_sum),
    )
    return state.replace(
      params=params,
      opt_state=opt_state,
      gradients=sums[0],
      stale_params=sums[1],
    )

  def _lags(self, start: jax.Array, count: int) -> Any:
    """Forward lags `[count, S]` of the micro-batches from `start` on."""
    period = self.schedule.period
    if period is None:
      if isinstance(start, jax_core.Tracer):
        raise ValueError(
          f"{self.schedule.name} has no period, so its lags must be looked up"
          " before tracing: state.step must be concrete, got a traced value."
          " Call it outside of jit, or give run its argument lags."
        )
      return self.schedule.lags(int(start), count)[0].T
    table = self.schedule.steady_lags.T
    if period == 1:
      return np.broadcast_to(table, (count, len(self.stages)))
    return jnp.asarray(table)[(start + np.arange(count)) % period]


def _metrics(
  loss: jax.Array, aux: PyTree, measured: dict[str, jax.Array]
) -> dict[str, Any]:
  """The metrics of a micro-batch."""
  aux = aux if isinstance(aux, dict) else {"aux": aux}
  own = {"loss": loss, **measured}
  if clash := sorted(set(aux) & set(own)):
    raise ValueError(
      "The aux of loss_fn must have keys other than those of the metrics"
      f" {sorted(own)}; got {clash}."
    )
  return {**own, **aux}
