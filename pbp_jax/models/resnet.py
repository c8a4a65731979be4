"""Pre-activation residual networks, one node a stage.

He et al., "Identity Mappings in Deep Residual Networks", 2016
(https://arxiv.org/abs/1603.05027), with Group Normalization and cut into
stages as in "Pipelined Backpropagation at Scale" (Kosson et al., 2021,
https://arxiv.org/abs/2003.11666): normalisation, ReLU and convolution are one
stage, the sum at the end of a block is one, and so is a projection, directly
before its block's first convolution. The residual branch travels through a
block's stages in a tuple (features, shortcut).

The stage counts are the paper's, as recalled and not verified. How the paper
cuts and initialises a projection block isn't known; here the projection of a
CIFAR network is a 1x1 convolution of the block's raw input.
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from pbp_jax import stages
from pbp_jax.models import layers


def resnet(
  depth: int = 20,
  width: int = 16,
  num_classes: int = 10,
  normalization: str = "group",
  group_size: int = 2,
) -> tuple[stages.Stage, ...]:
  """A pre-activation ResNet for CIFAR, of depth 6n + 2, in 9n + 7 stages.

  An input convolution, three groups of n basic blocks with `width`,
  `2 width` and `4 width` channels, of which the second and third halve height
  and width in their first block, a last normalisation and ReLU, the mean over
  positions, a linear layer and the loss. Depths 20, 32, 44, 56 and 110 have
  34, 52, 70, 88 and 169 stages. (`resnet50` is another network, the one for
  ImageNet.)

  Args:
    depth: Number of layers with weights, `6n + 2` with `n >= 1`.
    width: Channels of the first group, a multiple of the group size.
    num_classes: Number of outputs.
    normalization: "group", "layer" (one group), "online" (whose stages have a
      state) or "none".
    group_size: Channels of a group of "group" at the first width; the number
      of groups is the same throughout.

  Returns:
    The stages. Inputs have the shape (batch, height, width, channels), of any
    size and with any number of channels; outputs are logits.

  Raises:
    ValueError: If an argument isn't as above, or an input has another rank.

  Example:
    >>> import pbp_jax as pbp
    >>> stages = pbp.models.resnet(depth=20)
    >>> len(stages)
    34
    >>> [stage.name for stage in stages[:4]]
    ['conv', 'group1_block1_conv1', 'group1_block1_conv2', 'group1_block1_sum']
  """
  if depth < 8 or (depth - 2) % 6:
    raise ValueError(f"depth must be 6n + 2 with n >= 1, got {depth}.")
  blocks = ((depth - 2) // 6,) * 3
  return _basic_resnet(blocks, width, num_classes, normalization, group_size)


def resnet18(
  width: int = 64,
  num_classes: int = 10,
  normalization: str = "group",
  group_size: int = 2,
) -> tuple[stages.Stage, ...]:
  """A pre-activation ResNet-18 for CIFAR, in 32 stages.

  As `resnet`, with four groups of two blocks, of `width` to `8 width`
  channels: 11.2 million weights at width 64.

  Args:
    width: Channels of the first group, a multiple of the group size.
    num_classes: Number of outputs.
    normalization: As in `resnet`.
    group_size: As in `resnet`.

  Returns:
    The stages, for inputs of shape (batch, height, width, channels).

  Raises:
    ValueError: As in `resnet`.
  """
  return _basic_resnet(
    (2, 2, 2, 2), width, num_classes, normalization, group_size
  )


def resnet50(
  width: int = 64,
  num_classes: int = 1000,
  normalization: str = "group",
  group_size: int = 2,
) -> tuple[stages.Stage, ...]:
  """The pre-activation ResNet-50 for ImageNet, in 78 stages.

  A 7x7 convolution with stride 2, a 3x3 max pool with stride 2, four groups of
  3, 4, 6 and 3 bottleneck blocks, and the end of `resnet`. The first block of
  each group takes two more stages than its three convolutions and the sum: the
  normalisation and ReLU, which the projection and the first convolution share,
  and the projection. The stride is at the 3x3 convolution.

  Args:
    width: Inner channels of the first group, a multiple of the group size; its
      blocks put out `4 width` channels.
    num_classes: Number of outputs.
    normalization: As in `resnet`.
    group_size: As in `resnet`.

  Returns:
    The stages, for inputs of shape (batch, height, width, channels).

  Raises:
    ValueError: As in `resnet`.
  """
  groups = layers.count_groups(width, normalization, group_size)
  norm_relu = {"normalization": normalization, "num_groups": groups}
  nodes: list[Any] = [
    layers.InputConv(lambda: layers.conv(width, 7, 2), "ResNet", name="conv"),
    _max_pool_3x3,
  ]
  for group, num_blocks in enumerate((3, 4, 6, 3)):
    features = width * 2**group
    for block in range(num_blocks):
      name = f"group{group + 1}_block{block + 1}"
      strides = 2 if group and not block else 1
      if not block:
        nodes += [
          layers.NormRelu(**norm_relu, name=f"{name}_norm"),
          _Projection(4 * features, strides, name=f"{name}_projection"),
        ]
      nodes += [
        _BlockConv(
          features=size,
          kernel_size=kernel_size,
          strides=strides if kernel_size == 3 else 1,
          opens_branch=bool(block) and conv == 0,
          preactivate=bool(block) or conv > 0,
          **norm_relu,
          name=f"{name}_conv{conv + 1}",
        )
        for conv, (size, kernel_size) in enumerate(
          ((features, 1), (features, 3), (4 * features, 1))
        )
      ]
      nodes.append(_sum(name))
  return layers.pipeline(
    [*nodes, *_head(num_classes, norm_relu)], normalization
  )


def _basic_resnet(
  blocks: Sequence[int],
  width: int,
  num_classes: int,
  normalization: str,
  group_size: int,
) -> tuple[stages.Stage, ...]:
  groups = layers.count_groups(width, normalization, group_size)
  norm_relu = {"normalization": normalization, "num_groups": groups}
  nodes: list[Any] = [
    layers.InputConv(lambda: layers.conv(width, 3), "ResNet", name="conv")
  ]
  for group, num_blocks in enumerate(blocks):
    features = width * 2**group
    for block in range(num_blocks):
      name = f"group{group + 1}_block{block + 1}"
      projects = bool(group) and not block
      strides = 2 if projects else 1
      if projects:
        nodes.append(_Projection(features, strides, name=f"{name}_projection"))
      nodes += [
        _BlockConv(
          features=features,
          kernel_size=3,
          strides=1 if conv else strides,
          opens_branch=not conv and not projects,
          **norm_relu,
          name=f"{name}_conv{conv + 1}",
        )
        for conv in range(2)
      ]
      nodes.append(_sum(name))
  return layers.pipeline(
    [*nodes, *_head(num_classes, norm_relu)], normalization
  )


class _Projection(nn.Module):
  """Opens the residual branch: x to (x, 1x1 convolution of x)."""

  features: int
  strides: int

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, layers.conv(self.features, 1, self.strides)(x)


class _BlockConv(nn.Module):
  """A convolution in a block: (x, shortcut) to (conv(relu(norm(x))), shortcut).

  Attributes:
    features: Output channels.
    kernel_size: Height and width of the kernel.
    strides: Stride of the convolution.
    normalization: As in `layers.NormRelu`.
    num_groups: As in `layers.NormRelu`.
    opens_branch: Whether the input is x alone, which becomes the shortcut.
    preactivate: Whether normalisation and ReLU come first.
  """

  features: int
  kernel_size: int
  strides: int
  normalization: str
  num_groups: int
  opens_branch: bool
  preactivate: bool = True

  @nn.compact
  def __call__(self, inputs: Any) -> tuple[jax.Array, jax.Array]:
    x, shortcut = (inputs, inputs) if self.opens_branch else inputs
    if self.preactivate:
      x = layers.NormRelu(self.normalization, self.num_groups)(x)
    return layers.conv(self.features, self.kernel_size, self.strides)(
      x
    ), shortcut


def _sum(block: str) -> stages.Stage:
  """The end of a block: (x, shortcut) to x + shortcut."""
  return stages.Stage(
    init=lambda key, x: {},
    apply=lambda params, x: x[0] + x[1],
    name=f"{block}_sum",
  )


def _max_pool_3x3(x: jax.Array) -> jax.Array:
  x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
  return nn.max_pool(x, (3, 3), (2, 2))


def _head(num_classes: int, norm_relu: dict[str, Any]) -> list[Any]:
  return [
    layers.NormRelu(**norm_relu, name="norm"),
    layers.global_average_pool,
    layers.linear(num_classes, name="linear"),
    layers.loss,
  ]
