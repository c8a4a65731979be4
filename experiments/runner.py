"""The training loop: arms and seeds in, their results out.

`Progress` is all that a run carries from one chunk of samples to the next, so
a checkpoint is one `Progress` on disk.
"""

from collections.abc import Sequence
import dataclasses
import time
from typing import Any, Protocol

import jax
import numpy as np

from experiments import replicas as replicas_lib
from experiments import results
import pbp_jax as pbp
from pbp_jax import data


class OnProgress(Protocol):
  """Told how far training is."""

  def __call__(self, names: Sequence[str], samples: int, total: int) -> None:
    """Takes the news.

    Args:
      names: The arms that train now, side by side.
      samples: Samples each of their replicas has seen.
      total: Samples each will have seen at the end.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How long to train, and when to look.

  Attributes:
    num_seeds: Seeds an arm.
    first_seed: The seeds are this number and those after it.
    total_samples: Samples each replica sees.
    chunk_samples: Samples a chunk: one dispatch, one point of the loss curve.
    accuracy_points: Points of the accuracy curve.
    accuracy_images: Test images for a point of the accuracy curve, from the
      first; the final accuracy takes all.
  """

  num_seeds: int
  first_seed: int
  total_samples: int
  chunk_samples: int
  accuracy_points: int
  accuracy_images: int

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

  def has_accuracy(self, start: int, end: int) -> bool:
    """Whether the accuracy is measured at the end of this chunk."""
    passed = lambda n: n * self.accuracy_points // self.total_samples
    return passed(end) > passed(start)


@dataclasses.dataclass
class Progress:
  """Where a family of arms is in its training.

  Attributes:
    state: The replicas' states, on the devices.
    samples: Samples they have seen.
    losses: For each chunk its end and mean losses `[replicas]`.
    accuracies: For each look its place and accuracies `[replicas]`.
    diverged_at: For each replica the index of the first sample that was not
      finite, -1 if there is none.
    seconds: Seconds of training.
  """

  state: pbp.PipelineState
  samples: int
  losses: list[tuple[int, np.ndarray]]
  accuracies: list[tuple[int, np.ndarray]]
  diverged_at: np.ndarray
  seconds: float = 0.0

  def record(
    self,
    replicas: replicas_lib.Replicas,
    start: int,
    chunk: replicas_lib.Chunk,
    evaluation: replicas_lib.Evaluation | None,
  ) -> None:
    """Adds a chunk that began at sample `start`, and waits for it."""
    loss = replicas.fetch(chunk.loss)
    count = loss.shape[1]
    is_finite = np.isfinite(loss)
    first = np.where(is_finite.all(1), count - 1, is_finite.argmin(1))
    ends_finite = is_finite.all(1) & replicas.fetch(chunk.is_finite)
    is_new = ~ends_finite & (self.diverged_at < 0)
    self.diverged_at = np.where(is_new, start + first, self.diverged_at)
    self.losses.append((start + count, loss.mean(1)))
    if evaluation is not None:
      accuracy = replicas.fetch(evaluation.accuracy)
      self.accuracies.append((start + count, accuracy))


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


def families(
  arms: Sequence[pbp.presets.Arm],
) -> list[list[pbp.presets.Arm]]:
  """Puts together the arms that one program can train side by side."""
  groups: dict[str, list[pbp.presets.Arm]] = {}
  for arm in arms:
    groups.setdefault(arm.family, []).append(arm)
  return list(groups.values())


