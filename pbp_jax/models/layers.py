"""Layers and small functions that several model families are made of."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from pbp_jax import stages
from pbp_jax.models import convolution, normalization, online_normalization

NORMALIZATIONS = ("group", "layer", "online", "none")


def he_normal(
  key: jax.Array, shape: Sequence[int], dtype: jax.typing.DTypeLike = float
) -> jax.Array:
  """Draws a convolution kernel from a normal distribution, by fan-out.

  The variance is 2 / (height * width * features), not truncated: He et al.,
  "Delving Deep into Rectifiers", 2015, equation 14, as in the public ResNet
  and VGG codes (recalled). The numbers are those of
  `jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")`, drawn as a
  vector: XLA takes ten times as long to compile a draw of four dimensions.

  Args:
    key: A key.
    shape: (height, width, channels, features).
    dtype: The type of the result.

  Returns:
    The kernel.
  """
  std = math.sqrt(2 / (math.prod(shape[:-2]) * shape[-1]))
  return std * jax.random.normal(key, (math.prod(shape),), dtype).reshape(shape)


def linear_uniform(
  key: jax.Array, shape: Sequence[int], dtype: jax.typing.DTypeLike = float
) -> jax.Array:
  """Draws a matrix uniformly from +-1/sqrt(inputs), PyTorch's default.

  Args:
    key: A key.
    shape: (inputs, features).
    dtype: The type of the result.

  Returns:
    The matrix.
  """
  bound = 1 / math.sqrt(shape[0])
  matrix = jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound)
  return matrix.reshape(shape)


def conv(
  features: int,
  kernel_size: int,
  strides: int = 1,
  use_bias: bool = False,
  name: str | None = None,
) -> nn.Conv:
  """A square convolution with zero padding of half its size.

  Args:
    features: Number of output channels.
    kernel_size: Height and width of the kernel.
    strides: Vertical and horizontal stride.
    use_bias: Whether to add a bias, zero at first.
    name: Name of the linen module.

  Returns:
    A linen module, initialised by `he_normal`, that computes with
    `convolution.conv_general_dilated`.
  """
  return nn.Conv(
    features,
    (kernel_size, kernel_size),
    (strides, strides),
    padding=kernel_size // 2,
    use_bias=use_bias,
    kernel_init=he_normal,
    conv_general_dilated=convolution.conv_general_dilated,
    name=name,
  )


def linear(features: int, name: str | None = None) -> nn.Dense:
  """A dense layer initialised by `linear_uniform`, its bias by zero."""
  return nn.Dense(features, kernel_init=linear_uniform, name=name)


class NormRelu(nn.Module):
  """Normalisation, then ReLU.

  Attributes:
    normalization: "group", "layer" (one group), "online" or "none".
    num_groups: Number of groups of "group".
  """

  normalization: str
  num_groups: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies both to x, of shape (batch, ..., channels)."""
    match self.normalization:
      case "group":
        x = normalization.GroupNorm(self.num_groups)(x)
      case "layer":
        x = normalization.GroupNorm(1)(x)
      case "online":
        x = online_normalization.OnlineNorm()(x)
    return nn.relu(x)


class InputConv(nn.Module):
  """The first convolution of a model, which checks what it is given.

  Attributes:
    make_conv: Makes the convolution.
    model: What the error calls the model.
  """

  make_conv: Callable[[], nn.Conv]
  model: str

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Convolves x, of shape (batch, height, width, channels)."""
    if x.ndim != 4:
      raise ValueError(
        f"inputs of a {self.model} must have the shape (batch, height, width,"
        f" channels), got {x.shape}."
      )
    return self.make_conv()(x)


def flatten(x: jax.Array) -> jax.Array:
  """Makes each sample a vector: (batch, ...) to (batch, features)."""
  return x.reshape(x.shape[0], -1)


def global_average_pool(x: jax.Array) -> jax.Array:
  """The mean over positions: (batch, height, width, c) to (batch, c)."""
  return x.mean(axis=(1, 2))


def max_pool(x: jax.Array) -> jax.Array:
  """The maximum over 2x2 windows, with stride 2.

  The maximum of four strided slices: the gradient of `flax.linen.max_pool` is
  slow on a CPU. Where several pixels of a window are equal to the maximum they
  share the gradient; linen gives it to the first.

  Args:
    x: Images of shape (batch, height, width, channels). At an odd size the
      last row or column stands alone.

  Returns:
    An array of shape (batch, ceil(height / 2), ceil(width / 2), channels).

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax.models import layers
    >>> x = jnp.arange(12.0).reshape(1, 3, 4, 1)
    >>> print(layers.max_pool(x)[0, :, :, 0])
    [[ 5.  7.]
     [ 9. 11.]]
  """
  for axis in (1, 2):
    if x.shape[axis] % 2:
      padding = [(0, 0, 0)] * 4
      padding[axis] = (0, 1, 0)
      x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), padding)
  rows = jnp.maximum(x[:, ::2], x[:, 1::2])
  return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])


def loss(x: jax.Array) -> jax.Array:
  """The last stage of every model: an identity that stands for the loss."""
  return x


def count_groups(width: int, normalization: str, group_size: int) -> int:
  """The number of groups, or an error.

  Args:
    width: Channels of the first convolution.
    normalization: What the caller was given.
    group_size: Channels of a group at the first width.

  Returns:
    `width / group_size`. The paper keeps the number of groups, so the group
    size doubles with the channels.

  Raises:
    ValueError: If an argument isn't positive, `width` isn't a multiple of the
      group size, or `normalization` is unknown.
  """
  if normalization not in NORMALIZATIONS:
    raise ValueError(
      f"normalization must be one of {', '.join(NORMALIZATIONS)}, got "
      f"{normalization!r}."
    )
  if group_size < 1:
    raise ValueError(f"group_size must be positive, got {group_size}.")
  if width < 1 or width % group_size:
    raise ValueError(
      f"width must be a positive multiple of group_size={group_size}, got"
      f" {width}."
    )
  return width // group_size


def pipeline(
  nodes: Sequence[Any], normalization: str
) -> tuple[stages.Stage, ...]:
  """Makes the stages of a model of its nodes.

  Args:
    nodes: What `as_stages` takes.
    normalization: With "online" every linen module keeps a state.

  Returns:
    The stages.
  """
  if normalization == "online":
    nodes = [
      stages.stateful_stage(node) if isinstance(node, nn.Module) else node
      for node in nodes
    ]
  return stages.as_stages(nodes)
