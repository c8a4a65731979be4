"""Optimizer states of single devices, and of all of them together.

A device's optimizer runs on a tuple of all stages' weights in which only its
own are there (`passes.alone`). So the leaves of its state lie at the very paths
that they have in the state of an optimizer of all weights.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pbp_jax.stages import PyTree


def merge(parts: Sequence[PyTree], whole: PyTree) -> PyTree:
  """Puts the devices' states together.

  Args:
    parts: The state of each device.
    whole: A tree of the structure of the state of all of them.

  Returns:
    That state. What the devices have in common, such as a count of updates, is
    taken from the first.

  Example:
    >>> merge([({"w": 1}, {}), ({}, {"w": 2})], ({"w": 0}, {"w": 0}))
    ({'w': 1}, {'w': 2})
  """
  table: dict[Any, Any] = {}
  for part in reversed(parts):
    table.update(jax.tree_util.tree_flatten_with_path(part)[0])
  return _filled(whole, table)


def take(whole: PyTree, part: PyTree) -> PyTree:
  """A device's share of a state of all devices.

  Args:
    whole: The state of all of them.
    part: A tree of the structure of the share.

  Returns:
    The share.

  Example:
    >>> take(({"w": 1}, {"w": 2}), ({}, {"w": 0}))
    ({}, {'w': 2})
  """
  return _filled(part, dict(jax.tree_util.tree_flatten_with_path(whole)[0]))


def _filled(structure: PyTree, table: dict[Any, Any]) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: table[path], structure
  )
