"""The training loop: arms and seeds in, their results out.

`Progress` is all that a run carries from one chunk of samples to the next, so
a checkpoint is one `Progress` on disk.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any, Protocol

import jax
import numpy as np

from experiments import plans, results
from experiments import replicas as replicas_lib
import pbp_jax as pbp
from pbp_jax import data


class OnProgress(Protocol):
  """Told how far training is."""

  def __call__(self, task: str, done: int, total: int) -> None:
    """Takes the news.

    Args:
      task: What is going on.
      done: Samples that each replica has trained or been evaluated on.
      total: How many they will be at the end of this task.
    """


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


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """What all arms of a run have in common.

  Attributes:
    stages: The pipeline.
    dataset: The images.
    plan: How long, and when to look.
    augment: Whether to augment training images.
  """

  stages: tuple[pbp.Stage, ...]
  dataset: data.Dataset
  plan: plans.Plan
  augment: bool

  @functools.cached_property
  def seed_keys(self) -> jax.Array:
    """A key for each seed, from which its weights and its noise follow."""
    seeds = self.plan.seeds
    keys = [jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds]
    return jax.numpy.stack(keys)

  @functools.cached_property
  def initial_params(self) -> Any:
    """Each seed's weights before the first sample, the same in every arm."""
    return replicas_lib.draw_params(
      self.stages, self.dataset.example, self.seed_keys
    )


def families(
  arms: Sequence[pbp.presets.Arm],
) -> list[list[pbp.presets.Arm]]:
  """Puts together the arms that one program can train side by side."""
  groups: dict[str, list[pbp.presets.Arm]] = {}
  for arm in arms:
    groups.setdefault(arm.family, []).append(arm)
  return list(groups.values())


def train_family(
  task: Task, arms: Sequence[pbp.presets.Arm], on_progress: OnProgress
) -> dict[str, results.ArmResult]:
  """Trains arms of one family, all seeds of all of them side by side.

  A seed's initial weights, noise and order of the data are the same in every
  arm. A replica whose loss or weights stop being finite is marked; the others
  go on.

  Args:
    task: The task.
    arms: The arms, of one family.
    on_progress: Told after every chunk.

  Returns:
    The arms' results by name.
  """
  plan = task.plan
  num_train = len(task.dataset.train_images)
  test_images = num_train + np.arange(len(task.dataset.test_images))
  replicas = _replicas(task, arms)
  order = plans.SampleOrder(plan.seeds, num_train)
  names = [arm.name for arm in arms]

  began = time.perf_counter()
  for_each_arm = lambda x: jax.numpy.concatenate([x] * len(arms))
  progress = Progress(
    state=replicas.init(
      for_each_arm(task.seed_keys),
      jax.tree.map(for_each_arm, task.initial_params),
    ),
    samples=0,
    losses=[],
    accuracies=[],
    diverged_at=np.full(replicas.num_replicas, -1),
  )
  label = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
  doing = f"train {label}"
  on_progress(doing, 0, plan.total_samples)
  looks = set(plan.looks())
  pending = None
  for start, end in plan.chunks():
    indices = np.tile(order(start, end), (len(arms), 1))
    progress.state, chunk = replicas.train(progress.state, indices)
    evaluation = None
    if end in looks:
      evaluation = replicas.evaluate(
        progress.state, test_images[: plan.accuracy_images]
      )
    progress.samples = end
    # The host reads a chunk while the devices are busy with the next one.
    if pending is not None:
      progress.record(replicas, *pending)
    pending = (start, chunk, evaluation)
    on_progress(doing, start, plan.total_samples)
    if (progress.diverged_at >= 0).all():
      break
  if pending is not None:
    progress.record(replicas, *pending)
  on_progress(doing, progress.samples, plan.total_samples)
  progress.seconds += time.perf_counter() - began
  on_progress(doing, plan.total_samples, plan.total_samples)
  final = _final_evaluation(
    replicas,
    progress.state,
    {
      "train": np.arange(num_train)[: plan.final_images or None],
      "test": test_images[: plan.final_images or None],
    },
    lambda done, total: on_progress(f"evaluate {label}", done, total),
  )
  return _arm_results(names, final, progress)


def _final_evaluation(
  replicas: replicas_lib.Replicas,
  state: pbp.PipelineState,
  splits: Mapping[str, np.ndarray],
  on_progress: Callable[[int, int], None],
) -> dict[str, replicas_lib.Evaluation]:
  """Evaluations of these images, on the host, some thousands at a time."""
  done, total = 0, sum(map(len, splits.values()))
  evaluations = {}
  for split, images in splits.items():
    loss = accuracy = np.zeros(replicas.num_replicas)
    for start in range(0, len(images), 2000):
      on_progress(done, total)
      part = images[start : start + 2000]
      evaluation = replicas.fetch(replicas.evaluate(state, part))
      loss = loss + evaluation.loss * (len(part) / len(images))
      accuracy = accuracy + evaluation.accuracy * (len(part) / len(images))
      done += len(part)
    evaluations[split] = replicas_lib.Evaluation(loss, accuracy)
  on_progress(done, total)
  return evaluations


def _replicas(
  task: Task, arms: Sequence[pbp.presets.Arm]
) -> replicas_lib.Replicas:
  def make_simulator(stages: Any, numbers: Any, batch_fn: Any) -> pbp.Simulator:
    return pbp.Simulator(
      stages=stages,
      loss_fn=replicas_lib.cross_entropy,
      optimizer=arms[0].make_optimizer(numbers),
      schedule=arms[0].schedule,
      backward=arms[0].backward,
      batch_fn=batch_fn,
    )

  num_seeds = task.plan.num_seeds
  stack = lambda *numbers: np.repeat(np.stack(numbers), num_seeds, axis=0)
  return replicas_lib.Replicas(
    stages=task.stages,
    make_simulator=make_simulator,
    num_replicas=len(arms) * num_seeds,
    numbers=jax.tree.map(stack, *(dict(arm.numbers) for arm in arms)),
    dataset=task.dataset,
    augment=task.augment,
    devices=tuple(jax.devices()),
  )


def _arm_results(
  names: Sequence[str],
  final: Mapping[str, replicas_lib.Evaluation],
  progress: Progress,
) -> dict[str, results.ArmResult]:
  """Everything sorted by arm; what a diverged replica has, left out."""
  # Finite weights can still give a loss that isn't.
  losses = np.stack([evaluation.loss for evaluation in final.values()])
  overflow = ~np.isfinite(losses).all(0) & (progress.diverged_at < 0)
  diverged_at = np.where(overflow, progress.samples - 1, progress.diverged_at)

  def by_arm(values: Any) -> np.ndarray:
    return np.reshape(values, (len(names), -1, *np.shape(values)[1:]))

  def final_values(values: Any) -> list[list[float | None]]:
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
