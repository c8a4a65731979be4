"""VGG networks for CIFAR, one node a stage.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2014 (https://arxiv.org/abs/1409.1556), with the small classifier
of the public CIFAR codes and Group Normalization, cut into stages as in
"Pipelined Backpropagation at Scale" (Kosson et al., 2021,
https://arxiv.org/abs/2003.11666): convolutions, normalisation with ReLU, pools
and the modules of the classifier are stages. The stage counts are the paper's,
as recalled and not verified.
"""

from typing import Any

from flax import linen as nn
import jax

from pbp_jax import stages
from pbp_jax.models import layers

# Convolutions in each of the five blocks; a pool ends a block.
_BLOCKS = {
  11: (1, 1, 2, 2, 2),
  13: (2, 2, 2, 2, 2),
  16: (2, 2, 3, 3, 3),
}


def vgg(
  depth: int = 11,
  width: int = 64,
  num_classes: int = 10,
  normalization: str = "group",
  dropout: float = 0.5,
  group_size: int = 2,
) -> tuple[stages.Stage, ...]:
  """A VGG network for CIFAR, in twice its convolutions plus 13 stages.

  Five blocks of 3x3 convolutions with `width` (1, 2, 4, 8, 8) channels, each
  followed by normalisation and ReLU and each block by a 2x2 max pool; then
  dropout, linear, ReLU, dropout, linear, ReLU, linear, and the loss. Depths
  11, 13 and 16 have 29, 33 and 39 stages. The dropout stages are stochastic.

  Args:
    depth: 11, 13 or 16.
    width: Channels of the first block, a multiple of the group size; the two
      hidden layers of the classifier have `8 width` features.
    num_classes: Number of outputs.
    normalization: "group", "layer" (one group), "online" (whose stages have a
      state) or "none".
    dropout: Probability with which a feature is dropped, in [0, 1).
    group_size: Channels of a group of "group" at the first width; the number
      of groups is the same throughout.

  Returns:
    The stages. Inputs have the shape (batch, height, width, channels), of any
    size and with any number of channels; outputs are logits.

  Raises:
    ValueError: If an argument isn't as above, or an input has another rank.

  Example:
    >>> import pbp_jax as pbp
    >>> stages = pbp.models.vgg(depth=11)
    >>> len(stages)
    29
    >>> [stage.name for stage in stages if stage.stochastic]
    ['dropout1', 'dropout2']
  """
  if depth not in _BLOCKS:
    raise ValueError(
      f"depth must be one of {', '.join(map(str, _BLOCKS))}, got {depth}."
    )
  if not 0 <= dropout < 1:
    raise ValueError(f"dropout must lie in [0, 1), got {dropout}.")
  groups = layers.count_groups(width, normalization, group_size)
  nodes: list[Any] = []
  for block, num_convs in enumerate(_BLOCKS[depth]):
    features = width * min(2**block, 8)
    for conv in range(num_convs):
      name = f"block{block + 1}_conv{conv + 1}"
      nodes.append(
        layers.conv(features, 3, use_bias=True, name=name)
        if nodes
        else layers.InputConv(
          lambda: layers.conv(width, 3, use_bias=True), "VGG", name=name
        )
      )
      name = f"block{block + 1}_norm{conv + 1}"
      nodes.append(layers.NormRelu(normalization, groups, name=name))
    nodes.append(layers.max_pool)
  nodes += [
    _FlattenDropout(dropout, name="dropout1"),
    layers.linear(8 * width, name="linear1"),
    nn.relu,
    nn.Dropout(dropout, name="dropout2"),
    layers.linear(8 * width, name="linear2"),
    nn.relu,
    layers.linear(num_classes, name="linear3"),
    layers.loss,
  ]
  return layers.pipeline(nodes, normalization)


class _FlattenDropout(nn.Module):
  """Dropout of the flattened features, the classifier's first stage."""

  rate: float

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    return nn.Dropout(self.rate)(layers.flatten(x), deterministic=deterministic)
