"""Streamed images: crops against NumPy, and a run on mocked records."""

import math
import pathlib
import threading
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import tensorflow_datasets as tfds

from experiments import replicas, studies, study_list, study_settings
from pbp_jax import data, imagenet, prepared_data


def _record(value, shape=(40, 30), label=0):
  return {"image": np.full((*shape, 3), value, np.uint8), "label": label}


def _set(train, test=(), **options):
  return imagenet.ImageNet(train, test, **options)


def _boxes(size, count=2000):
  keys = jax.random.split(jax.random.key(0), count)
  box = jax.jit(jax.vmap(imagenet.random_box, (0, None)))
  return np.asarray(box(keys, jnp.array(size)))


def _published_box(rng, height, width):
  """The loop of public codes: ten attempts, then the middle."""
  for _ in range(10):
    area = height * width * rng.uniform(0.08, 1)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    h, w = math.sqrt(area / ratio), math.sqrt(area * ratio)
    if h <= height and w <= width:
      return rng.uniform(0, height - h), rng.uniform(0, width - w), h, w
  h, w = height, width
  if width / height < 3 / 4:
    h = width / (3 / 4)
  elif width / height > 4 / 3:
    w = height * (4 / 3)
  return (height - h) / 2, (width - w) / 2, h, w


class BoxTest(parameterized.TestCase):
  @parameterized.parameters(((300, 300),), ((200, 400),), ((100, 380),))
  def test_boxes_are_spread_as_those_of_the_published_loop(self, size):
    ours = _boxes(size)
    rng = np.random.default_rng(0)
    theirs = np.array([_published_box(rng, *size) for _ in range(2000)])
    error = np.hypot(ours.std(0), theirs.std(0)) / math.sqrt(2000)
    difference = np.abs(ours.mean(0) - theirs.mean(0))
    np.testing.assert_array_less(difference, 4 * error + 1e-3)
    np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.08)

  def test_boxes_lie_inside_and_have_allowed_sizes_and_ratios(self):
    top, left, height, width = _boxes((200, 300)).T
    self.assertGreaterEqual(min(top.min(), left.min()), 0)
    self.assertLessEqual((top + height).max(), 200 + 1e-3)
    self.assertLessEqual((left + width).max(), 300 + 1e-3)
    share, ratio = height * width / 60_000, width / height
    self.assertBetween(share.min(), 0.08 - 1e-5, 0.09)
    # A height of 200 and the widest ratio cover 8 / 9.
    self.assertBetween(share.max(), 0.86, 8 / 9 + 1e-5)
    self.assertBetween(ratio.min(), 3 / 4 - 1e-5, 0.76)
    self.assertBetween(ratio.max(), 1.32, 4 / 3 + 1e-5)

  @parameterized.parameters(
    ((10, 1000), (0, 500 - 20 / 3, 10, 40 / 3)),
    ((1000, 10), (500 - 20 / 3, 0, 40 / 3, 10)),
  )
  def test_middle_is_taken_where_no_box_fits(self, size, expected):
    np.testing.assert_allclose(
      _boxes(size, 3), [expected] * 3, rtol=1e-5, atol=1e-4
    )


_crop = jax.jit(imagenet.crop, static_argnums=2)


class CropTest(parameterized.TestCase):
  def test_scaled_ramp_is_the_ramp_of_pixel_centres(self):
    rows, columns = np.mgrid[:40, :60].astype(np.float32)
    image = jnp.stack([rows, columns], axis=-1)
    top, left, height, width = 5.0, 7.5, 20.0, 40.0
    got = _crop(image, jnp.array([top, left, height, width]), 10)
    centres = (np.arange(10) + 0.5) / 10
    np.testing.assert_allclose(
      got[:, 0, 0], top + height * centres - 0.5, rtol=1e-5
    )
    np.testing.assert_allclose(
      got[0, :, 1], left + width * centres - 0.5, rtol=1e-5
    )

  def test_scaling_down_averages(self):
    """Every fourth column is white; eight of them become one pixel."""
    stripes = jnp.tile(jnp.array([1.0, 0.0, 0.0, 0.0]), 16)
    image = jnp.broadcast_to(stripes[None, :, None], (64, 64, 1))
    got = _crop(image, jnp.array([0.0, 0.0, 64.0, 64.0]), 8)
    np.testing.assert_allclose(got[:, 1:-1], 0.25, atol=0.01)


class ReadTest(parameterized.TestCase):
  def test_test_split_follows_the_training_split(self):
    dataset = _set([_record(1, label=5)], [_record(2, label=7)])
    (canvases, sizes, labels), positions = dataset.read(np.array([1, 0]))
    np.testing.assert_array_equal(labels[positions], [7, 5])
    np.testing.assert_array_equal(canvases[positions, 0, 0, 0], [2, 1])
    np.testing.assert_array_equal(sizes, [[40, 30]] * 2)
    self.assertEqual((dataset.num_train, dataset.num_test), (1, 1))

  def test_rows_that_are_equal_are_read_once(self):
    dataset = _set([_record(i, label=i) for i in range(6)])
    rows = np.array([[3, 1], [0, 5], [3, 1]])
    (canvases, _, labels), positions = dataset.read(rows)
    self.assertLen(canvases, 4)
    np.testing.assert_array_equal(labels[positions], rows)

  def test_records_are_decoded_side_by_side(self):
    class Records(list):
      both_are_read = threading.Barrier(2, timeout=30)

      def __getitem__(self, index):
        self.both_are_read.wait()
        return super().__getitem__(index)

    dataset = _set(Records(_record(i, label=i) for i in range(2)))
    (_, _, labels), positions = dataset.read(np.array([1, 0]))
    np.testing.assert_array_equal(labels[positions], [1, 0])

  def test_large_image_is_scaled_down_and_its_edges_go_on(self):
    image = np.zeros((1024, 300, 3), np.uint8)
    image[:, 150:] = 200
    dataset = _set([{"image": image, "label": 0}])
    (canvases, sizes, _), _ = dataset.read(np.array([0]))
    self.assertEqual(canvases.shape, (1, 512, 512, 3))
    np.testing.assert_array_equal(sizes, [[512, 150]])
    np.testing.assert_array_equal(canvases[0, :, :70], 0)
    np.testing.assert_array_equal(canvases[0, :, 80:], 200)

  def test_small_image_keeps_its_pixels(self):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 30, 3), np.uint8)
    dataset = _set([{"image": image, "label": 0}])
    (canvases, _, _), _ = dataset.read(np.array([0]))
    np.testing.assert_array_equal(canvases[0, :40, :30], image)


