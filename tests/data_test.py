import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds

from pbp_jax import data, prepared_data

_PREPARED = pathlib.Path(__file__).parents[2] / "shared" / "data" / "tfds"


class DigitsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.digits = data.load("digits")

  def test_split_is_1437_and_360_of_8x8_images(self):
    self.assertEqual(self.digits.train_images.shape, (1437, 8, 8, 1))
    self.assertEqual(self.digits.test_images.shape, (360, 8, 8, 1))

  def test_split_is_a_partition_of_the_whole_set(self):
    from sklearn import datasets

    ours = np.concatenate([self.digits.train_images, self.digits.test_images])
    ours = np.unique(ours.reshape(1797, 64), axis=0)
    theirs = np.unique(datasets.load_digits().data, axis=0)
    self.assertLen(ours, len(theirs))

  def test_split_is_the_same_at_every_call(self):
    again = data.load("digits")
    np.testing.assert_array_equal(again.train_images, self.digits.train_images)
    np.testing.assert_array_equal(again.test_labels, self.digits.test_labels)

  def test_every_class_is_in_both_splits(self):
    for labels in (self.digits.train_labels, self.digits.test_labels):
      self.assertEqual(set(labels.tolist()), set(range(10)))

  def test_images_still_belong_to_their_labels(self):
    # The nearest training image has the right label for nearly all (1-NN).
    train = self.digits.train_images.reshape(1437, 64)
    test = self.digits.test_images.reshape(360, 64)
    distance = ((test[:, None] - train[None]) ** 2).sum(-1)
    guess = self.digits.train_labels[distance.argmin(-1)]
    self.assertGreater((guess == self.digits.test_labels).mean(), 0.95)

  def test_training_split_is_normalised(self):
    images = self.digits.train_images.astype(np.float64)
    self.assertEqual(self.digits.train_images.dtype, np.float32)
    np.testing.assert_allclose(images.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(images.std((0, 1, 2)), 1, atol=1e-6)

  def test_test_split_is_normalised_by_the_training_splits_numbers(self):
    # Zero ink is the darkest pixel of both splits, so it maps to one value.
    self.assertEqual(
      self.digits.test_images.min(), self.digits.train_images.min()
    )

  def test_example_is_one_micro_batch_of_one_image(self):
    self.assertEqual(self.digits.example_shape, (8, 8, 1))
    self.assertEqual(self.digits.example.shape, (1, 8, 8, 1))
    self.assertEqual(self.digits.example.dtype, np.float32)


class LoadErrorsTest(parameterized.TestCase):
  def test_unknown_name_lists_what_exists(self):
    with self.assertRaisesRegex(
      ValueError, "digits, mnist, cifar10, imagenet2012, got 'digit'"
    ):
      data.load("digit")

  @parameterized.named_parameters(
    ("mnist", "mnist"),
    ("cifar10", "cifar10"),
  )
  def test_unprepared_set_names_the_command_that_prepares_it(self, name):
    folder = tempfile.mkdtemp()
    with self.assertRaises(ValueError) as caught:
      data.load(name, folder)
    self.assertIn(
      prepared_data.prepare_command(name, folder), str(caught.exception)
    )

  def test_prepare_command_installs_an_extra_that_exists(self):
    command = prepared_data.prepare_command("mnist", "folder")
    pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    self.assertIn("sh .ci/setup prepare &&", command)
    self.assertIn('\nprepare = ["tensorflow', pyproject.read_text())

  def test_prepare_command_is_python_that_prepares_what_load_reads(self):
    program = prepared_data.prepare_command("mnist", "folder").split('"')[1]
    with mock.patch.object(tfds, "builder") as builder:
      exec(program)
    builder.assert_called_once_with(
      "mnist", data_dir="folder", file_format="array_record"
    )
    builder.return_value.download_and_prepare.assert_called_once_with()

  def test_missing_reader_names_what_to_install(self):
    with (
      mock.patch.dict(sys.modules, {"tensorflow_datasets": None}),
      self.assertRaisesRegex(ValueError, "pip install -e ."),
    ):
      data.load("mnist")


class TfdsTest(parameterized.TestCase):
  """Reading through tfds: mocked records, and the real ones if at hand."""

  @parameterized.named_parameters(
    ("mnist", "mnist", (28, 28, 1)),
    ("cifar10", "cifar10", (32, 32, 3)),
  )
  def test_mocked_set_has_its_shapes(self, name, shape):
    with tfds.testing.mock_data(num_examples=12):
      dataset = data.load(name, tempfile.mkdtemp())
    self.assertEqual(dataset.train_images.shape, (12, *shape))
    self.assertEqual(dataset.test_images.shape, (12, *shape))
    self.assertEqual(dataset.train_labels.dtype, np.int32)
    self.assertEqual(dataset.num_classes, 10)

  def test_channels_are_normalised_apart(self):
    with tfds.testing.mock_data(num_examples=12):
      dataset = data.load("cifar10", tempfile.mkdtemp())
    images = dataset.train_images.astype(np.float64)
    np.testing.assert_allclose(images.mean((0, 1, 2)), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(images.std((0, 1, 2)), np.ones(3), atol=1e-6)

  def test_reading_needs_no_tensorflow(self):
    with tfds.testing.mock_data(num_examples=3):
      data.load("mnist", tempfile.mkdtemp())
    self.assertNotIn("tensorflow", sys.modules)

  @parameterized.named_parameters(
    ("mnist", "mnist", 60_000, (0.1307,), (0.3081,)),
    (
      "cifar10",
      "cifar10",
      50_000,
      (0.49140, 0.48216, 0.44653),
      (0.24703, 0.24349, 0.26159),
    ),
  )
  def test_real_set_has_the_known_mean_and_deviation(
    self, name, num_train, mean, deviation
  ):
    """Of every thirtieth image; of all with `PBP_LONG=1`."""
    if not (_PREPARED / name).is_dir():
      self.skipTest(f"{name} isn't prepared in ../shared/data/tfds")
    whole = prepared_data.sources(name, _PREPARED, ("train", "test"))
    self.assertEqual([len(split) for split in whole], [num_train, 10_000])
    stride = 1 if "PBP_LONG" in os.environ else 30
    some = [
      _Records(split[i] for i in range(0, len(split), stride))
      for split in whole
    ]
    for split in some:
      split.dataset_info = mock.Mock(data_dir=tempfile.mkdtemp())
    with mock.patch.object(prepared_data, "sources", return_value=some):
      images = data.load(name, _PREPARED).train_images
    self.assertLen(images, num_train // stride + (num_train % stride > 0))
    # A black and a white pixel are where the mean and deviation put them.
    black, white = images.min((0, 1, 2)), images.max((0, 1, 2))
    got_deviation = 1 / (white - black)
    got_mean = -black * got_deviation
    # Four standard errors, as images (not pixels) are drawn independently,
    # and the last digit to which the whole set's numbers are known.
    share = 4 * np.sqrt((1 - 1 / stride) / len(images))
    mean_error = share * images.mean((1, 2)).std(0) * deviation
    deviation_error = share * (images**2).mean((1, 2)).std(0) * deviation / 2
    np.testing.assert_array_less(
      np.abs(got_mean - mean), mean_error + 1e-3 * np.asarray(mean)
    )
    np.testing.assert_array_less(
      np.abs(got_deviation - deviation),
      deviation_error + 1e-3 * np.asarray(deviation),
    )


class _Records(list):
  """Stands in for a data source of tfds."""


class CacheTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.cache = pathlib.Path(tempfile.mkdtemp())
    self.enter_context(
      mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.cache)})
    )
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.record = self.folder / "mnist-train.array_record-00000-of-00001"
    self.record.write_bytes(b"first")

  def _load(self, num_examples):
    """Loads records made here, which say that they lie in `self.folder`."""
    source = _Records(
      {"image": np.full((28, 28, 1), i, np.uint8), "label": i}
      for i in range(num_examples)
    )
    source.dataset_info = mock.Mock(data_dir=str(self.folder))
    with mock.patch.object(tfds, "data_source", return_value=source):
      return data.load("mnist", self.folder)

  def _cached_files(self):
    return list((self.cache / "pbp_jax").glob("mnist-*.npz"))

  def test_second_load_reads_the_cache(self):
    first = self._load(4)
    second = self._load(7)
    self.assertLen(self._cached_files(), 1)
    np.testing.assert_array_equal(first.train_images, second.train_images)

  def test_changed_files_are_decoded_anew(self):
    self._load(4)
    self.record.write_bytes(b"another")
    self.assertLen(self._load(7).train_images, 7)

  def test_damaged_cache_is_made_anew(self):
    self._load(4)
    (cached,) = self._cached_files()
    cached.write_bytes(cached.read_bytes()[:100])
    self.assertLen(self._load(7).train_images, 7)
    self.assertLen(self._load(9).train_images, 7)


