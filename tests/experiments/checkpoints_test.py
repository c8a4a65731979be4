import os
import pathlib
import shutil
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from experiments import checkpoints, interruption

_RUN = {"config": {"epochs": 1}, "arms": ["pb"]}
_VERSIONS = {"jax": "1"}


def _arrays(samples):
  rng = np.random.default_rng(samples)
  return [
    rng.normal(size=(3, 50)).astype(np.float32),
    np.array([np.nan, np.inf, samples]),
    np.asarray(jnp.arange(4, dtype=jnp.bfloat16)),
    np.zeros((0, 2), np.float32),
    np.array(samples, np.int32),
    np.array([True, False]),
  ]


def _progress(samples):
  return {"samples": samples, "losses": [[samples, [0.1, float("inf")]]]}


def _make(folder, run=_RUN, versions=(_VERSIONS,), **policy):
  policy = {"minutes": 0, **policy}
  return checkpoints.Checkpoints(
    folder / "checkpoints" / "family_0",
    run,
    versions,
    checkpoints.Policy(**policy),
  )


def _save(made, *samples):
  for each in samples:
    made.save(_arrays(each), _progress(each))


def _path(folder, samples):
  return folder / "checkpoints" / "family_0" / f"{samples:012d}"


def _data(path):
  """The files that hold the arrays' numbers, the largest first."""
  files = [p for p in (path / "arrays").rglob("d/*") if p.is_file()]
  return sorted(files, key=lambda p: -p.stat().st_size)


def _truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _swap(path, other):
  content, others = path.read_bytes(), other.read_bytes()
  path.write_bytes(others)
  other.write_bytes(content)


def _replace(path, source):
  if path.is_dir():
    shutil.rmtree(path)
    shutil.copytree(source, path)
  else:
    shutil.copy(source, path)


def _to_file(path):
  shutil.rmtree(path)
  path.write_text("a file")


def _empty_folder(path):
  shutil.rmtree(path)
  path.mkdir()


def _foreign(path, **changes):
  """Puts in its place what another run or family saved at this sample."""
  with tempfile.TemporaryDirectory() as other:
    made = _make(pathlib.Path(other), **changes)
    arrays = [array + 1 if array.size else array for array in _arrays(100)[:2]]
    made.save([*arrays, *_arrays(100)[2:]], _progress(100))
    _replace(path, _path(pathlib.Path(other), 100))


# What is done to the newest of two checkpoints, of which one is `new` and the
# other `old`.
_DAMAGE = {
  "truncated_array": lambda new, old: _truncate(_data(new)[0]),
  "emptied_array": lambda new, old: _data(new)[0].write_bytes(b""),
  "flipped_bit_of_an_array": lambda new, old: _flip(_data(new)[0]),
  "missing_array": lambda new, old: _data(new)[0].unlink(),
  "lengthened_array": lambda new, old: _data(new)[0].write_bytes(
    _data(new)[0].read_bytes() + b"\0"
  ),
  "swapped_arrays": lambda new, old: _swap(_data(new)[0], _data(new)[-1]),
  "older_array": lambda new, old: _replace(_data(new)[0], _data(old)[0]),
  "older_arrays": lambda new, old: _replace(new / "arrays", old / "arrays"),
  "missing_arrays": lambda new, old: shutil.rmtree(new / "arrays"),
  "flipped_bit_of_the_arrays_index": lambda new, old: _flip(
    new / "arrays" / "_METADATA"
  ),
  "truncated_progress": lambda new, old: _truncate(new / "progress.json"),
  "emptied_progress": lambda new, old: (new / "progress.json").write_text(""),
  "flipped_bit_of_progress": lambda new, old: _flip(new / "progress.json"),
  "missing_progress": lambda new, old: (new / "progress.json").unlink(),
  "older_progress": lambda new, old: _replace(
    new / "progress.json", old / "progress.json"
  ),
  "truncated_manifest": lambda new, old: _truncate(new / "manifest.json"),
  "emptied_manifest": lambda new, old: (new / "manifest.json").write_text(""),
  "emptied_list_of_files": lambda new, old: (new / "manifest.json").write_text(
    "{}"
  ),
  "flipped_bit_of_the_manifest": lambda new, old: _flip(new / "manifest.json"),
  "missing_manifest": lambda new, old: (new / "manifest.json").unlink(),
  "older_manifest": lambda new, old: _replace(
    new / "manifest.json", old / "manifest.json"
  ),
  "older_checkpoint_under_its_name": lambda new, old: _replace(new, old),
  "another_runs_checkpoint": lambda new, old: _foreign(
    new, run={**_RUN, "config": {"epochs": 2}}
  ),
  "another_familys_checkpoint": lambda new, old: _foreign(
    new, run={**_RUN, "arms": ["sgdm"]}
  ),
  "another_versions_checkpoint": lambda new, old: _foreign(
    new, versions=({"jax": "2"},)
  ),
  "emptied_folder": lambda new, old: _empty_folder(new),
  "file_in_its_place": lambda new, old: _to_file(new),
}

