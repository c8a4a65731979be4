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

from experiments import checkpoints as checkpoints_lib
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
    diverged_stage: The stage where that showed, -1 likewise.
    seconds: Seconds of training.
  """

  state: pbp.PipelineState
  samples: int
  losses: list[tuple[int, np.ndarray]]
  accuracies: list[tuple[int, np.ndarray]]
  diverged_at: np.ndarray
  diverged_stage: np.ndarray
  seconds: float = 0.0

  @classmethod
  def start(cls, state: pbp.PipelineState, num_replicas: int) -> "Progress":
    """Before the first sample."""
    none = np.full(num_replicas, -1)
    return cls(state, 0, [], [], diverged_at=none, diverged_stage=none)

  @classmethod
  def from_json(
    cls, state: pbp.PipelineState, progress: Mapping[str, Any]
  ) -> "Progress":
    """The progress whose `as_json` this is."""
    points = lambda curve: [(end, np.array(values)) for end, values in curve]
    return cls(
      state,
      progress["samples"],
      points(progress["losses"]),
      points(progress["accuracies"]),
      np.array(progress["diverged_at"]),
      np.array(progress["diverged_stage"]),
      progress["seconds"],
    )

  def as_json(self) -> dict[str, Any]:
    """All but the state, of what JSON can hold; exact."""
    points = lambda curve: [(end, values.tolist()) for end, values in curve]
    return {
      "samples": self.samples,
      "losses": points(self.losses),
      "accuracies": points(self.accuracies),
      "diverged_at": self.diverged_at.tolist(),
      "diverged_stage": self.diverged_stage.tolist(),
      "seconds": self.seconds,
    }

  @property
  def has_diverged(self) -> bool:
    """Whether no replica is left."""
    return bool((self.diverged_at >= 0).all())

  def record(
    self,
    replicas: replicas_lib.Replicas,
    start: int,
    chunk: replicas_lib.Chunk,
    evaluation: replicas_lib.Evaluation | None,
  ) -> None:
    """Adds a chunk that began at sample `start`, and waits for it."""
    loss, where = replicas.fetch(chunk)
    end = start + loss.shape[1]
    is_diverged = where >= 0
    first = is_diverged.argmax(1)
    is_new = is_diverged.any(1) & (self.diverged_at < 0)
    stage = np.take_along_axis(where, first[:, None], axis=1)[:, 0]
    self.diverged_at = np.where(is_new, start + first, self.diverged_at)
    self.diverged_stage = np.where(is_new, stage, self.diverged_stage)
    self.losses.append((end, loss.mean(1)))
    if evaluation is not None:
      accuracy = replicas.fetch(evaluation.accuracy)
      self.accuracies.append((end, accuracy))
    self.samples = end


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
  dataset: data.Images
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
  task: Task,
  arms: Sequence[pbp.presets.Arm],
  on_progress: OnProgress,
  checkpoints: checkpoints_lib.Checkpoints | None = None,
) -> dict[str, results.ArmResult]:
  """Trains arms of one family, all seeds of all of them side by side.

  A seed's initial weights, noise and order of the data are the same in every
  arm. A replica whose loss or weights stop being finite is marked: it counts
  as ended there, though its lane of the program computes on, and the others go
  on. When none is left, training stops.

  Args:
    task: The task.
    arms: The arms, of one family.
    on_progress: Told after every chunk.
    checkpoints: Where training goes on from, if there is any, and is saved.

  Returns:
    The arms' results by name.

  Raises:
    checkpoints.CheckpointError: If there are checkpoints and none is good, or
      the disk has no room for them.
    interruption.Interrupted: If the run was asked to end; it is saved.
  """
  plan = task.plan
  num_train = task.dataset.num_train
  test_images = num_train + np.arange(task.dataset.num_test)
  replicas = _replicas(task, arms)
  order = plans.SampleOrder(plan.seeds, num_train)
  names = [arm.name for arm in arms]

  began = time.perf_counter()
  progress = _start_or_resume(task, replicas, len(arms), checkpoints)
  began -= progress.seconds
  label = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
  doing = f"train {label}"
  on_progress(doing, progress.samples, plan.total_samples)
  looks = set(plan.looks())
  pending = None
  for start, end in plan.chunks():
    if end <= progress.samples or progress.has_diverged:
      continue
    indices = np.tile(order(start, end), (len(arms), 1))
    progress.state, chunk = replicas.train(progress.state, indices)
    evaluation = None
    if end in looks:
      evaluation = replicas.evaluate(
        progress.state, test_images[: plan.accuracy_images]
      )
    # The host reads a chunk while the devices are busy with the next one.
    if pending is not None:
      progress.record(replicas, *pending)
    # What came after the sample by which all had diverged is not recorded.
    pending = None if progress.has_diverged else (start, chunk, evaluation)
    on_progress(doing, start, plan.total_samples)
    if checkpoints is not None and pending and checkpoints.is_due(end):
      progress.record(replicas, *pending)
      pending = None
      progress.seconds = time.perf_counter() - began
      checkpoints.save(replicas.leaves(progress.state), progress.as_json())
  if pending is not None:
    progress.record(replicas, *pending)
  progress.seconds = time.perf_counter() - began
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
  return _arm_results(names, len(task.stages), final, progress)


def _start_or_resume(
  task: Task,
  replicas: replicas_lib.Replicas,
  num_arms: int,
  checkpoints: checkpoints_lib.Checkpoints | None,
) -> Progress:
  """The progress of the last checkpoint, or that before the first sample."""
  if checkpoints is not None and checkpoints.exist():
    leaves, progress = checkpoints.load(replicas.abstract_leaves())
    return Progress.from_json(replicas.from_leaves(leaves), progress)
  for_each_arm = lambda x: jax.numpy.concatenate([x] * num_arms)
  state = replicas.init(
    for_each_arm(task.seed_keys),
    jax.tree.map(for_each_arm, task.initial_params),
  )
  if checkpoints is not None:
    checkpoints.check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
  return Progress.start(state, replicas.num_replicas)


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
  num_stages: int,
  final: Mapping[str, replicas_lib.Evaluation],
  progress: Progress,
) -> dict[str, results.ArmResult]:
  """Everything sorted by arm; what a diverged replica has, left out."""
  # Finite weights can still give a loss that isn't.
  losses = np.stack([evaluation.loss for evaluation in final.values()])
  overflow = ~np.isfinite(losses).all(0) & (progress.diverged_at < 0)
  diverged_at = np.where(overflow, progress.samples - 1, progress.diverged_at)
  last = num_stages - 1
  diverged_stage = np.where(overflow, last, progress.diverged_stage)

  def by_arm(values: Any) -> np.ndarray:
    num_seeds = len(values) // len(names)
    return np.reshape(values, (len(names), num_seeds, *np.shape(values)[1:]))

  def final_values(values: Any) -> list[list[float | None]]:
    return results.finite_or_none(
      by_arm(np.where(diverged_at < 0, values, np.nan))
    )

  def curve(points: list[tuple[int, np.ndarray]]) -> Any:
    places = np.array([samples for samples, _ in points], int)
    values = np.zeros((len(diverged_at), len(points)))  # there may be none
    for i, (_, at_place) in enumerate(points):
      values[:, i] = at_place
    # Points after the sample that diverged have no meaning.
    is_valid = (diverged_at < 0)[:, None] | (places <= diverged_at[:, None])
    return places.tolist(), by_arm(np.where(is_valid, values, np.nan))

  loss_places, losses = curve(progress.losses)
  accuracy_places, accuracies = curve(progress.accuracies)
  at, stage = (
    [[int(x) if x >= 0 else None for x in arm] for arm in by_arm(values)]
    for values in (diverged_at, diverged_stage)
  )
  accuracy = final_values(final["test"].accuracy)
  loss = final_values(final["train"].loss)
  return {
    name: results.ArmResult(
      final_accuracy=accuracy[i],
      final_loss=loss[i],
      diverged_at=at[i],
      diverged_stage=stage[i],
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
