import dataclasses

from absl.testing import absltest, parameterized
import numpy as np

from experiments import plans, train


class PlanTest(parameterized.TestCase):
  def _plan(self, **changes):
    config = dataclasses.replace(train.Config(), **changes)
    return train.make_plan(config, num_examples=1437)

  def test_default_job_is_equal_chunks_of_all_samples(self):
    chunks = self._plan().chunks()
    self.assertEqual(chunks[-1][1], 10 * 1437)
    self.assertLen({end - start for start, end in chunks}, 1)

  def test_chunks_join_up(self):
    chunks = self._plan(max_samples=1001).chunks()
    ends = [end for _, end in chunks]
    self.assertEqual([start for start, _ in chunks], [0, *ends[:-1]])
    self.assertEqual(ends[-1], 1001)

  def test_max_samples_does_not_lengthen_a_run(self):
    self.assertEqual(self._plan(max_samples=10**9).total_samples, 14370)

  @parameterized.named_parameters(
    ("all_chunks", 100, 100), ("every_second", 50, 50), ("uneven", 7, 7)
  )
  def test_accuracy_is_measured_evenly_and_at_the_end(self, points, count):
    plan = self._plan(
      max_samples=1000, chunk_samples=10, accuracy_points=points
    )
    looks = plan.looks()
    self.assertLen(looks, count)
    self.assertEqual(looks[-1], 1000)
    self.assertLen(set(np.diff(looks)), 1)


class SampleOrderTest(parameterized.TestCase):
  def test_every_epoch_has_every_example_once(self):
    order = plans.SampleOrder([0, 1], 10)(0, 30)
    epochs = np.sort(order.reshape(2, 3, 10), axis=-1)
    np.testing.assert_array_equal(epochs, np.tile(np.arange(10), (2, 3, 1)))

  def test_epochs_and_seeds_differ(self):
    order = plans.SampleOrder([0, 1], 50)(0, 100).reshape(4, 50)
    self.assertLen({tuple(row) for row in order.tolist()}, 4)

  def test_order_does_not_depend_on_the_chunks(self):
    whole = plans.SampleOrder([3], 10)(0, 30)
    in_parts = plans.SampleOrder([3], 10)
    parts = [in_parts(s, e) for s, e in ((0, 4), (4, 13), (13, 30))]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)

  def test_later_part_needs_no_earlier_one(self):
    whole = plans.SampleOrder([3], 10)(0, 30)
    np.testing.assert_array_equal(
      plans.SampleOrder([3], 10)(15, 25), whole[:, 15:25]
    )


if __name__ == "__main__":
  absltest.main()
