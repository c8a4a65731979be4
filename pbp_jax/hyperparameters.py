"""Carrying hyperparameters of SGD with momentum to another batch size."""

from typing import NamedTuple

from jax.typing import ArrayLike

from pbp_jax.transforms import per_stage


class Hyperparameters(NamedTuple):
  """What the scaling rule changes.

  Attributes:
    learning_rate: η.
    momentum: m.
  """

  learning_rate: ArrayLike
  momentum: ArrayLike


def scale_hyperparameters(
  learning_rate: ArrayLike,
  momentum: ArrayLike,
  reference_batch_size: float,
  batch_size: float = 1,
) -> Hyperparameters:
  """Scales the rate and momentum of a reference batch size to another.

  `m = m_r^(N / N_r)` and `η = η_r (1 - m) N / ((1 - m_r) N_r)`: a sample's
  gradient then contributes as much, and for as many samples, as it did in the
  reference. Weight decay is left as it is.

  Args:
    learning_rate: η_r, the reference's rate, for the mean of a batch's
      gradients; may be traced.
    momentum: m_r in [0, 1), the reference's momentum; may be traced.
    reference_batch_size: N_r, in samples.
    batch_size: N, samples an update.

  Returns:
    The scaled `Hyperparameters`.

  Raises:
    ValueError: If a known number is out of range.

  References:
    Chiley et al., Online Normalization for Training Neural Networks, 2019
    (recalled, not re-read at the source), as used by Kosson et al., 2020.

  Example:
    >>> rate, momentum = scale_hyperparameters(0.1, 0.9, 128)
    >>> print(f"{rate:.5e} {momentum:.8f}")
    6.42805e-06 0.99917721
  """
  per_stage.check_numbers(learning_rate, "learning_rate")
  per_stage.check_numbers(momentum, "momentum", below=1.0)
  per_stage.check_number(
    reference_batch_size, "reference_batch_size", above=0.0
  )
  per_stage.check_number(batch_size, "batch_size", above=0.0)
  ratio = batch_size / reference_batch_size
  scaled = momentum**ratio
  return Hyperparameters(
    learning_rate=learning_rate * (1 - scaled) * ratio / (1 - momentum),
    momentum=scaled,
  )
