"""A small transformer of equal blocks that reads an image row by row."""

from flax import linen as nn
import jax
import jax.numpy as jnp

import pbp_jax as pbp
from pbp_jax.models import layers

_NUM_HEADS = 2


def tiny_transformer(
  num_stages: int = 10, width: int = 16, num_classes: int = 10
) -> tuple[pbp.Stage, ...]:
  """A classifier whose tokens are the rows of an image.

  An embedding with learned positions, `num_stages - 3` pre-normalised blocks,
  a head on the mean of the tokens, the loss. The blocks are one and the same
  stage, so that a pipeline on devices compiles them once.

  Args:
    num_stages: Stages, at least 4.
    width: Features of a token, even.
    num_classes: Outputs.

  Returns:
    The stages. Inputs are images `[batch, rows, columns, channels]`.

  Raises:
    ValueError: If there are too few stages, or the width is odd.
  """
  if num_stages < 4:
    raise ValueError(
      "num_stages must be at least 4 (embedding, block, head, loss), got"
      f" {num_stages}."
    )
  if width % _NUM_HEADS:
    raise ValueError(f"width must be even, got {width}.")
  embed, block, head, loss = pbp.as_stages(
    [
      _Embed(width, name="embed"),
      _Block(name="block"),
      _Head(num_classes, name="head"),
      layers.loss,
    ]
  )
  return (embed, *(block,) * (num_stages - 3), head, loss)


class _Embed(nn.Module):
  """Rows as tokens, with what is learned of their places."""

  width: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    rows = images.reshape(*images.shape[:2], -1)
    places = self.param(
      "places", nn.initializers.normal(0.02), (1, rows.shape[1], self.width)
    )
    return nn.Dense(self.width)(rows) + places


class _Block(nn.Module):
  """Attention and a hidden layer, each on the normalised stream."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    x = x + nn.MultiHeadDotProductAttention(_NUM_HEADS)(nn.LayerNorm()(x))
    hidden = nn.Dense(2 * width)(nn.LayerNorm()(x))
    return x + nn.Dense(width)(nn.gelu(hidden))


class _Head(nn.Module):
  """Logits of the mean token."""

  num_classes: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.Dense(self.num_classes)(jnp.mean(nn.LayerNorm()(x), axis=1))
