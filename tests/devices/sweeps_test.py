"""Runs that devices share; over several processes: several_processes_test."""

from absl.testing import absltest, parameterized
import jax
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

  @parameterized.named_parameters(
    ("a_list", [1, 2, 3], r"arguments\[0\]\[0\] must be an array.*np.stack"),
    ("a_number", 3, r"arguments\[0\] must be an array.*got 3"),
    ("random_keys", jax.random.key(0)[None], "got random keys.*give seeds"),
    ("names", np.array(["a"]), "must be numbers.*got <U1"),
  )
  def test_refuses_what_is_no_array(self, argument, message):
    with self.assertRaisesRegex(ValueError, message):
      pbp.devices.sweep(lambda a: a, argument)

  @parameterized.named_parameters(
    ("none", [], r"got \[\]"),
    ("a_number", 2, "got 2"),
    ("numbers", [0, 1], r"got \[0, 1\]"),
    ("one_twice", jax.devices()[:1] * 2, "each once.*got"),
  )
  def test_refuses_devices(self, devices, message):
    with self.assertRaisesRegex(ValueError, f"devices must be.*{message}"):
      pbp.devices.sweep(lambda a: a, np.arange(2), devices=devices)

  def test_refuses_functions(self):
    with self.assertRaisesRegex(ValueError, "function must be.*got 3"):
      pbp.devices.sweep(3, np.arange(2))
    with self.assertRaisesRegex(ValueError, "function must return numbers"):
      pbp.devices.sweep(jax.random.key, np.arange(2))


if __name__ == "__main__":
  absltest.main()
