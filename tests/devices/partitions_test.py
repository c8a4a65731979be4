"""Cuts of a pipeline into groups."""

import itertools

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import pbp_jax as pbp
from pbp_jax import network


def _smallest_largest(costs, num_groups):
  """By trying all cuts."""
  return min(
    max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
    for cuts in itertools.combinations(range(1, len(costs)), num_groups - 1)
  )


class PartitionTest(parameterized.TestCase):
  @parameterized.product(num_groups=[1, 2, 3, 5, 8], seed=[0, 1, 2])
  def test_no_other_cut_is_better(self, num_groups, seed):
    costs = np.random.default_rng(seed).integers(0, 9, 8) + (seed == 2) * 0.5
    partition = pbp.devices.partition(costs, num_groups)
    self.assertEqual(partition.num_groups, num_groups)
    self.assertEqual(partition.sizes.sum(), 8)
    self.assertEqual(
      partition.group_costs.max(), _smallest_largest(costs, num_groups)
    )

  def test_report_by_hand(self):
    partition = pbp.devices.partition([1, 2, 3, 6], 2)
    np.testing.assert_array_equal(partition.starts, [0, 3])
    np.testing.assert_array_equal(partition.group_costs, [6, 6])
    partition = pbp.devices.Partition(np.array([1, 2, 3, 6]), np.array([0, 2]))
    self.assertEqual(partition.balance, 6 / 9)
    self.assertEqual(partition.speedup, 12 / 9)
    schedule = pbp.schedules.pipelined_backprop(2)
    self.assertAlmostEqual(partition.utilization(schedule, 8), 6 / 9 * 8 / 10)
    self.assertIn("2-3", str(partition))

  @parameterized.parameters([[]], [[-1.0, 2.0]], [[0, 0]], [[np.nan]], ["ab"])
  def test_costs_that_are_none_are_refused(self, costs):
    with self.assertRaisesRegex(ValueError, "costs must be"):
      pbp.devices.partition(costs, 1)

  def test_more_groups_than_stages_are_refused(self):
    with self.assertRaisesRegex(ValueError, "num_groups.*2, got 3"):
      pbp.devices.partition([1, 1], 3)

  @parameterized.parameters([[1]], [[0, 0]], [[0, 3]], [[]])
  def test_starts_that_are_no_cut_are_refused(self, starts):
    with self.assertRaisesRegex(ValueError, "starts must be ints that rise"):
      pbp.devices.Partition(np.ones(3), np.array(starts, int))

  def test_starts_in_floating_point_are_refused(self):
    with self.assertRaisesRegex(ValueError, "starts must be ints"):
      pbp.devices.Partition(np.ones(3), np.array([0.0, 1.0]))

  def test_a_schedule_of_another_number_of_groups_is_refused(self):
    partition = pbp.devices.Partition(np.ones(3), np.array([0, 1]))
    with self.assertRaisesRegex(ValueError, "schedule must.*2;.*has 3"):
      partition.utilization(pbp.schedules.pipelined_backprop(3), 4)

  @parameterized.parameters(
    [((1, 2), (3,))], [((1,), (2,))], [((1,), 2)], [((1,), (2, 3), (4,))]
  )
  def test_weights_of_other_groups_are_not_split(self, merged):
    partition = pbp.devices.Partition(np.ones(3), np.array([0, 1]))
    with self.assertRaisesRegex(ValueError, r"merged must.*\[1, 2\]; got"):
      partition.split(merged)


class MergeTest(absltest.TestCase):
  def test_merged_stages_compute_what_the_stages_do(self):
    stages = pbp.as_stages([nn.Dense(3), nn.tanh, nn.Dropout(0.5), nn.Dense(2)])
    partition = pbp.devices.Partition(np.ones(4), np.array([0, 1]))
    merged = partition.merge(stages)
    self.assertEqual([s.stochastic for s in merged], [False, True])
    x = jnp.ones((1, 5))
    params, states = network.init(merged, jax.random.key(0), x)
    got, _ = network.apply(merged, params, params, states, x)
    own = partition.split(params)
    self.assertLen(own, 4)
    expected, _ = network.apply(stages, own, own, (None,) * 4, x)
    np.testing.assert_array_equal(got, expected)

  def test_groups_of_the_same_stages_are_the_same(self):
    a, b = pbp.as_stages([jnp.sin, jnp.cos])
    partition = pbp.devices.Partition(np.ones(5), np.array([0, 2, 4]))
    merged = partition.merge((a, b, a, b, a))
    self.assertIs(merged[0], merged[1])
    self.assertIsNot(merged[0], merged[2])


class CostsTest(absltest.TestCase):
  def test_operations_grow_with_the_width(self):
    """y, dw and dx of a matrix are 2 m n operations each, at batch one."""
    stages = pbp.as_stages([nn.Dense(n, use_bias=False) for n in (8, 16, 4)])
    np.testing.assert_array_equal(
      pbp.devices.count_costs(stages, jnp.ones((1, 4))),
      6 * np.array([4 * 8, 8 * 16, 16 * 4]),
    )

  def test_times_are_of_each_stage(self):
    stages = pbp.as_stages([nn.Dense(2), nn.Dropout(0.5)])
    times = pbp.devices.measure_costs(stages, jnp.ones((1, 2)), repeats=2)
    self.assertEqual(times.shape, (2,))
    self.assertTrue((times > 0).all())

  def test_no_measurement_is_refused(self):
    with self.assertRaisesRegex(ValueError, "repeats must.*>= 1, got 0"):
      pbp.devices.measure_costs((), jnp.ones(1), repeats=0)


if __name__ == "__main__":
  absltest.main()