class EpochOrderTest(parameterized.TestCase):
  def test_every_example_comes_once(self):
    order = data.epoch_order(jax.random.key(0), 100)
    np.testing.assert_array_equal(np.sort(order), np.arange(100))

  def test_same_key_gives_the_same_order_and_another_key_another(self):
    first, again, other = (
      data.epoch_order(jax.random.key(seed), 100) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    self.assertFalse(np.array_equal(first, other))

  def test_seeds_can_be_vmapped(self):
    keys = jax.random.split(jax.random.key(0), 3)
    orders = jax.vmap(lambda key: data.epoch_order(key, 10))(keys)
    np.testing.assert_array_equal(orders[1], data.epoch_order(keys[1], 10))

  def test_an_empty_set_is_refused(self):
    with self.assertRaisesRegex(ValueError, "num_examples must be .* got 0"):
      data.epoch_order(jax.random.key(0), 0)


class AugmentTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    # Every pixel is known by its value; no value is the padding's zero.
    self.image = 1.0 + jnp.arange(64.0).reshape(1, 8, 8, 1)

  def _views(self, padding):
    """All crops of the padded image and their mirror images, by brute force."""
    padded = np.pad(
      np.asarray(self.image[0]), ((padding,) * 2, (padding,) * 2, (0, 0))
    )
    places = range(2 * padding + 1)
    crops = [padded[r : r + 8, c : c + 8] for r in places for c in places]
    return {x.tobytes() for crop in crops for x in (crop, crop[:, ::-1].copy())}

  def _draw(self, padding, num_draws=400):
    keys = jax.random.split(jax.random.key(0), num_draws)
    draw = jax.jit(jax.vmap(lambda key: data.augment(key, self.image, padding)))
    return {np.asarray(x[0]).tobytes() for x in draw(keys)}

  def test_draws_are_all_the_crops_and_flips_and_nothing_else(self):
    self.assertEqual(self._draw(padding=1), self._views(padding=1))

  def test_default_padding_is_four(self):
    keys = jax.random.split(jax.random.key(1), 200)
    images = jax.jit(jax.vmap(lambda key: data.augment(key, self.image)))(keys)
    drawn = {np.asarray(x[0]).tobytes() for x in images}
    self.assertLessEqual(drawn, self._views(padding=4))
    self.assertFalse(drawn <= self._views(padding=3))

  def test_images_of_a_batch_are_drawn_apart(self):
    batch = jnp.tile(self.image, (16, 1, 1, 1))
    drawn = data.augment(jax.random.key(0), batch)
    self.assertGreater(len({np.asarray(x).tobytes() for x in drawn}), 8)

  def test_wrong_shape_is_refused(self):
    with self.assertRaisesRegex(ValueError, r"four axes .* \(8, 8, 1\)"):
      data.augment(jax.random.key(0), self.image[0])

  def test_negative_padding_is_refused(self):
    with self.assertRaisesRegex(ValueError, "padding must be .* got -1"):
      data.augment(jax.random.key(0), self.image, padding=-1)


class BatchFunctionTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.images = jax.random.normal(jax.random.key(0), (6, 4, 4, 1))
    self.labels = jnp.arange(6) + 10

  def test_looks_images_and_labels_up_inside_a_jitted_scan(self):
    indices = jnp.array([[3], [0], [5]])

    @jax.jit
    def run(images, labels):
      batch_fn = data.batch_function(images, labels)
      body = lambda carry, i: (carry, batch_fn(jax.random.key(0), i, i))
      return jax.lax.scan(body, None, indices)[1]

    images, labels = run(self.images, self.labels)
    np.testing.assert_array_equal(images, self.images[indices])
    np.testing.assert_array_equal(labels, [[13], [10], [15]])

  def test_augments_with_the_micro_batchs_key(self):
    batch_fn = data.batch_function(self.images, self.labels, True)
    key, index = jax.random.key(3), jnp.array([2])
    images, _ = batch_fn(key, index, index)
    np.testing.assert_array_equal(images, data.augment(key, self.images[2:3]))

  def test_unequal_numbers_are_refused(self):
    with self.assertRaisesRegex(ValueError, "got 6 images and 5 labels"):
      data.batch_function(self.images, self.labels[:5])


class ImportTest(absltest.TestCase):
  def test_digits_needs_neither_tfds_nor_matplotlib(self):
    code = (
      "import sys; from pbp_jax import data; data.load('digits');"
      "assert not {'tensorflow_datasets', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
  absltest.main()
