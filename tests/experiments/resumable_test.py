import dataclasses
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np

from experiments import (
  checkpoints,
  interruption,
  results,
  resumable,
  runner,
  train,
  versions,
)
from pbp_jax import data
from tests.experiments import configs

# Chunks of 3 samples end while the pipeline fills (its delays go to 4), within
# an update (of 2), within an epoch (of 16) and beyond it.
_CONFIG = dataclasses.replace(
  configs.SMALL,
  arms=("sgdm", "pb", "pb+lwpvd+scd"),
  num_stages=3,
  width=4,
  update_interval=2,
  chunk_samples=3,
  accuracy_points=3,
)
_FAMILIES = ("sgdm", "pb and 1 more")


class Stops:
  """Asks to end in the chunks that begin at these samples, once in each."""

  def __init__(self, *starts):
    self.places = {(family, start) for family in _FAMILIES for start in starts}
    self.place = None

  def on_progress(self, task, done, total):
    del total
    self.place = (task.removeprefix("train "), done)

  def __call__(self):
    return self.place in self.places


def _few_digits():
  digits = data.load("digits")
  return dataclasses.replace(
    digits,
    train_images=digits.train_images[:16],
    train_labels=digits.train_labels[:16],
    test_images=digits.test_images[:20],
    test_labels=digits.test_labels[:20],
  )


class ResumableTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    stages = train.make_stages(_CONFIG)
    plan = dataclasses.replace(train.make_plan(_CONFIG, 16), total_samples=24)
    cls.task = runner.Task(stages, _few_digits(), plan, augment=True)
    cls.arms = train.make_arms(_CONFIG, len(stages), 16, 24)
    # Compiled once; other processes compile for themselves in fault_test.
    made = {}

    def replicas(task, arms):
      del task
      names = tuple(arm.name for arm in arms)
      if names not in made:
        made[names] = make(cls.task, arms)
      return made[names]

    make = runner._replicas
    cls.enterClassContext(mock.patch.object(runner, "_replicas", replicas))
    # Somebody may edit the code meanwhile.
    cls.enterClassContext(mock.patch.object(versions, "_code", lambda: "0"))
    cls.whole = cls._train(cls._folder(), Stops())
    cls.made = made

  @classmethod
  def _folder(cls):
    return pathlib.Path(tempfile.mkdtemp()) / "run"

  @classmethod
  def _begin(cls, folder, stops, **policy):
    """Trains until the end or a stop, as one call of the program would."""
    return resumable.train(
      [(cls.task, cls.arms)],
      results.Workdir.claim(folder, _CONFIG).resumed(),
      checkpoints.Policy(is_interrupted=stops, **policy),
      stops.on_progress,
    )

  @classmethod
  def _train(cls, folder, stops, **policy):
    """Trains until the end, as often as it takes."""
    while True:
      try:
        return cls._begin(folder, stops, **policy)
      except interruption.Interrupted:
        stops.places.remove(stops.place)

  def _assert_same(self, found):
    for name, arm in self.whole.items():
      for field in dataclasses.fields(arm):
        if field.name != "train_seconds":
          self.assertEqual(
            getattr(found[name], field.name), getattr(arm, field.name), field
          )

  @parameterized.named_parameters(
    ("once", 3),
    ("in_every_chunk", *range(0, 24, 3)),
  )
  def test_broken_off_run_ends_in_the_very_same_numbers(self, *starts):
    stops = Stops(*starts)
    found = self._train(self._folder(), stops)
    self.assertEmpty(stops.places)
    self._assert_same(found)

  def test_checkpoints_change_no_number(self):
    self._assert_same(self._train(self._folder(), Stops(), samples=6))

  def test_ended_run_keeps_no_checkpoints(self):
    folder = self._folder()
    self._train(folder, Stops(6), samples=3)
    self.assertEqual([p.name for p in folder.iterdir()], ["results.json"])

  def test_all_that_is_in_flight_is_saved(self):
    saved = []
    for starts in ((18,), (0, 6, 12, 18)):
      folder, stops = self._folder(), Stops(*starts)
      while ("sgdm", 18) in stops.places:
        with self.assertRaises(interruption.Interrupted):
          self._begin(folder, stops)
        stops.places.remove(stops.place)
      (path,) = folder.rglob("000000000021")
      names = [path.name for path in path.parent.iterdir()]
      self.assertLessEqual(len(names), 2)
      like = self.made[("sgdm",)].abstract_leaves()
      saved.append(checkpoints._read_arrays(path / "arrays", like))
    self.assertNotEmpty(saved[0])
    for once, often in zip(*saved, strict=True):
      np.testing.assert_array_equal(once, often)

  def test_what_has_ended_is_not_trained_again(self):
    folder = self._folder()
    stops = Stops()
    stops.places = {("pb and 1 more", 6)}
    with self.assertRaises(interruption.Interrupted):
      self._begin(folder, stops)
    with mock.patch.object(
      runner, "train_family", side_effect=runner.train_family
    ) as train_family:
      self._begin(folder, Stops())
    (call,) = train_family.call_args_list
    self.assertEqual([arm.name for arm in call.args[1]], ["pb", "pb+lwpvd+scd"])

  def test_run_asked_to_end_between_families_ends_there(self):
    folder = self._folder()
    with (
      mock.patch.object(runner, "train_family") as train_family,
      self.assertRaisesRegex(interruption.Interrupted, "between"),
    ):
      resumable.train(
        [(self.task, self.arms)],
        results.Workdir.claim(folder, _CONFIG),
        checkpoints.Policy(is_interrupted=lambda: True),
        configs.quiet,
      )
    train_family.assert_not_called()

  def test_when_none_is_left_training_stops_where_it_would_have(self):
    numbers = {**self.arms[1].numbers}
    numbers = {name: np.full_like(x, np.nan) for name, x in numbers.items()}
    arm = dataclasses.replace(self.arms[1], name="broken", numbers=numbers)
    lengths = []
    for stops in (Stops(), Stops(0)):
      stops.places = {("broken", start) for _, start in stops.places}
      folder = self._folder()
      while True:
        try:
          found = resumable.train(
            [(self.task, [arm])],
            results.Workdir.claim(folder, _CONFIG).resumed(),
            checkpoints.Policy(is_interrupted=stops),
            stops.on_progress,
          )
          break
        except interruption.Interrupted:
          stops.places.remove(stops.place)
      self.assertEqual(found["broken"].diverged_at, [0, 0])
      lengths.append(found["broken"].curve["samples"])
    self.assertEqual(lengths, [[3], [3]])


if __name__ == "__main__":
  absltest.main()
