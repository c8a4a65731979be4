"""Meshes that are refused; those that are used: on_eight_devices/."""

from absl.testing import absltest, parameterized
import jax
from jax import sharding
import numpy as np

import pbp_jax as pbp
from pbp_jax.devices import mesh

_DEVICE = jax.devices()[0]


class MakeMeshTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("no_stages", (0,), "num_stages must be an int >= 1, got 0"),
    ("no_replicas", (1, 0), "num_replicas must be an int >= 1, got 0"),
    ("below_zero", (-1, -1), "num_stages must be.*got -1"),
    ("floating_point", (1.0,), "num_stages must be.*got 1.0"),
    ("no_devices", (1, 1, []), r"devices must be.*got \[\]"),
    ("a_number_of_devices", (1, 1, 1), "devices must be.*got 1"),
    ("numbers_of_devices", (1, 1, [0]), r"devices must be.*got \[0\]"),
    ("one_twice", (2, 1, [_DEVICE, _DEVICE]), "devices must be.*each once"),
  )
  def test_refuses(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      pbp.devices.make_mesh(*arguments)


class CheckMeshTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("of_one_device_twice", [[_DEVICE, _DEVICE]], 2, "mesh.devices must.*once"),
    ("of_too_many", [[_DEVICE, _DEVICE]], 1, "with 1 devices.*'stage': 2"),
    (
      "without_replicas",
      np.empty((0, 1), object),
      1,
      r"mesh.devices must.*got \[\]",
    ),
  )
  def test_refuses(self, grid, num_stages, message):
    made = sharding.Mesh(np.array(grid), (mesh.REPLICA, mesh.STAGE))
    with self.assertRaisesRegex(ValueError, message):
      mesh.check_mesh(made, num_stages)

  def test_refuses_what_is_no_mesh(self):
    with self.assertRaisesRegex(ValueError, "mesh must be.*got 'cpu'"):
      mesh.check_mesh("cpu", 1)


if __name__ == "__main__":
  absltest.main()
