"""Data: whole sets of real images in memory, and how they are drawn.

`load` reads a set once and normalises it; it then lives on the device, and a
run draws from it by index: `epoch_order` samples without replacement, and
`batch_function` makes the `batch_fn` of `pbp_jax.Simulator` that looks the
index up, and augments, inside the compiled scan.

`digits` (1797 real 8x8 images) comes inside scikit-learn and needs no network.
`mnist` and `cifar10` are read with tensorflow-datasets from prepared
array_record files (`prepared_data`), which needs no TensorFlow; preparing them
does. `imagenet2012` is streamed (`imagenet`).
"""

from collections.abc import Callable
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import imagenet, prepared_data

# Names of tensorflow-datasets, with their number of classes.
_TFDS_CLASSES = {"mnist": 10, "cifar10": 10}

NAMES = ("digits", *_TFDS_CLASSES, "imagenet2012")

# The split of digits is part of its definition: every result depends on it.
_DIGITS_TRAIN = 1437
_DIGITS_SEED = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """A set of labelled images, in memory, split into training and test.

  Attributes:
    name: The name it was loaded by.
    train_images: Float32 `[num_train, height, width, channels]`, normalised
      by each channel's mean and standard deviation over the training split.
    train_labels: Int32 `[num_train]`.
    test_images: Float32 `[num_test, height, width, channels]`, normalised by
      the *training* split's numbers.
    test_labels: Int32 `[num_test]`.
    num_classes: Number of classes; labels are `0 .. num_classes - 1`.

  Raises:
    ValueError: If an array is not as described, or a pixel is not finite.
  """

  name: str
  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray
  num_classes: int

  def __post_init__(self):
    for split in ("train", "test"):
      images, labels = (
        np.asarray(getattr(self, f"{split}_{part}"))
        for part in ("images", "labels")
      )
      shape = (len(images), *np.shape(self.train_images)[1:])
      if images.ndim != 4 or images.shape != shape or not images.size:
        raise ValueError(
          f"{split}_images must be [images, height, width, channels], at least"
          f" one and all splits' alike, got shape {images.shape}."
        )
      if images.dtype != np.float32:
        raise ValueError(f"{split}_images must be float32, got {images.dtype}.")
      if labels.shape != images.shape[:1] or labels.dtype != np.int32:
        raise ValueError(
          f"{split}_labels must be int32 of shape {images.shape[:1]}, one for"
          f" each image, got {labels.dtype} of shape {labels.shape}."
        )
      is_finite = np.isfinite(images).all((1, 2, 3))
      if not is_finite.all():
        raise ValueError(
          f"{split}_images must be finite, image {is_finite.argmin()} is not."
        )
      is_known = (labels >= 0) & (labels < self.num_classes)
      if not is_known.all():
        raise ValueError(
          f"{split}_labels must be from 0 to {self.num_classes - 1}, got"
          f" {labels[is_known.argmin()]} for image {is_known.argmin()}."
        )

  # Whether the device holds the whole set.
  is_resident = True

  @property
  def num_train(self) -> int:
    """Images of the training split."""
    return len(self.train_images)

  @property
  def num_test(self) -> int:
    """Images of the test split."""
    return len(self.test_images)

  def read(
    self, indices: np.ndarray
  ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """All images and labels, and where in them are those of the indices.

    Args:
      indices: Ints; the training split from 0, then the test split.

    Returns:
      Arrays for `batch_function`, and the indices.
    """
    images = np.concatenate([self.train_images, self.test_images])
    labels = np.concatenate([self.train_labels, self.test_labels])
    return (images, labels), indices

  def batch_function(
    self, arrays: tuple[jax.Array, jax.Array], augment: bool = False
  ) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """As the function of this name, of the arrays of `read`."""
    return batch_function(*arrays, augment)

  @property
  def example_shape(self) -> tuple[int, int, int]:
    """Height, width and channels of one image."""
    return self.train_images.shape[1:]

  @property
  def example(self) -> np.ndarray:
    """Zeros shaped like one micro-batch of one image, `[1, H, W, C]`."""
    return np.zeros((1, *self.example_shape), np.float32)


# What experiments train on.
Images = Dataset | imagenet.ImageNet


def load(name: str, data_dir: str | os.PathLike | None = None) -> Images:
  """Loads a set of images, normalised by its training split.

  Args:
    name: One of `digits`, `mnist`, `cifar10`, `imagenet2012`.
    data_dir: Folder of prepared tensorflow-datasets; None is that package's
      default, `~/tensorflow_datasets`. `digits` doesn't use it.

  Returns:
    The set; ImageNet is streamed, the others are in memory.

  Raises:
    ValueError: If the name is none of these, or the set isn't prepared under
      `data_dir`; the message holds the command that prepares it.

  Example:
    >>> from pbp_jax import data
    >>> digits = data.load("digits")
    >>> digits.train_images.shape, digits.test_images.shape
    ((1437, 8, 8, 1), (360, 8, 8, 1))
    >>> print(f"{abs(digits.train_images.mean()):.3f}")
    0.000
  """
  if name == "digits":
    return _normalised(name, *_digits(), num_classes=10)
  if name in _TFDS_CLASSES:
    splits = prepared_data.read(name, data_dir)
    return _normalised(name, *splits, num_classes=_TFDS_CLASSES[name])
  if name == "imagenet2012":
    return imagenet.load(data_dir)
  raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")


def epoch_order(key: jax.Array, num_examples: int) -> jax.Array:
  """Draws the order of one epoch: every example once.

  Args:
    key: A key; another epoch takes another one.
    num_examples: Size of the training split, at least 1. Static.

  Returns:
    Int32 `[num_examples]`, a permutation of `0 .. num_examples - 1`.

  Raises:
    ValueError: If `num_examples` is below 1.

  Example:
    >>> import jax
    >>> from pbp_jax import data
    >>> order = data.epoch_order(jax.random.key(0), 5)
    >>> sorted(order.tolist())
    [0, 1, 2, 3, 4]
  """
  if num_examples < 1:
    raise ValueError(f"num_examples must be at least 1, got {num_examples}.")
  return jax.random.permutation(key, num_examples)


def augment(key: jax.Array, images: jax.Array, padding: int = 4) -> jax.Array:
  """Shifts each image by a random crop of its padded self, and may flip it.

  Each image is padded by `padding` zeros on every side (zero is the training
  mean after `load`), cropped to its own size at a place drawn uniformly from
  the `(2 padding + 1)²` possible ones, and mirrored left to right with
  probability one half. Plain jnp, so it runs inside a jitted scan.

  Args:
    key: A key.
    images: `[num_images, height, width, channels]`.
    padding: Zeros added on each side, at least 0. Static.

  Returns:
    Images of the same shape.

  Raises:
    ValueError: If `images` hasn't four axes or `padding` is negative.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from pbp_jax import data
    >>> data.augment(jax.random.key(0), jnp.ones((1, 32, 32, 3))).shape
    (1, 32, 32, 3)
  """
  if images.ndim != 4:
    raise ValueError(
      "images must have four axes (image, height, width, channel), got shape"
      f" {images.shape}."
    )
  if padding < 0:
    raise ValueError(f"padding must be at least 0, got {padding}.")

  def augment_one(key, image):
    key_crop, key_flip = jax.random.split(key)
    sides = (padding, padding)
    padded = jnp.pad(image, (sides, sides, (0, 0)))
    row, column = jax.random.randint(key_crop, (2,), 0, 2 * padding + 1)
    cropped = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    flip = jax.random.bernoulli(key_flip)
    return jnp.where(flip, cropped[:, ::-1], cropped)

  return jax.vmap(augment_one)(jax.random.split(key, len(images)), images)


def batch_function(
  images: jax.Array, labels: jax.Array, augment_images: bool = False
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Makes a `batch_fn` that looks micro-batches up by index.

  Pass it to `pbp_jax.Simulator(batch_fn=...)` and run the simulator on indices
  instead of images: `inputs` and `targets` are then the same int array,
  `[num_micro_batches, micro_batch_size]`.

  Args:
    images: `[num_images, height, width, channels]`, on the device.
    labels: `[num_images]`.
    augment_images: Whether to `augment` each image it looks up, with the
      micro-batch's key.

  Returns:
    `batch_fn(key, inputs_i, targets_i) -> (images, labels)`, both with a
    leading axis of the micro-batch's size.

  Raises:
    ValueError: If there are not as many images as labels.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from pbp_jax import data
    >>> images = jnp.arange(3.0).reshape(3, 1, 1, 1)
    >>> batch_fn = data.batch_function(images, jnp.array([7, 8, 9]))
    >>> index = jnp.array([2])
    >>> image, label = batch_fn(jax.random.key(0), index, index)
    >>> float(image.item()), int(label.item())
    (2.0, 9)
  """
  if len(images) != len(labels):
    raise ValueError(
      f"images and labels must be equally many, got {len(images)} images and"
      f" {len(labels)} labels."
    )

  def batch_fn(key, inputs_i, targets_i):
    batch = images[inputs_i]
    if augment_images:
      batch = augment(key, batch)
    return batch, labels[targets_i]

  return batch_fn


def _normalised(
  name: str,
  train: prepared_data.Split,
  test: prepared_data.Split,
  num_classes: int,
) -> Dataset:
  mean, deviation = _channel_statistics(train[0])

  def scale(images):
    scaled = images.astype(np.float32)
    scaled -= mean.astype(np.float32)
    scaled /= deviation.astype(np.float32)
    return scaled

  return Dataset(
    name=name,
    train_images=scale(train[0]),
    train_labels=train[1].astype(np.int32),
    test_images=scale(test[0]),
    test_labels=test[1].astype(np.int32),
    num_classes=num_classes,
  )


def _channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean and standard deviation of each channel, `[C]`, in float64."""
  total = total_square = np.zeros(images.shape[1:])
  # By blocks: the set in float64 would take eight times its memory.
  for start in range(0, len(images), 1000):
    block = images[start : start + 1000].astype(np.float64)
    total = total + block.sum(0)
    total_square = total_square + np.square(block, out=block).sum(0)
  mean = total.mean((0, 1)) / len(images)
  mean_square = total_square.mean((0, 1)) / len(images)
  return mean, np.sqrt(mean_square - mean**2)


def _digits() -> tuple[prepared_data.Split, prepared_data.Split]:
  from sklearn import datasets  # slow to import

  images, labels = datasets.load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8, 1)
  order = np.random.default_rng(_DIGITS_SEED).permutation(len(images))
  train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
  return (images[train], labels[train]), (images[test], labels[test])