def train_family(
  arms: Sequence[pbp.presets.Arm],
  stages: Sequence[pbp.Stage],
  dataset: data.Dataset,
  plan: Plan,
  augment: bool,
  on_progress: OnProgress,
) -> dict[str, results.ArmResult]:
  """Trains arms of one family, all seeds of all of them side by side.

  A seed's initial weights, noise and order of the data are the same in every
  arm. A replica whose loss or weights stop being finite is marked; the others
  go on.

  Args:
    arms: The arms, of one family.
    stages: The pipeline.
    dataset: The images.
    plan: How long, and when to look.
    augment: Whether to augment training images.
    on_progress: Told after every chunk.

  Returns:
    The arms' results by name.
  """
  seeds = range(plan.first_seed, plan.first_seed + plan.num_seeds)
  replicas = _replicas(arms, stages, dataset, augment, plan.num_seeds)
  order = SampleOrder(seeds, len(dataset.train_images))
  names = [arm.name for arm in arms]

  began = time.perf_counter()
  keys = [jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds]
  progress = Progress(
    state=replicas.init(jax.numpy.stack(keys * len(arms))),
    samples=0,
    losses=[],
    accuracies=[],
    diverged_at=np.full(replicas.num_replicas, -1),
  )
  on_progress(names, 0, plan.total_samples)
  pending = None
  for start, end in plan.chunks():
    indices = np.tile(order(start, end), (len(arms), 1))
    progress.state, chunk = replicas.train(progress.state, indices)
    evaluation = None
    if plan.has_accuracy(start, end):
      evaluation = replicas.evaluate(
        progress.state.params, "test", plan.accuracy_images
      )
    progress.samples = end
    # The host reads a chunk while the devices are busy with the next one.
    if pending is not None:
      progress.record(replicas, *pending)
    pending = (start, chunk, evaluation)
    on_progress(names, start, plan.total_samples)
    if (progress.diverged_at >= 0).all():
      break
  if pending is not None:
    progress.record(replicas, *pending)
  on_progress(names, progress.samples, plan.total_samples)
  progress.seconds += time.perf_counter() - began
  return _arm_results(names, replicas, progress)


def _replicas(
  arms: Sequence[pbp.presets.Arm],
  stages: Sequence[pbp.Stage],
  dataset: data.Dataset,
  augment: bool,
  num_seeds: int,
) -> replicas_lib.Replicas:
  def make_simulator(numbers: Any, batch_fn: Any) -> pbp.Simulator:
    return pbp.Simulator(
      stages=tuple(stages),
      loss_fn=replicas_lib.cross_entropy,
      optimizer=arms[0].make_optimizer(numbers),
      schedule=arms[0].schedule,
      backward=arms[0].backward,
      batch_fn=batch_fn,
    )

  stack = lambda *numbers: np.repeat(np.stack(numbers), num_seeds, axis=0)
  return replicas_lib.Replicas(
    make_simulator=make_simulator,
    num_replicas=len(arms) * num_seeds,
    numbers=jax.tree.map(stack, *(dict(arm.numbers) for arm in arms)),
    dataset=dataset,
    augment=augment,
    devices=tuple(jax.devices()),
  )


def _arm_results(
  names: Sequence[str], replicas: replicas_lib.Replicas, progress: Progress
) -> dict[str, results.ArmResult]:
  """The final evaluation, and everything sorted by arm."""
  params = progress.state.params
  final = {
    split: replicas.fetch(replicas.evaluate(params, split))
    for split in ("train", "test")
  }
  # Finite weights can still give a loss that isn't.
  overflow = ~np.isfinite(final["train"].loss) & (progress.diverged_at < 0)
  diverged_at = np.where(overflow, progress.samples - 1, progress.diverged_at)

  def by_arm(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(names), -1, *values.shape[1:])

  def final_values(values: np.ndarray) -> list[list[float | None]]:
    return results.finite_or_none(
      by_arm(np.where(diverged_at < 0, values, np.nan))
    )

  def curve(points: list[tuple[int, np.ndarray]]) -> Any:
    places = np.array([samples for samples, _ in points])
    values = np.stack([values for _, values in points], axis=1)
    # Points after the sample that diverged have no meaning.
    is_valid = (diverged_at < 0)[:, None] | (places <= diverged_at[:, None])
    return places.tolist(), by_arm(np.where(is_valid, values, np.nan))

  loss_places, losses = curve(progress.losses)
  accuracy_places, accuracies = curve(progress.accuracies)
  accuracy = final_values(final["test"].accuracy)
  loss = final_values(final["train"].loss)
  return {
    name: results.ArmResult(
      final_accuracy=accuracy[i],
      final_loss=loss[i],
      diverged_at=[
        int(index) if index >= 0 else None for index in by_arm(diverged_at)[i]
      ],
      curve={
        "samples": loss_places,
        "loss": results.finite_or_none(losses[i]),
        "accuracy_samples": accuracy_places,
        "accuracy": results.finite_or_none(accuracies[i]),
      },
      train_seconds=progress.seconds,
      trained_with=names,
    )
    for i, name in enumerate(names)
  }
