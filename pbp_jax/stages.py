"""Stages: what one worker of the pipeline computes.

A pipeline is a tuple of `Stage`s. Each is a pair of pure functions, like a
`flax.linen.Module` seen from outside, so that anything that maps (parameters,
input) to an output can be one. `as_stages` makes them from linen modules, nnx
factories and plain functions.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import inspect
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from pbp_jax import backward_state

# Any pytree of arrays: parameters, activations, targets, states.
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Stage:
  """One worker of the pipeline, as a pair of pure functions.

  A stage may have no parameters (a sum, a pooling layer, the loss): it still
  adds delay to the stages before it. What travels between stages is any
  pytree, so a residual branch travels as a tuple.

  Attributes:
    init: `init(key, x) -> params`. A stage without parameters returns `{}`.
    apply: `apply(params, x) -> y`; `apply(params, x, key) -> y` if
      `stochastic`; with a state `apply(params, state, x) -> (y, state)`, or
      `apply(params, state, x, key) -> (y, state)`.
    stochastic: Whether `apply` takes a key. The key is None in evaluation, and
      the same in a micro-batch's forward pass and its recomputation.
    init_state: `init_state(key, x) -> state`, for a stage with a state that
      advances in the order of the micro-batches, such as the statistics of
      Online Normalization; what the backward pass is to advance is wrapped in
      `BackwardState`. None for a stage without a state.
    name: What errors and tables call the stage.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> double = pbp.Stage(
    ...     init=lambda key, x: {"scale": jnp.full(x.shape[-1:], 2.0)},
    ...     apply=lambda params, x: params["scale"] * x)
    >>> params = double.init(jax.random.key(0), jnp.ones(3))
    >>> print(double.apply(params, jnp.arange(3.0)))
    [0. 2. 4.]
  """

  init: Callable[..., PyTree]
  apply: Callable[..., Any]
  stochastic: bool = False
  init_state: Callable[..., PyTree] | None = None
  name: str = "stage"

  def __post_init__(self):
    for field in ("init", "apply"):
      if not callable(getattr(self, field)):
        raise ValueError(
          f"Stage.{field} must be callable, got {getattr(self, field)!r}."
        )
    if self.init_state is not None and not callable(self.init_state):
      raise ValueError(
        "Stage.init_state must be None or a function init_state(key, x), got "
        f"{self.init_state!r}."
      )

  def __call__(
    self, params: PyTree, state: PyTree, x: PyTree, key: jax.Array | None
  ) -> tuple[PyTree, PyTree]:
    """Applies the stage in the one form that covers all kinds of `apply`.

    Args:
      params: The parameters.
      state: The stage's state, None if it has none.
      x: The input.
      key: A key; None in evaluation. Unused unless `stochastic`.

    Returns:
      The output and the state after this micro-batch.
    """
    keys = (key,) if self.stochastic else ()
    if self.init_state is None:
      return self.apply(params, x, *keys), None
    return self.apply(params, state, x, *keys)


def as_stages(layers: Iterable[Any]) -> tuple[Stage, ...]:
  """Makes a pipeline of Flax modules, nnx factories and plain functions.

  Each element becomes one stage and must be one of

  - a `Stage`, taken as it is;
  - a linen module. It is stochastic, and gets the key as `rngs={"dropout":
    key}`, if its `__call__` has an argument `deterministic`, `train` or
    `training`, which is set from whether there is a key;
  - an nnx factory: a function whose one required argument is `rngs`, such as
    `lambda rngs: nnx.Linear(8, 4, rngs=rngs)`. It is called anew for every
    key; it is stochastic if the module holds random streams (dropout);
  - an nnx module instance, whose weights are *given*: every key, so every
    seed, starts from these very weights. Use a factory to draw them anew;
  - a function of one argument, as a stage without parameters.

  Args:
    layers: The elements, in the order of the pipeline, input first.

  Returns:
    A tuple of stages.

  Raises:
    ValueError: If there are no layers, an element is none of these, or a
      module keeps variables other than parameters (Batch Normalization's
      running statistics): no version of the weights they belong to exists in
      a pipeline, so use GroupNorm, LayerNorm or a `Stage` with a state.

  Example:
    >>> from flax import linen as nn, nnx
    >>> import pbp_jax as pbp
    >>> stages = pbp.as_stages([
    ...     nn.Dense(32), nn.relu, lambda rngs: nnx.Linear(32, 10, rngs=rngs)])
    >>> [stage.name for stage in stages]
    ['Dense', 'relu', 'Linear']
  """
  if isinstance(layers, (Stage, nn.Module, nnx.Module)) or not isinstance(
    layers, Iterable
  ):
    raise ValueError(
      f"layers must be a sequence of layers, one a stage, got {layers!r}."
    )
  stages = tuple(_as_stage(layer, s) for s, layer in enumerate(layers))
  if not stages:
    raise ValueError("layers must hold at least one layer, got none.")
  return stages


def with_params(
  stages: Iterable[Stage], params: Sequence[PyTree]
) -> tuple[Stage, ...]:
  """The pipeline that starts from given weights, whatever the key.

  Args:
    stages: A pipeline.
    params: Its weights, one pytree a stage, such as `state.params` of an
      earlier run.

  Returns:
    The stages. Initialising one raises a ValueError if its weights don't have
    the structure and shapes that it would draw.

  Raises:
    ValueError: If there are not as many weights as stages.

  Example:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> stages = pbp.as_stages([nn.Dense(1, use_bias=False)])
    >>> stages = pbp.with_params(stages, [{"kernel": jnp.ones((2, 1))}])
    >>> params = stages[0].init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> print(params["kernel"].T)
    [[1. 1.]]
  """
  stages = tuple(stages)
  if len(stages) != len(params):
    raise ValueError(
      f"params must have one entry a stage, {len(stages)}, got {len(params)}."
    )
  return tuple(map(_with_params, stages, params))


def _with_params(stage: Stage, params: PyTree) -> Stage:
  def init(key, x):
    drawn = jax.eval_shape(stage.init, key, x)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    if shapes(params) != shapes(drawn):
      raise ValueError(
        f"params of stage {stage.name} must have the shapes {shapes(drawn)},"
        f" got {shapes(params)}."
      )
    return params

  return dataclasses.replace(stage, init=init)


def _as_stage(layer: Any, index: int) -> Stage:
  if isinstance(layer, Stage):
    return layer
  if isinstance(layer, nn.Module):
    return _linen_stage(layer)
  if isinstance(layer, nnx.Module):
    return _nnx_stage(layer, index)
  if _is_nnx_factory(layer):
    return _nnx_stage(layer, index)
  if _takes_one_argument(layer):
    return Stage(
      init=lambda key, x: {},
      apply=lambda params, x: layer(x),
      name=_name_of(layer),
    )
  raise ValueError(
    f"layers[{index}] must be a Stage, a linen module, an nnx factory"
    " `lambda rngs: module` or a function of one argument, got"
    f" {layer!r}."
  )


def _name_of(function: Any) -> str:
  function = getattr(function, "func", function)  # functools.partial
  return getattr(function, "__name__", type(function).__name__)


def _is_nnx_factory(layer: Any) -> bool:
  """Whether `rngs` is the one argument that has to be given."""
  if isinstance(layer, functools.partial) and inspect.isclass(layer.func):
    return issubclass(layer.func, nnx.Module)
  if inspect.isclass(layer) or not callable(layer):
    return False
  try:
    parameters = inspect.signature(layer).parameters.values()
  except (TypeError, ValueError):  # C functions have no signature
    return False
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return [
    p.name
    for p in parameters
    if p.default is p.empty and p.kind not in variadic
  ] == ["rngs"]


def _takes_one_argument(layer: Any) -> bool:
  if inspect.isclass(layer) or not callable(layer):
    return False
  try:
    inspect.signature(layer).bind(None)
  except TypeError:
    return False
  except ValueError:  # C functions have no signature
    pass
  return True


def _refuse_variables(name: str, kinds: Sequence[str]) -> None:
  if kinds:
    raise ValueError(
      f"{name} keeps variables other than parameters: {', '.join(kinds)}."
      " A stage may hold parameters only. Batch Normalization's running"
      " statistics can't be simulated (the paper trains at batch one):"
      " use GroupNorm, LayerNorm or Online Normalization, or write the state as"
      " pbp.stateful_stage or a pbp.Stage with init_state takes it."
    )


# Arguments by which linen modules are told that they train, and the value for
# "train" each expects.
_TRAIN_ARGUMENTS = {"deterministic": False, "train": True, "training": True}


def _linen_stage(module: nn.Module) -> Stage:
  name = module.name or type(module).__name__
  switch = _train_argument(module)

  def init(key, x):
    variables = module.init(key, x, **_mode(switch, train=False))
    _refuse_variables(name, sorted(set(variables) - {"params"}))
    return variables.get("params", {})

  def apply(params, x, key=None):
    return module.apply(
      {"params": params},
      x,
      rngs=_rngs(key),
      **_mode(switch, train=key is not None),
    )

  return Stage(init, apply, stochastic=switch is not None, name=name)


def stateful_stage(module: nn.Module) -> Stage:
  """Makes a stage of a linen module that keeps a state.

  The module's variables of the collection `forward_state` advance in the
  forward passes of the micro-batches; those of `backward_state` are handed to
  it as a `BackwardState`, and advance in the backward passes.
  `models.online_normalization` is an example of both.

  Args:
    module: The module. It may hold no such variables: its state is then empty.

  Returns:
    The stage; stochastic if `as_stages` would make it so.

  Raises:
    ValueError: When initialised, if the module keeps variables of any other
      collection.

  Example:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> class Counter(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x):
    ...     seen = self.variable("forward_state", "seen", lambda: 0)
    ...     if not self.is_initializing():
    ...       seen.value += 1
    ...     return x
    >>> stage = pbp.stateful_stage(Counter())
    >>> state = stage.init_state(jax.random.key(0), jnp.ones(3))
    >>> y, state = stage.apply({}, state, jnp.ones(3))
    >>> state["forward_state"]["seen"]
    1
  """
  name = module.name or type(module).__name__
  switch = _train_argument(module)

  def variables_of(key, x):
    variables = module.init(key, x, **_mode(switch, train=False))
    kinds = {"params", "forward_state", "backward_state"}
    _refuse_variables(name, sorted(set(variables) - kinds))
    return variables

  def init_state(key, x):
    variables = variables_of(key, x)
    return {
      "forward_state": variables.get("forward_state", {}),
      "backward_state": backward_state.BackwardState(
        variables.get("backward_state", {})
      ),
    }

  def apply(params, state, x, key=None):
    y, changed = module.apply(
      {
        "params": params,
        "forward_state": state["forward_state"],
        "backward_state": state["backward_state"].value,
      },
      x,
      rngs=_rngs(key),
      mutable=["forward_state"],
      **_mode(switch, train=key is not None),
    )
    return y, {**state, **changed}

  return Stage(
    init=lambda key, x: variables_of(key, x).get("params", {}),
    apply=apply,
    stochastic=switch is not None,
    init_state=init_state,
    name=name,
  )


def _train_argument(module: nn.Module) -> str | None:
  """The argument that tells a linen module whether it trains, if it has one."""
  return next(
    (
      argument
      for argument in inspect.signature(module.__call__).parameters
      if argument in _TRAIN_ARGUMENTS
      and getattr(module, argument, None) is None
    ),
    None,
  )


def _mode(argument: str | None, train: bool) -> dict[str, Any]:
  if argument is None:
    return {}
  return {argument: _TRAIN_ARGUMENTS[argument] == train}


def _rngs(key: jax.Array | None) -> dict[str, jax.Array] | None:
  return None if key is None else {"dropout": key}


def _nnx_stage(given: Any, index: int) -> Stage:
  """A stage of an nnx factory, or of an nnx module with given weights."""
  is_instance = isinstance(given, nnx.Module)

  def make(key: jax.Array) -> nnx.Module:
    return given if is_instance else given(rngs=nnx.Rngs(key))

  module = given
  if not is_instance:
    module = nnx.eval_shape(make, jax.random.key(0))
    if not isinstance(module, nnx.Module):
      raise ValueError(
        f"layers[{index}] takes rngs, so it must return an nnx module; it"
        f" returned {module!r}."
      )
  graph, params, streams, others = nnx.split(
    module, nnx.Param, nnx.RngState, ...
  )
  name = type(module).__name__
  is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
  _refuse_variables(
    name,
    sorted(
      {
        type(variable).__name__
        for variable in jax.tree.leaves(others, is_leaf=is_variable)
      }
    ),
  )

  def graph_of_mode(train: bool) -> nnx.GraphDef:
    copy = nnx.merge(graph, params, streams)
    copy.train() if train else copy.eval()
    return nnx.graphdef(copy)

  graphs = {train: graph_of_mode(train) for train in (False, True)}
  stream_leaves, stream_treedef = jax.tree.flatten(streams)

  def fresh_streams(key: jax.Array):
    return jax.tree.unflatten(
      stream_treedef,
      [
        jax.random.fold_in(key, j)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for j, leaf in enumerate(stream_leaves)
      ],
    )

  def apply(params, x, key=None):
    streams = fresh_streams(jax.random.key(0) if key is None else key)
    return nnx.merge(graphs[key is not None], params, streams)(x)

  return Stage(
    init=lambda key, x: nnx.state(make(key), nnx.Param),
    apply=apply,
    stochastic=bool(stream_leaves),
    name=f"{name} (given weights)" if is_instance else name,
  )
