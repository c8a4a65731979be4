"""Adam in a rotated basis."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp

_SHAPE = (4, 3)
_GRADIENTS = np.random.default_rng(0).normal(size=(6, *_SHAPE))


def _updates(link, gradients):
  state = link.init(jnp.zeros_like(gradients[0]))
  update = jax.jit(link.update)
  updates = []
  for gradient in gradients:
    u, state = update(jnp.asarray(gradient), state)
    updates.append(u)
  return np.array(updates)


def _formula(gradients, every, uses_momentum, b1, b2, eps):
  rows, columns = _SHAPE
  left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
  m, v = np.zeros(_SHAPE), np.zeros(_SHAPE)
  u, w = np.eye(rows), np.eye(columns)
  for t, g in enumerate(gradients):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * (u.T @ g @ w) ** 2
    m_hat, v_hat = m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
    yield u @ ((u.T @ m_hat @ w) / (np.sqrt(v_hat) + eps)) @ w.T
    seen = m if uses_momentum else g
    left = b2 * left + (1 - b2) * seen @ seen.T
    right = b2 * right + (1 - b2) * seen.T @ seen
    if t == 0:
      u, w = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
    elif t % every == 0:
      u, w = np.linalg.qr(left @ u)[0], np.linalg.qr(right @ w)[0]


class BasisRotationTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.named_parameters(
    ("gradients_every_2", 2, False, 0.9, 0.99, 1e-3),
    ("momentum_every_3", 3, True, 0.5, 0.9, 1e-2),
  )
  def test_updates_are_the_formula(self, every, uses_momentum, b1, b2, eps):
    got = _updates(
      pbp.scale_by_basis_rotation(b1, b2, eps, every, uses_momentum),
      _GRADIENTS,
    )
    expected = list(_formula(_GRADIENTS, every, uses_momentum, b1, b2, eps))
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)

  @parameterized.named_parameters(
    ("vector", (5,)), ("kernel", (2, 3, 2)), ("scalar", ())
  )
  def test_other_leaves_get_adam(self, shape):
    gradients = np.random.default_rng(1).normal(size=(5, *shape))
    np.testing.assert_allclose(
      _updates(pbp.scale_by_basis_rotation(), gradients),
      _updates(optax.scale_by_adam(), gradients),
      rtol=1e-12,
    )

  def test_first_update_is_adams(self):
    np.testing.assert_allclose(
      _updates(pbp.scale_by_basis_rotation(), _GRADIENTS[:1]),
      _updates(optax.scale_by_adam(), _GRADIENTS[:1]),
      rtol=1e-12,
    )

  @parameterized.named_parameters(
    ("b1", {"b1": 1.0}),
    ("b2", {"b2": -0.1}),
    ("eps", {"eps": -1.0}),
    ("refresh_every", {"refresh_every": 0}),
  )
  def test_a_wrong_argument_is_named(self, arguments):
    with self.assertRaisesRegex(ValueError, next(iter(arguments))):
      pbp.scale_by_basis_rotation(**arguments)


if __name__ == "__main__":
  absltest.main()
