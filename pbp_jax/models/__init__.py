"""Networks as pipelines of stages.

`get` makes one by its name; see there for the names.
"""

from collections.abc import Callable, Mapping
import functools
import types
from typing import Any

from pbp_jax import stages
from pbp_jax.models.residual_mlp import residual_mlp as residual_mlp
from pbp_jax.models.resnet import resnet as resnet
from pbp_jax.models.resnet import resnet18 as resnet18
from pbp_jax.models.resnet import resnet50 as resnet50
from pbp_jax.models.vgg import vgg as vgg

_MODELS: Mapping[str, Callable[..., tuple[stages.Stage, ...]]] = (
  types.MappingProxyType(
    {
      "residual_mlp": residual_mlp,
      **{
        f"resnet{depth}": functools.partial(resnet, depth=depth)
        for depth in (8, 20, 32, 44, 56, 110)
      },
      "resnet18": resnet18,
      "resnet50": resnet50,
      **{
        f"vgg{depth}": functools.partial(vgg, depth=depth)
        for depth in (11, 13, 16)
      },
    }
  )
)


def names() -> tuple[str, ...]:
  """The names that `get` knows."""
  return tuple(_MODELS)


def get(name: str, **kwargs: Any) -> tuple[stages.Stage, ...]:
  """Makes a network by its name.

  Args:
    name: residual_mlp; resnet8, resnet20, resnet32, resnet44, resnet56 and
      resnet110 (CIFAR); resnet18 (CIFAR); resnet50 (ImageNet); vgg11, vgg13
      and vgg16 (CIFAR).
    **kwargs: Arguments of the network's function, such as `num_classes` and
      `width`.

  Returns:
    The stages.

  Raises:
    ValueError: If there is no such name, or an argument isn't allowed.

  Example:
    >>> import pbp_jax as pbp
    >>> len(pbp.models.get("resnet20", width=4))
    34
  """
  if name not in _MODELS:
    raise ValueError(f"name must be one of {', '.join(names())}, got {name!r}.")
  return _MODELS[name](**kwargs)
