"""Trees of different shapes in one form."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax.devices import merging, packing

_TREES = (
  {"w": jnp.arange(6.0).reshape(2, 3), "count": jnp.array(7)},
  ({}, [jnp.arange(2.0), jnp.array([[1, 2]])]),
  {},
)


def _assert_equal(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, expected)


class PackingTest(absltest.TestCase):
  def test_trees_come_back(self):
    packed = packing.of(_TREES)
    self.assertFalse(packed.is_uniform)
    for p, tree in enumerate(_TREES):
      _assert_equal(packed.unpack(packed.pack(tree, p), p), tree)
    _assert_equal(packed.unstack(packed.stack(_TREES)), _TREES)

  def test_all_have_one_form_as_long_as_the_longest(self):
    packed = packing.of(_TREES)
    forms = [
      [(x.shape, x.dtype) for x in packed.pack(tree, p)]
      for p, tree in enumerate(_TREES)
    ]
    self.assertEqual(forms[0], [((6,), jnp.float32), ((2,), jnp.int32)])
    self.assertEqual(forms, forms[:1] * 3)

  def test_padding_is_zero(self):
    packed = packing.of(_TREES)
    _assert_equal(packed.pack(_TREES[1], 1)[0], [0, 1, 0, 0, 0, 0])

  def test_equal_trees_keep_their_leaves(self):
    packed = packing.of([{"w": jnp.ones((2, 3))}, ({}, jnp.ones((2, 3)))])
    self.assertTrue(packed.is_uniform)
    self.assertEqual(packed.form[0].shape, (2, 3))
    self.assertNotEqual(packed.signature(0), packed.signature(1))

  def test_bytes_are_counted_without_padding(self):
    packed = packing.of(_TREES)
    self.assertEqual([packed.num_bytes(p) for p in range(3)], [28, 16, 0])

  def test_random_keys_are_refused(self):
    with self.assertRaisesRegex(ValueError, "random key"):
      packing.of([jax.random.key(0)])


class MergingTest(absltest.TestCase):
  def test_shares_make_the_whole_and_come_back(self):
    whole = {"count": 3, "trace": ({"w": 1}, {"w": 2, "b": 5})}
    parts = [
      {"count": 3, "trace": ({"w": 1}, {})},
      {"count": 3, "trace": ({}, {"w": 2, "b": 5})},
    ]
    self.assertEqual(merging.merge(parts, whole), whole)
    self.assertEqual([merging.take(whole, part) for part in parts], parts)


if __name__ == "__main__":
  absltest.main()
