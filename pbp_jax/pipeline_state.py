"""What a simulated run carries from one micro-batch to the next."""

import dataclasses

from flax import struct
import jax
import optax

from pbp_jax.stages import PyTree


@struct.dataclass
class PipelineState:
  """All that a run carries from one micro-batch to the next.

  Attributes:
    step: Micro-batches done, int32.
    key: The run's random key.
    params: The newest raw weights, a tuple of S pytrees.
    opt_state: The optimizer's state.
    history: For each stage a ring of its last forward views, leaves
      `[max_lag + 1, ...]`; None for a stage that meets its newest view.
    stage_state: The state of each stage, None for stages without one.
    gradients: The sum of the gradients since the last update, like `params`;
      None if every micro-batch makes an update.
    stale_params: The same sum of forward views; None if the optimizer does not
      read them.
    raw_history: Rings of raw weights beside those of views, where diagnostics
      need them; else None.
  """

  step: jax.Array
  key: jax.Array
  params: tuple[PyTree, ...]
  opt_state: optax.OptState
  history: tuple[PyTree, ...]
  stage_state: tuple[PyTree, ...]
  gradients: PyTree = None
  stale_params: PyTree = None
  raw_history: PyTree = None

  @classmethod
  def vmap_axes(cls) -> "PipelineState":
    """The axes over which to `jax.vmap` a state: all but the step counter.

    A batched counter would turn the slices of the rings into slow gathers.

    Returns:
      What to give as `in_axes` and `out_axes`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import pbp_jax as pbp
      >>> simulator = pbp.Simulator(
      ...   pbp.as_stages([jnp.sin]), lambda y, t: jnp.sum((y - t) ** 2),
      ...   optax.sgd(0.1), pbp.schedules.synchronous(1))
      >>> axes = pbp.PipelineState.vmap_axes()
      >>> keys = jax.random.split(jax.random.key(0), 5)
      >>> seeds = jax.vmap(simulator.init, (0, None), axes)(keys, jnp.ones(3))
      >>> run = jax.vmap(simulator.run, (axes, None, None), (axes, 0))
      >>> seeds, metrics = run(seeds, jnp.ones((8, 3)), jnp.ones((8, 3)))
      >>> metrics["loss"].shape
      (5, 8)
    """
    fields = {field.name: 0 for field in dataclasses.fields(cls)}
    return cls(**{**fields, "step": None})
