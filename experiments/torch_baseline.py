"""Plain SGD with momentum at batch one in PyTorch, for `benchmark` to compare.

The networks are those of `pbp.models`: same layers, same parameters. PyTorch is
optional, and imported only here: `pip install .[benchmark]`.
"""

from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]


def make_chunk(
  model: str, example: np.ndarray, samples: int, threads: int
) -> Callable[[], None]:
  """A loop over samples: forward, backward, update.

  Args:
    model: resnet20, resnet18, vgg11 or residual_mlp.
    example: One sample with its batch axis, channels last.
    samples: Samples a call.
    threads: Threads of PyTorch's own.

  Returns:
    Trains on so many samples of noise.
  """
  torch.set_num_threads(threads)
  torch.manual_seed(0)
  network = _MAKERS[model](example.shape[-1])
  optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.99)
  shape = (samples, 1, example.shape[-1], *example.shape[1:-1])
  inputs = torch.randn(shape)
  targets = torch.arange(samples)[:, None] % 10

  def chunk():
    for x, target in zip(inputs, targets, strict=True):
      optimizer.zero_grad()
      nn.functional.cross_entropy(network(x), target).backward()
      optimizer.step()

  return chunk


def num_parameters(model: str, channels: int) -> int:
  """How many weights the network has."""
  return sum(p.numel() for p in _MAKERS[model](channels).parameters())


class _PreactivationBlock(nn.Module):
  def __init__(self, inputs: int, features: int, strides: int, groups: int):
    super().__init__()
    conv = lambda i, o, size, s: nn.Conv2d(
      i, o, size, s, padding=size // 2, bias=False
    )
    self.projection = (
      conv(inputs, features, 1, strides) if strides > 1 else nn.Identity()
    )
    self.branch = nn.Sequential(
      nn.GroupNorm(groups, inputs),
      nn.ReLU(),
      conv(inputs, features, 3, strides),
      nn.GroupNorm(groups, features),
      nn.ReLU(),
      conv(features, features, 3, 1),
    )

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.projection(x) + self.branch(x)


def _resnet(blocks: tuple[int, ...], width: int, channels: int) -> nn.Module:
  groups = width // 2
  layers = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
  features = width
  for group, count in enumerate(blocks):
    for block in range(count):
      strides = 2 if group and not block else 1
      wider = width * 2**group
      layers.append(_PreactivationBlock(features, wider, strides, groups))
      features = wider
  return nn.Sequential(
    *layers,
    nn.GroupNorm(groups, features),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(features, 10),
  )


def _vgg11(channels: int) -> nn.Module:
  layers, features = [], channels
  for size in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
    if not size:
      layers.append(nn.MaxPool2d(2))
      continue
    layers += [
      nn.Conv2d(features, size, 3, padding=1),
      nn.GroupNorm(32, size),
      nn.ReLU(),
    ]
    features = size
  classifier = [
    layer
    for outputs in (512, 512)
    for layer in (nn.Dropout(), nn.Linear(512, outputs), nn.ReLU())
  ]
  return nn.Sequential(*layers, nn.Flatten(), *classifier, nn.Linear(512, 10))


class _ResidualBlock(nn.Module):
  def __init__(self, width: int):
    super().__init__()
    self.branch = nn.Sequential(
      nn.LayerNorm(width, elementwise_affine=False),
      nn.ReLU(),
      nn.Linear(width, width),
    )

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x + self.branch(x)


def _residual_mlp(channels: int) -> nn.Module:
  width = 32
  return nn.Sequential(
    nn.Flatten(),
    nn.Linear(64 * channels, width),
    *(_ResidualBlock(width) for _ in range(31)),
    nn.LayerNorm(width, elementwise_affine=False),
    nn.ReLU(),
    nn.Linear(width, 10),
  )


_MAKERS: dict[str, Callable[[int], nn.Module]] = {
  "resnet20": lambda channels: _resnet((3, 3, 3), 16, channels),
  "resnet18": lambda channels: _resnet((2, 2, 2, 2), 64, channels),
  "vgg11": _vgg11,
  "residual_mlp": _residual_mlp,
}
