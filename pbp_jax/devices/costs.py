"""What a stage costs: operations counted by XLA, or time that was measured."""

from collections.abc import Callable, Sequence
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import network, schedules
from pbp_jax import stages as stages_lib
from pbp_jax.devices import passes
from pbp_jax.stages import PyTree


def count_costs(
  stages: Sequence[stages_lib.Stage], example: PyTree
) -> np.ndarray:
  """Counts the operations of each stage's forward and backward pass.

  By XLA's cost analysis of the program before optimisation, in floating-point
  operations. A stage that only moves data costs nothing by this count.

  Args:
    stages: The pipeline.
    example: One micro-batch of inputs, or its shapes.

  Returns:
    `[S]` floats.

  Example:
    >>> import jax.numpy as jnp
    >>> import pbp_jax as pbp
    >>> from flax import linen as nn
    >>> stages = pbp.as_stages([nn.Dense(4, use_bias=False)] * 2)
    >>> print(count_costs(stages, jnp.ones((1, 4))))  # y, dw, dx: 2 x 4 x 4
    [96. 96.]
  """

  def flops(stage, operands):
    analysis = jax.jit(_passes(stage)).lower(*operands).cost_analysis()
    return max(0.0, float((analysis or {}).get("flops", 0.0)))

  shapes = jax.eval_shape(
    lambda key: _operands(stages, key, _zeros(example)), jax.random.key(0)
  )
  return np.array(
    [
      flops(stage, operands)
      for stage, operands in zip(stages, shapes, strict=True)
    ]
  )


def measure_costs(
  stages: Sequence[stages_lib.Stage], example: PyTree, repeats: int = 10
) -> np.ndarray:
  """Measures the time of each stage's forward and backward pass.

  One stage after the other, on the default device, with nothing else running
  if the times are to mean anything. Starting a program costs as much as a tiny
  stage; a pipeline starts one program for all its ticks.

  Args:
    stages: The pipeline.
    example: One micro-batch of inputs, or its shapes.
    repeats: How often to measure.

  Returns:
    `[S]` floats, medians in seconds.

  Raises:
    ValueError: If `repeats` is no int >= 1.
  """
  repeats = schedules.check_count("repeats", repeats, minimum=1)
  operands = jax.jit(lambda key: _operands(stages, key, _zeros(example)))(
    jax.random.key(0)
  )

  def seconds(stage, own):
    run = jax.jit(_passes(stage))
    jax.block_until_ready(run(*own))
    times = []
    for _ in range(repeats):
      start = time.perf_counter()
      jax.block_until_ready(run(*own))
      times.append(time.perf_counter() - start)
    return statistics.median(times)

  return np.array(list(map(seconds, stages, operands)))


def _passes(stage: stages_lib.Stage) -> Callable[..., Any]:
  """A stage's forward and backward, which takes its output for the error."""

  def run(params, state, x, key):
    y, pullback, _ = jax.vjp(
      lambda params, x: stage(params, state, x, key), params, x, has_aux=True
    )
    return pullback(jax.tree.map(passes.as_cotangent, y, y))

  return run


def _operands(
  stages: Sequence[stages_lib.Stage], key: jax.Array, x: PyTree
) -> list[tuple[Any, ...]]:
  """What each stage's passes take: weights, state, input, key."""
  params, states = network.init(stages, key, x)
  operands = []
  for stage, own_params, own_state in zip(stages, params, states, strict=True):
    own_key = key if stage.stochastic else None
    operands.append((own_params, own_state, x, own_key))
    x, _ = stage(own_params, own_state, x, own_key)
  return operands


def _zeros(example: PyTree) -> PyTree:
  return jax.tree.map(
    lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)), example
  )
