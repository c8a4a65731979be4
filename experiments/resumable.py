"""Arms trained family after family, so that a run broken off loses little."""

from collections.abc import Sequence

from experiments import checkpoints, interruption, results, runner, versions
import pbp_jax as pbp


def train(
  parts: Sequence[tuple[runner.Task, Sequence[pbp.presets.Arm]]],
  workdir: results.Workdir,
  policy: checkpoints.Policy,
  on_progress: runner.OnProgress,
) -> dict[str, results.ArmResult]:
  """Trains what a run has not trained yet, and writes after every family.

  A run that was broken off goes on in the middle of a family, from its last
  checkpoint, and ends in the numbers it would have had, bit for bit.

  Args:
    parts: All tasks of the run, each with its arms.
    workdir: Its folder, from `Workdir.resumed`.
    policy: When to save.
    on_progress: Told how far it is.

  Returns:
    The arms' results by name, in their order.

  Raises:
    results.WorkdirError: If the folder can't be written, or holds checkpoints
      none of which is good.
    interruption.Interrupted: If the run was asked to end; it is saved.
  """
  ended = workdir.ended
  workdir.write("incomplete", ended)
  families = [
    (task, family) for task, arms in parts for family in runner.families(arms)
  ]
  for i, (task, family) in enumerate(families):
    kept = _checkpoints(workdir, f"family_{i}", family, policy)
    if not all(arm.name in ended for arm in family):
      if policy.is_interrupted():
        raise interruption.Interrupted("between two families")
      ended = ended | runner.train_family(task, family, on_progress, kept)
      workdir.write("incomplete", ended)
    kept.remove()
  return {arm.name: ended[arm.name] for _, arms in parts for arm in arms}


def _checkpoints(
  workdir: results.Workdir,
  name: str,
  family: Sequence[pbp.presets.Arm],
  policy: checkpoints.Policy,
) -> checkpoints.Checkpoints:
  """The checkpoints of a family, which no other run's can be taken for."""
  accepted = [workdir.versions, *workdir.versions.get("earlier", [])]
  return checkpoints.Checkpoints(
    workdir.checkpoints_path / name,
    run={
      "config": results.of_the_numbers(workdir.config),
      "arms": [arm.name for arm in family],
    },
    versions=[versions.of_the_numbers(each) for each in accepted],
    policy=policy,
  )
