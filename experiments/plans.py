"""How long a run trains, when it looks, and which sample comes when."""

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from pbp_jax import data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How long to train, and when to look.

  Attributes:
    num_seeds: Seeds an arm.
    first_seed: The seeds are this number and those after it.
    total_samples: Samples each replica sees.
    chunk_samples: Samples a chunk: one dispatch, one point of the loss curve.
    accuracy_points: Most points of the accuracy curve, evenly spaced.
    accuracy_images: Test images for a point of the accuracy curve, from the
      first.
    final_images: Images of each split for the final evaluation, from the
      first; 0 for all.
  """

  num_seeds: int
  first_seed: int
  total_samples: int
  chunk_samples: int
  accuracy_points: int
  accuracy_images: int
  final_images: int = 0

  @property
  def seeds(self) -> range:
    """The seeds."""
    return range(self.first_seed, self.first_seed + self.num_seeds)

  def chunks(self) -> list[tuple[int, int]]:
    """Start and end of each chunk.

    Example:
      >>> plan = Plan(num_seeds=1, first_seed=0, total_samples=5,
      ...             chunk_samples=2, accuracy_points=1, accuracy_images=1)
      >>> plan.chunks()
      [(0, 2), (2, 4), (4, 5)]
    """
    starts = range(0, self.total_samples, self.chunk_samples)
    return [
      (start, min(start + self.chunk_samples, self.total_samples))
      for start in starts
    ]

  def looks(self) -> list[int]:
    """Ends of the chunks after which the accuracy is measured.

    Example:
      >>> plan = Plan(num_seeds=1, first_seed=0, total_samples=10,
      ...             chunk_samples=2, accuracy_points=3, accuracy_images=1)
      >>> plan.looks()
      [2, 6, 10]
    """
    ends = [end for _, end in self.chunks()]
    every = -(-len(ends) // self.accuracy_points)
    return ends[::-1][::every][::-1]


class SampleOrder:
  """Which training image each seed sees when: epochs without replacement."""

  def __init__(self, seeds: Sequence[int], num_examples: int):
    """Orders for these seeds over so many examples."""
    keys = [jax.random.fold_in(jax.random.key(seed), 1) for seed in seeds]
    self._keys = jax.numpy.stack(keys)
    self._num_examples = num_examples
    self._draw = jax.jit(
      jax.vmap(
        lambda key, epoch: data.epoch_order(
          jax.random.fold_in(key, epoch), num_examples
        ),
        (0, None),
      )
    )
    self._epochs: dict[int, np.ndarray] = {}

  def __call__(self, start: int, end: int) -> np.ndarray:
    """Images of samples `start` to `end - 1`, ints `[seeds, end - start]`."""
    size = self._num_examples
    parts = []
    for epoch in range(start // size, -(-end // size)):
      if epoch not in self._epochs:
        drawn = {epoch: np.asarray(self._draw(self._keys, epoch))}
        self._epochs = drawn  # a later chunk never asks for an earlier epoch
      first = max(start - epoch * size, 0)
      parts.append(self._epochs[epoch][:, first : end - epoch * size])
    return np.concatenate(parts, axis=1)
