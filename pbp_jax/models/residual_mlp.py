"""A deep residual multilayer perceptron, one block a stage.

The small network of the project's default job: as many stages as the paper's
ResNet-20, on images small enough for a laptop. It isn't in the paper.
"""

from flax import linen as nn
import jax

from pbp_jax import stages
from pbp_jax.models import layers, normalization


def residual_mlp(
  num_stages: int = 34, width: int = 32, num_classes: int = 10
) -> tuple[stages.Stage, ...]:
  """A chain of residual blocks, one a stage.

  The first stage flattens its input and maps it to `width` features. Each of
  the `num_stages - 3` blocks is `x + dense(relu(norm(x)))` with a layer
  normalisation without parameters, so that a block's weights are one matrix
  and one bias, and every block sees the same scale however deep the network
  is. The last two stages are the logits `dense(relu(norm(x)))` and the loss.

  Block matrices are drawn from a normal distribution of variance 2 / width
  (He), the first and last ones from linen's default (LeCun normal); biases are
  zero. Form and scale were chosen among eight by measuring: at batch one with
  the paper's rate this network trains stably, and unmitigated pipelined
  backpropagation trains it slower but doesn't run away.

  Args:
    num_stages: Number of stages, at least 3.
    width: Number of features.
    num_classes: Number of outputs.

  Returns:
    The stages. Inputs have the shape (batch, ...); outputs are logits.

  Raises:
    ValueError: If an argument isn't as above, or an input has no batch axis.

  Example:
    >>> import pbp_jax as pbp
    >>> stages = pbp.models.residual_mlp(num_stages=5)
    >>> [stage.name for stage in stages]
    ['input', 'block1', 'block2', 'output', 'loss']
  """
  if num_stages < 3:
    raise ValueError(
      f"num_stages must be at least 3 (input, output, loss), got {num_stages}."
    )
  if width < 2:
    raise ValueError(f"width must be at least 2, got {width}.")
  return stages.as_stages(
    [
      _Input(width, name="input"),
      *(_Block(name=f"block{i + 1}") for i in range(num_stages - 3)),
      _Output(num_classes, name="output"),
      layers.loss,
    ]
  )


class _Input(nn.Module):
  """Flattens and maps to the network's width."""

  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    if x.ndim < 2:
      raise ValueError(
        f"inputs must have the shape (batch, ...), got {x.shape}."
      )
    return nn.Dense(self.width)(layers.flatten(x))


class _Block(nn.Module):
  """x + dense(relu(norm(x)))."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dense = nn.Dense(x.shape[-1], kernel_init=layers.he_normal)
    return x + dense(nn.relu(normalization.layer_norm(x)))


class _Output(nn.Module):
  """The logits."""

  num_classes: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.Dense(self.num_classes)(nn.relu(normalization.layer_norm(x)))