_HARMLESS = {
  "older_one_damaged": lambda new, old: _flip(_data(old)[0]),
  "older_one_missing": lambda new, old: shutil.rmtree(old),
  "half_of_a_next_one": lambda new, old: shutil.copytree(
    old, new.with_name(".part")
  ),
  "foreign_file_beside_them": lambda new, old: new.with_name(
    "notes.txt"
  ).write_text("mine"),
  "foreign_file_inside": lambda new, old: (new / "notes.txt").write_text("x"),
}


class CheckpointsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())

  def _assert_loads(self, samples, made=None):
    arrays, progress = (made or _make(self.folder)).load(_arrays(0))
    self.assertEqual(progress, _progress(samples))
    for array, expected in zip(arrays, _arrays(samples), strict=True):
      self.assertEqual(array.dtype, expected.dtype)
      np.testing.assert_array_equal(array, expected)

  def test_nothing_saved_is_no_checkpoint(self):
    self.assertFalse(_make(self.folder).exist())

  def test_newest_comes_back_bit_for_bit(self):
    _save(_make(self.folder), 50, 100)
    self.assertTrue(_make(self.folder).exist())
    self._assert_loads(100)

  @parameterized.named_parameters(
    *((name, damage) for name, damage in _DAMAGE.items())
  )
  def test_damaged_one_is_named_and_the_one_before_used(self, damage):
    _save(_make(self.folder), 50, 100)
    damage(_path(self.folder, 100), _path(self.folder, 50))
    with self.assertLogs(level="WARNING") as logs:
      self._assert_loads(50)
    self.assertLen(logs.records, 1)
    self.assertIn(str(_path(self.folder, 100)), logs.output[0])
    self.assertIn("going on from sample 50", logs.output[0])

  @parameterized.named_parameters(
    *((name, damage) for name, damage in _HARMLESS.items())
  )
  def test_harmless_change_does_no_harm(self, damage):
    _save(_make(self.folder), 50, 100)
    damage(_path(self.folder, 100), _path(self.folder, 50))
    with self.assertNoLogs(level="WARNING"):
      self._assert_loads(100)

  @parameterized.named_parameters(
    *((name, damage) for name, damage in _DAMAGE.items())
  )
  def test_none_good_is_an_error_and_changes_nothing(self, damage):
    _save(_make(self.folder), 50, 100)
    damage(_path(self.folder, 100), _path(self.folder, 50))
    shutil.rmtree(_path(self.folder, 50))
    before = sorted(self.folder.rglob("*"))
    with self.assertRaisesRegex(
      checkpoints.CheckpointError, "No checkpoint is good.*000000000100"
    ):
      _make(self.folder).load(_arrays(0))
    self.assertEqual(sorted(self.folder.rglob("*")), before)

  def test_damaged_one_is_set_aside_and_its_place_taken(self):
    _save(_make(self.folder), 50, 100)
    _flip(_data(_path(self.folder, 100))[0])
    made = _make(self.folder)
    with self.assertLogs(level="WARNING"):
      self._assert_loads(50, made)
    _save(made, 100)
    self._assert_loads(100)
    aside = self.folder / "checkpoints" / "damaged"
    self.assertLen(list(aside.iterdir()), 1)

  def test_arrays_of_another_shape_are_damage(self):
    _save(_make(self.folder), 50)
    like = _arrays(0)
    like[0] = like[0][:, :7]
    with self.assertRaisesRegex(checkpoints.CheckpointError, r"\(3, 50\)"):
      _make(self.folder).load(like)

  def test_arrays_of_another_number_are_damage(self):
    _save(_make(self.folder), 50)
    with self.assertRaisesRegex(checkpoints.CheckpointError, "5 arrays, not 4"):
      _make(self.folder).load(_arrays(0)[:-1])

  def test_earlier_versions_checkpoint_is_taken_if_accepted(self):
    _save(_make(self.folder), 50)
    self._assert_loads(50, _make(self.folder, versions=({}, _VERSIONS)))

  def test_the_last_ones_are_kept(self):
    _save(_make(self.folder, kept=3), 10, 20, 30, 40)
    names = [int(p.name) for p in _path(self.folder, 0).parent.iterdir()]
    self.assertCountEqual(names, [20, 30, 40])

  def test_remove_leaves_nothing(self):
    made = _make(self.folder)
    _save(made, 10)
    made.remove()
    self.assertEqual(list(self.folder.iterdir()), [])

  def test_due_after_samples(self):
    made = _make(self.folder, samples=20)
    self.assertEqual([made.is_due(n) for n in (19, 20)], [False, True])
    _save(made, 20)
    self.assertEqual([made.is_due(n) for n in (39, 40)], [False, True])

  def test_due_after_minutes(self):
    made = _make(self.folder, minutes=2.0)
    now = time.monotonic()
    with mock.patch.object(time, "monotonic") as clock:
      clock.return_value = now + 115
      self.assertFalse(made.is_due(1))
      clock.return_value = now + 125
      self.assertTrue(made.is_due(1))

  def test_never_due_without_an_interval(self):
    self.assertFalse(_make(self.folder).is_due(10**9))

  def test_interrupted_run_saves_and_ends(self):
    made = _make(self.folder, is_interrupted=lambda: True)
    self.assertTrue(made.is_due(10))
    with self.assertRaisesRegex(interruption.Interrupted, "sample 10 of pb"):
      _save(made, 10)
    self._assert_loads(10)

  def test_full_disk_is_a_warning_and_the_one_before_stands(self):
    made = _make(self.folder)
    _save(made, 50)
    full = OSError(28, "No space left on device")
    with (
      mock.patch.object(os, "fsync", side_effect=full),
      self.assertLogs(level="WARNING") as logs,
    ):
      _save(made, 100)
    self.assertIn("No space left", logs.output[0])
    self._assert_loads(50)

  def test_full_disk_at_the_end_is_said(self):
    made = _make(self.folder, is_interrupted=lambda: True)
    with (
      mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left")),
      self.assertLogs(level="WARNING"),
      self.assertRaisesRegex(interruption.Interrupted, "could not be saved"),
    ):
      _save(made, 100)

  def test_too_little_room_is_an_error_with_its_size(self):
    made = _make(self.folder, kept=2)
    for free, is_refused in ((2_999_999, True), (3_000_000, False)):
      with mock.patch.object(
        shutil, "disk_usage", return_value=mock.Mock(free=free)
      ):
        if is_refused:
          with self.assertRaisesRegex(
            checkpoints.CheckpointError, "3 checkpoints of 1.0 MB"
          ):
            made.check_room(10**6)
        else:
          made.check_room(10**6)


if __name__ == "__main__":
  absltest.main()
