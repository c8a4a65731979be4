"""ImageNet, streamed: images are decoded as a run needs them.

1.28 million images do not fit into memory as `data.Dataset` holds smaller sets.
`ImageNet` reads some of them at a time, scaled down onto canvases of one size;
cropping, mirroring and normalising happen on the device, inside the compiled
scan, from the micro-batch's key. So a run that goes on after a break sees the
same crops.

Training crops are those of Szegedy et al., "Going Deeper with Convolutions",
2014 (https://arxiv.org/abs/1409.4842), in the form that public codes use: a
share of the area from .08 to 1, an aspect ratio from 3/4 to 4/3. Evaluation
scales the shorter side to 256 and takes the central 224 pixels. Both, and the
channels' mean and deviation, are as in public codes, recalled. Two things
differ: images are scaled down to a longer side of 512 pixels before, and crops
are not rounded to whole pixels.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import prepared_data

_MEAN = np.array([[[0.485, 0.456, 0.406]]], np.float32)
_DEVIATION = np.array([[[0.229, 0.224, 0.225]]], np.float32)
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10
_CENTRAL = 224 / 256

# Canvases, heights and widths of what they hold, labels.
Arrays = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class ImageNet:
  """Labelled images of any size that are read when they are needed.

  Indices count the training split from 0, then the test split.

  Attributes:
    train: The training split: a sequence of records with `image`, uint8
      `[height, width, 3]`, and `label`.
    test: The test split (ImageNet's validation split), likewise.
    name: What the set is called.
    num_classes: Number of classes.
    image_size: Height and width of an image as a network gets it.
    canvas_size: The longer side of an image as it is kept, at most.
  """

  train: Sequence[Any]
  test: Sequence[Any]
  name: str = "imagenet2012"
  num_classes: int = 1000
  image_size: int = 224
  canvas_size: int = 512

  # Whether the device holds the whole set.
  is_resident = False

  @property
  def num_train(self) -> int:
    """Images of the training split."""
    return len(self.train)

  @property
  def num_test(self) -> int:
    """Images of the test split."""
    return len(self.test)

  @property
  def example(self) -> np.ndarray:
    """Zeros shaped like one micro-batch of one image."""
    return np.zeros((1, self.image_size, self.image_size, 3), np.float32)

  def read(self, indices: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """Reads images.

    Args:
      indices: Ints `[rows, count]` or `[count]`; equal rows are read once.

    Returns:
      Arrays for `batch_function`, and where in them the indices' images are,
      of the shape of `indices`. Both have shapes that depend on the number of
      rows that differ only.
    """
    indices = np.asarray(indices)
    rows, which = np.unique(np.atleast_2d(indices), axis=0, return_inverse=True)
    positions = np.arange(rows.size).reshape(rows.shape)[which.ravel()]
    # Decoding and scaling release Python's lock, and tfds reads by threads.
    with futures.ThreadPoolExecutor() as threads:
      kept = list(threads.map(self._kept, rows.ravel().tolist()))
    canvases, sizes, labels = zip(*kept, strict=True)
    arrays = (
      np.stack(canvases),
      np.array(sizes, np.int32),
      np.array(labels, np.int32),
    )
    return arrays, positions.reshape(indices.shape).astype(np.int32)

  def batch_function(
    self, arrays: Arrays, augment: bool = False
  ) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Makes a `batch_fn` that crops, and looks up by position.

    Args:
      arrays: From `read`, on the device.
      augment: Whether to crop and mirror at random, rather than centrally.

    Returns:
      As `data.batch_function`.
    """
    canvases, sizes, labels = arrays

    def image(key, canvas, size):
      key_box, key_flip = jax.random.split(key)
      box = random_box(key_box, size) if augment else central_box(size)
      cropped = crop(canvas.astype(jnp.float32) / 255, box, self.image_size)
      if augment:
        flip = jax.random.bernoulli(key_flip)
        cropped = jnp.where(flip, cropped[:, ::-1], cropped)
      return (cropped - _MEAN) / _DEVIATION

    def batch_fn(key, inputs_i, targets_i):
      keys = jax.random.split(key, len(inputs_i))
      images = jax.vmap(image)(keys, canvases[inputs_i], sizes[inputs_i])
      return images, labels[targets_i]

    return batch_fn

  def _kept(self, index: int) -> tuple[np.ndarray, tuple[int, int], int]:
    """A record's canvas, its image's height and width, and its label."""
    is_train = index < self.num_train
    record = (
      self.train[index] if is_train else self.test[index - self.num_train]
    )
    return *self._on_canvas(record["image"]), record["label"]

  def _on_canvas(self, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """An image at the top left of a canvas, and its height and width."""
    factor = self.canvas_size / max(image.shape[:2])
    if factor < 1:
      from PIL import Image  # slow to import

      height, width = (max(1, round(n * factor)) for n in image.shape[:2])
      image = np.asarray(
        Image.fromarray(image).resize(
          (width, height), Image.Resampling.BILINEAR
        )
      )
    height, width = image.shape[:2]
    margins = ((0, self.canvas_size - height), (0, self.canvas_size - width))
    # Edges go on, so that a crop at an edge mixes with nothing foreign.
    return np.pad(image, (*margins, (0, 0)), mode="edge"), (height, width)


def load(data_dir: Any = None) -> ImageNet:
  """Opens the prepared set.

  Args:
    data_dir: As in `data.load`. Preparing needs the archives that
      image-net.org hands out, in `downloads/manual` under this folder.

  Returns:
    The set; nothing is read yet.

  Raises:
    ValueError: If it isn't prepared.
  """
  train, test = prepared_data.sources(
    "imagenet2012", data_dir, ("train", "validation")
  )
  return ImageNet(train, test)


def central_box(size: jax.Array) -> jax.Array:
  """The box of evaluation: central, 224 / 256 of the shorter side.

  Args:
    size: Height and width of an image.

  Returns:
    Top, left, height and width of the box.

  Example:
    >>> import jax.numpy as jnp
    >>> print(central_box(jnp.array([256, 512])))
    [ 16. 144. 224. 224.]
  """
  side = _CENTRAL * size.min()
  return jnp.concatenate([(size - side) / 2, jnp.stack([side, side])])


def random_box(key: jax.Array, size: jax.Array) -> jax.Array:
  """The box of training: some share of the area, some aspect ratio.

  Ten boxes are drawn, area uniformly in .08 to 1 of the image's, the logarithm
  of width over height uniformly between those of 3/4 and 4/3; the first that
  fits in is placed uniformly. If none fits, the box is the largest central one
  of an allowed ratio.

  Args:
    key: A key.
    size: Height and width of an image.

  Returns:
    Top, left, height and width of the box.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> top, left, height, width = random_box(
    ...   jax.random.key(0), jnp.array([100, 200]))
    >>> bool((top >= 0) & (top + height <= 100) & (left + width <= 200))
    True
  """
  key_area, key_ratio, key_place = jax.random.split(key, 3)
  size = size.astype(jnp.float32)
  share = jax.random.uniform(
    key_area, (_ATTEMPTS,), minval=_AREA[0], maxval=_AREA[1]
  )
  ratio = jnp.exp(
    jax.random.uniform(
      key_ratio,
      (_ATTEMPTS,),
      minval=math.log(_RATIO[0]),
      maxval=math.log(_RATIO[1]),
    )
  )
  area = share * size[0] * size[1]
  boxes = jnp.stack([jnp.sqrt(area / ratio), jnp.sqrt(area * ratio)], axis=1)
  fits = (boxes <= size[None]).all(1)
  whole = jnp.stack(
    [
      jnp.minimum(size[0], size[1] / _RATIO[0]),
      jnp.minimum(size[1], size[0] * _RATIO[1]),
    ]
  )
  box = jnp.where(fits.any(), boxes[fits.argmax()], whole)
  place = jnp.where(fits.any(), jax.random.uniform(key_place, (2,)), 0.5)
  return jnp.concatenate([place * (size - box), box])


def crop(image: jax.Array, box: jax.Array, size: int) -> jax.Array:
  """Cuts a box out and scales it, linearly and without aliasing.

  Args:
    image: `[height, width, channels]`, floating.
    box: Top, left, height and width, in pixels, not whole ones perhaps.
    size: Height and width of the result. Static.

  Returns:
    `[size, size, channels]`.

  Example:
    >>> import jax.numpy as jnp
    >>> image = jnp.arange(16.0).reshape(4, 4, 1)
    >>> print(crop(image, jnp.array([1.0, 2.0, 2.0, 2.0]), 2)[..., 0])
    [[ 6.  7.]
     [10. 11.]]
  """
  scale = size / box[2:]
  return jax.image.scale_and_translate(
    image,
    (size, size, image.shape[2]),
    (0, 1),
    scale,
    -box[:2] * scale,
    method="linear",
    antialias=True,
  )
