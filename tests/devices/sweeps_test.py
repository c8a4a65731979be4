"""Runs that devices share; over several processes: several_processes_test."""

from absl.testing import absltest, parameterized
import numpy as np

import pbp_jax as pbp


class SweepTest(parameterized.TestCase):
  def test_trees_go_in_and_come_out(self):
    found = pbp.devices.sweep(
      lambda a, b: {"sum": a["x"] + b, "seed": a["seed"]},
      {"x": np.arange(6.0).reshape(3, 2), "seed": np.arange(3)},
      np.array([10, 20, 30]),
    )
    np.testing.assert_array_equal(found["sum"], [[10, 11], [22, 23], [34, 35]])
    np.testing.assert_array_equal(found["seed"], [0, 1, 2])

  @parameterized.named_parameters(
    ("lengths", np.ones(3), np.ones(2)),
    ("scalar", np.ones(()), np.ones(())),
    ("nothing", np.ones((0, 2)), np.ones(0)),
  )
  def test_refuses_what_is_not_stacked(self, a, b):
    with self.assertRaisesRegex(ValueError, "arguments must be stacked"):
      pbp.devices.sweep(lambda a, b: a, a, b)


if __name__ == "__main__":
  absltest.main()
