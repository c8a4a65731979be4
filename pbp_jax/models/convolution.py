"""A convolution that trains fast at batch one on a CPU.

XLA's own convolution runs well forward on a CPU, but its gradients are very
slow inside a `lax.scan`. Here a convolution is copies and matrix products, so
that the gradients are matrix products as well. `conv_general_dilated` is a
drop-in for the function of that name in `jax.lax` and goes into
`flax.linen.Conv(conv_general_dilated=...)`: parameters and initialisation stay
those of linen.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# Where XLA's own convolution has the fast gradients.
_LAX_BACKENDS = ("gpu", "cuda", "rocm", "tpu")

_Padding = Sequence[tuple[int, int]]


def conv_general_dilated(
  lhs: jax.Array,
  rhs: jax.Array,
  window_strides: Sequence[int],
  padding: str | _Padding,
  lhs_dilation: int | Sequence[int] | None = None,
  rhs_dilation: int | Sequence[int] | None = None,
  dimension_numbers: Any = None,
  feature_group_count: int = 1,
  **kwargs: Any,
) -> jax.Array:
  """Convolves like `lax.conv_general_dilated`, by matrix products on a CPU.

  Two-dimensional channels-last (NHWC) convolutions without groups and dilation
  take one of two forms:

  - 3x3, stride 1, zero padding of one pixel: one product with the three
    horizontal shifts of the input, then a sum of three vertical shifts
    (`separable_convolution`);
  - any other kernel, stride and padding: one product with the patches of the
    input (`patch_convolution`).

  Everything else, and everything on a GPU or TPU, is left to `lax`. The choice
  is made when the function is traced, from `jax.default_backend()`.

  Args:
    lhs: The input, of shape (batch, height, width, channels).
    rhs: The kernel, of shape (height, width, channels, features).
    window_strides: The strides, two for an image.
    padding: "SAME", "VALID" or a pair (low, high) for each spatial dimension.
    lhs_dilation: As in `lax`.
    rhs_dilation: As in `lax`.
    dimension_numbers: As in `lax`; what linen passes for NHWC.
    feature_group_count: As in `lax`.
    **kwargs: `precision` and anything else that `lax` takes.

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
  dilations = (lhs_dilation, rhs_dilation)
  if (
    jax.default_backend() in _LAX_BACKENDS
    or not _is_image_convolution(lhs, rhs, dimension_numbers)
    or feature_group_count != 1
    or any(d is not None and set(jnp.atleast_1d(d)) != {1} for d in dilations)
    or set(kwargs) - {"precision"}
  ):
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
