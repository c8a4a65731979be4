"""A convolution that trains fast at batch one on a CPU.

XLA's own convolution runs well forward on a CPU, but its gradients are very
slow inside a `lax.scan`. Here a convolution is copies and matrix products, so
its gradients are copies and matrix products too. `conv_general_dilated` is a
drop-in for the function of that name in `jax.lax` and goes into
`flax.linen.Conv(conv_general_dilated=...)`: parameters and initialisation stay
those of linen.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

_Padding = Sequence[tuple[int, int]]


def conv_general_dilated(
  lhs: jax.Array,
  rhs: jax.Array,
  window_strides: Sequence[int],
  padding: str | _Padding,
  lhs_dilation: Sequence[int] | None = None,
  rhs_dilation: Sequence[int] | None = None,
  dimension_numbers: Any = None,
  feature_group_count: int = 1,
  **kwargs: Any,
) -> jax.Array:
  """Convolves like `lax.conv_general_dilated`, by matrix products on a CPU.

  A convolution of images in channels-last layout (NHWC), without groups and
  dilation, takes one of two forms:

  - 3x3, stride 1, zero padding of one pixel: `separable_convolution`;
  - any other kernel, stride and padding: `patch_convolution`.

  Everything else, and everything on a GPU or TPU, is left to `lax`. The choice
  is made while tracing, from `jax.default_backend()`: a choice inside the
  compiled program would be a conditional, through which "backward on other
  weights" could not see.

  Args:
    lhs: The input, of shape (batch, height, width, channels).
    rhs: The kernel, of shape (height, width, channels, features).
    window_strides: The strides, two for an image.
    padding: "SAME", "VALID" or a pair (low, high) for each spatial dimension.
    lhs_dilation: As in `lax`; None or ones for the fast forms.
    rhs_dilation: As in `lax`; None or ones for the fast forms.
    dimension_numbers: As in `lax`; NHWC, HWIO, NHWC for the fast forms.
    feature_group_count: As in `lax`; 1 for the fast forms.
    **kwargs: `precision`, and anything else that `lax` takes.

  Returns:
    The output, of shape (batch, height, width, features).

  Example:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp
    >>> from pbp_jax.models import convolution
    >>> conv = nn.Conv(
    ...     4, (3, 3), conv_general_dilated=convolution.conv_general_dilated)
    >>> x = jnp.ones((1, 8, 8, 2))
    >>> conv.apply(conv.init(jax.random.key(0), x), x).shape
    (1, 8, 8, 4)
  """
  is_plain = (
    _is_channels_last(lhs.shape, rhs.shape, dimension_numbers)
    and feature_group_count == 1
    and all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
    and lhs.dtype == rhs.dtype
    and set(kwargs) <= {"precision"}
  )
  if not is_plain or jax.default_backend() != "cpu":
    return lax.conv_general_dilated(
      lhs,
      rhs,
      window_strides,
      padding,
      lhs_dilation=lhs_dilation,
      rhs_dilation=rhs_dilation,
      dimension_numbers=dimension_numbers,
      feature_group_count=feature_group_count,
      **kwargs,
    )
  strides = tuple(window_strides)
  if isinstance(padding, str):
    padding = lax.padtype_to_pads(
      lhs.shape[1:3], rhs.shape[:2], strides, padding
    )
  padding = tuple((low, high) for low, high in padding)
  precision = kwargs.get("precision")
  if (rhs.shape[:2], strides, padding) == ((3, 3), (1, 1), ((1, 1), (1, 1))):
    return separable_convolution(lhs, rhs, precision)
  return patch_convolution(lhs, rhs, strides, padding, precision)


def _is_channels_last(
  lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], numbers: Any
) -> bool:
  if len(lhs_shape) != 4 or numbers is None:
    return False
  numbers = lax.conv_dimension_numbers(lhs_shape, rhs_shape, numbers)
  nhwc = lax.conv_dimension_numbers(
    lhs_shape, rhs_shape, ("NHWC", "HWIO", "NHWC")
  )
  return numbers == nhwc


def patch_convolution(
  x: jax.Array,
  kernel: jax.Array,
  strides: Sequence[int],
  padding: _Padding,
  precision: Any = None,
) -> jax.Array:
  """Convolves by one product of the input's patches with the kernel.

  Each output pixel's patch, the `height * width * channels` inputs it sees,
  becomes a row of a matrix ("im2col"), which is multiplied by the kernel as a
  matrix with `features` columns.

  Args:
    x: The input, of shape (batch, height, width, channels).
    kernel: The kernel, of shape (height, width, channels, features).
    strides: The vertical and horizontal stride.
    padding: Zeros added before and after each spatial dimension; a negative
      number crops.
    precision: The precision of the product, as in `lax.dot_general`.

  Returns:
    The output, of shape (batch, height, width, features).

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax.models import convolution
    >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    >>> y = convolution.patch_convolution(
    ...     x, jnp.ones((2, 2, 1, 1)), (2, 2), ((0, 0), (0, 0)))
    >>> print(y[0, :, :, 0])
    [[10. 18.]
     [42. 50.]]
  """
  rows, columns, channels, features = kernel.shape
  zero = jnp.zeros((), x.dtype)
  x = lax.pad(
    x, zero, ((0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0))
  )
  batch, height, width, _ = x.shape
  out_height = (height - rows) // strides[0] + 1
  out_width = (width - columns) // strides[1] + 1
  patches = [
    lax.slice(
      x,
      (0, i, j, 0),
      (
        batch,
        i + (out_height - 1) * strides[0] + 1,
        j + (out_width - 1) * strides[1] + 1,
        channels,
      ),
      (1, *strides, 1),
    )
    for i in range(rows)
    for j in range(columns)
  ]
  y = jnp.matmul(
    jnp.concatenate(patches, axis=-1).reshape(
      batch * out_height * out_width, rows * columns * channels
    ),
    kernel.reshape(rows * columns * channels, features),
    precision=precision,
  )
  return y.reshape(batch, out_height, out_width, features)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def separable_convolution(
  x: jax.Array, kernel: jax.Array, precision: Any = None
) -> jax.Array:
  """Convolves 3x3 with stride 1 and padding 1, one dimension at a time.

  The three horizontal shifts of the input side by side are a matrix of
  `3 channels` columns, a third of what patches would need. One product with
  the kernel, as a matrix of `3 features` columns, gives what each kernel row
  contributes, and the contributions are summed over three vertical shifts.
  The backward pass keeps the matrix; the gradients of the kernel and of the
  input are one product each.

  Args:
    x: The input, of shape (batch, height, width, channels).
    kernel: The kernel, of shape (3, 3, channels, features).
    precision: The precision of the products, as in `lax.dot_general`.

  Returns:
    The output, of shape (batch, height, width, features).

  Example:
    >>> import jax.numpy as jnp
    >>> from pbp_jax.models import convolution
    >>> x = jnp.ones((1, 3, 4, 1))
    >>> y = convolution.separable_convolution(x, jnp.ones((3, 3, 1, 1)))
    >>> print(y[0, :, :, 0])
    [[4. 6. 6. 4.]
     [6. 9. 9. 6.]
     [4. 6. 6. 4.]]
  """
  return _separable_forward(x, kernel, precision)[0]


def _separable_forward(x, kernel, precision):
  batch, height, width, channels = x.shape
  features = kernel.shape[3]
  shifted = jnp.concatenate(_shifts(x, axis=2), axis=-1)
  shifted = shifted.reshape(batch * height * width, 3 * channels)
  # Rows (kernel column, channel), columns (kernel row, feature).
  matrix = kernel.reshape(3, 3 * channels, features)
  matrix = matrix.transpose(1, 0, 2).reshape(3 * channels, 3 * features)
  parts = jnp.matmul(shifted, matrix, precision=precision)
  parts = parts.reshape(batch, height, width, 3 * features)
  y = _sum_of_shifts(jnp.split(parts, 3, axis=-1), axis=1)
  return y, (shifted, matrix)


def _separable_backward(precision, residuals, cotangent):
  shifted, matrix = residuals
  batch, height, width, features = cotangent.shape
  channels = matrix.shape[0] // 3
  # The transpose of a sum of shifts gathers the opposite shifts.
  parts = jnp.concatenate(_shifts(cotangent, axis=1)[::-1], axis=-1)
  parts = parts.reshape(batch * height * width, 3 * features)
  kernel = jnp.matmul(shifted.T, parts, precision=precision)
  kernel = kernel.reshape(3 * channels, 3, features).transpose(1, 0, 2)
  shifted = jnp.matmul(parts, matrix.T, precision=precision)
  shifted = shifted.reshape(batch, height, width, 3 * channels)
  x = _sum_of_shifts(jnp.split(shifted, 3, axis=-1)[::-1], axis=2)
  return x, kernel.reshape(3, 3, channels, features)


separable_convolution.defvjp(_separable_forward, _separable_backward)


def _shifts(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What stands at i - 1, i and i + 1 along the axis, zero outside."""
  size = x.shape[axis]
  edge = jnp.zeros_like(lax.slice_in_dim(x, 0, 1, axis=axis))
  return (
    lax.concatenate([edge, lax.slice_in_dim(x, 0, size - 1, axis=axis)], axis),
    x,
    lax.concatenate([lax.slice_in_dim(x, 1, size, axis=axis), edge], axis),
  )


def _sum_of_shifts(parts: Sequence[jax.Array], axis: int) -> jax.Array:
  """parts[0] at i - 1, parts[1] at i and parts[2] at i + 1, added."""
  before, at, after = parts
  return _shifts(before, axis)[0] + at + _shifts(after, axis)[2]