class BatchFunctionTest(parameterized.TestCase):
  def _batch(self, dataset, key=0, augment=False):
    arrays, positions = dataset.read(np.array([0]))
    batch_fn = dataset.batch_function(
      jax.tree.map(jnp.asarray, arrays), augment
    )
    image, _ = jax.jit(batch_fn)(jax.random.key(key), positions, positions)
    return np.asarray(image[0])

  @parameterized.parameters(False, True)
  def test_channels_are_normalised(self, augment):
    dataset = _set([_record(51)], image_size=8, canvas_size=64)
    expected = (0.2 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    image = self._batch(dataset, augment=augment)
    np.testing.assert_allclose(
      image, np.broadcast_to(expected, (8, 8, 3)), rtol=1e-4
    )

  def test_evaluation_is_the_middle_of_the_shorter_sides_256(self):
    """At a shorter side of 256 the 224 pixels in the middle, untouched."""
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (256, 300, 3), np.uint8)
    image = self._batch(_set([{"image": picture, "label": 0}]))
    expected = picture[16 : 16 + 224, 38 : 38 + 224] / 255
    np.testing.assert_allclose(
      image * imagenet._DEVIATION + imagenet._MEAN, expected, atol=1e-4
    )

  def test_half_of_the_training_images_are_mirrored(self):
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None], (64, 64, 3))
    dataset = _set([{"image": ramp, "label": 0}], image_size=8, canvas_size=64)
    arrays, _ = dataset.read(np.array([0]))
    batch_fn = dataset.batch_function(jax.tree.map(jnp.asarray, arrays), True)
    keys = jax.random.split(jax.random.key(0), 400)
    first = jnp.array([0])
    images = jax.jit(jax.vmap(lambda key: batch_fn(key, first, first)[0]))(keys)
    mirrored = np.asarray(images[:, 0, 0, 0, 0] > images[:, 0, 0, -1, 0])
    self.assertBetween(mirrored.mean(), 0.4, 0.6)

  def test_key_decides_the_crop(self):
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (64, 64, 3), np.uint8)
    dataset = _set(
      [{"image": picture, "label": 0}], image_size=8, canvas_size=64
    )
    one, again, other = (self._batch(dataset, key, True) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    self.assertGreater(np.abs(one - other).max(), 0.1)


class RunTest(absltest.TestCase):
  def test_unprepared_set_names_the_command(self):
    with self.assertRaisesRegex(ValueError, "download_and_prepare"):
      data.load("imagenet2012", self.create_tempdir().full_path)

  def test_mocked_records_train_and_are_evaluated(self):
    """The study's settings, with a network that compiles in seconds."""
    preset = study_list.STUDIES["imagenet"].grids["paper"].base
    small = {
      "model": "residual_mlp",
      "num_stages": 4,
      "width": 2,
      "max_samples": 6,
      "chunk_samples": 3,
      "accuracy_images": 4,
      "final_images": 5,
    }
    base = study_settings.Setting(
      **{
        **{f: getattr(preset, f) for f in preset.__dataclass_fields__},
        **small,
      }
    )
    grid = study_list.Grid(base=base, lines={"PB": {}}, points={"tiny": {}})
    study = study_list.Study(claim="", x_label="", grids={"paper": grid})
    folder = pathlib.Path(self.create_tempdir().full_path)
    with (
      tfds.testing.mock_data(num_examples=10),
      mock.patch.object(study_list, "STUDIES", {"imagenet": study}),
      mock.patch.object(replicas, "_EVALUATION_BLOCK", 10),
    ):
      found = studies.run(
        studies.Config(study="imagenet", scale="paper", workdir=str(folder))
      )
      train, test = prepared_data.sources(
        "imagenet2012", None, ("train", "validation")
      )
    self.assertEqual((len(train), len(test)), (10, 10))
    self.assertEqual(found["status"], "done")
    (arm,) = found["arms"].values()
    # Tiny steps on noise: the loss of a guess among a thousand.
    np.testing.assert_allclose(arm["final_loss"], math.log(1000), rtol=0.2)

  def test_preset_is_the_recipe_of_78_stages(self):
    grid = study_list.STUDIES["imagenet"].grids["paper"]
    setting = grid.settings()[("PB", "resnet50")]
    stages = study_settings.make_stages(setting, 1000)
    self.assertLen(stages, 78)
    self.assertEqual(
      (setting.learning_rate, setting.momentum, setting.reference_batch_size),
      (0.1, 0.9, 256),
    )


if __name__ == "__main__":
  absltest.main()
