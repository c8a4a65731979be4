"""The last versions of the weights, and which of them a pass meets."""

from collections.abc import Iterable, Sequence
import functools

import jax

from pbp_jax import ring_buffers
from pbp_jax.stages import PyTree


def init(
  weights: Sequence[PyTree], max_lags: Iterable[int]
) -> tuple[PyTree, ...]:
  """Rings all of whose slots hold version 0.

  Args:
    weights: Version 0 of each stage.
    max_lags: The largest lag of each stage.

  Returns:
    For each stage a ring of `max_lag + 1` slots, its leaves `[slots, ...]`;
    None where there is no lag or there are no weights.
  """
  return tuple(map(_new_ring, weights, max_lags))


def meet(
  history: tuple[PyTree, ...],
  newest: Sequence[PyTree],
  version: jax.Array,
  lags: Iterable[jax.typing.ArrayLike],
) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
  """The weights that passes meet, and the rings that they are kept in.

  A ring is written before it is read: XLA then updates it in place. Version k
  is in slot k modulo the number of slots, which all held version 0 at first, so
  nothing special happens while the pipeline fills.

  Args:
    history: A ring for each stage, or None.
    newest: The weights of this version.
    version: How many updates made them.
    lags: How many versions older those are that are met, `[S]`.

  Returns:
    The weights met, and the rings.
  """
  met, rings = [], []
  for ring, weights, lag in zip(history, newest, lags, strict=True):
    if ring is not None:
      ring = jax.tree.map(
        functools.partial(ring_buffers.write, index=version), ring, weights
      )
      weights = jax.tree.map(
        functools.partial(ring_buffers.read, index=version - lag), ring
      )
    met.append(weights)
    rings.append(ring)
  return tuple(met), tuple(rings)


def _new_ring(weights: PyTree, max_lag: int) -> PyTree:
  if max_lag == 0 or not jax.tree.leaves(weights):
    return None
  return jax.tree.map(
    lambda leaf: ring_buffers.full(leaf, int(max_lag) + 1), weights
  )
