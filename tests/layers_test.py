"""Convolution, Group Normalization and pooling against lax and linen."""

from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pbp_jax import two_version_vjp
from pbp_jax.models import convolution, layers, normalization

_NHWC = ("NHWC", "HWIO", "NHWC")
_CONV_CASES = (
  ("separable", (2, 6, 5, 3), (3, 3, 3, 4), (1, 1), ((1, 1), (1, 1))),
  ("separable_one_pixel", (1, 1, 1, 3), (3, 3, 3, 4), (1, 1), "SAME"),
  ("separable_more_channels", (1, 4, 4, 7), (3, 3, 7, 2), (1, 1), "SAME"),
  ("valid", (2, 6, 5, 3), (3, 3, 3, 4), (1, 1), "VALID"),
  ("uneven_padding", (1, 6, 6, 3), (3, 3, 3, 4), (1, 1), ((2, 0), (1, 3))),
  ("strided_same", (1, 8, 7, 3), (3, 3, 3, 4), (2, 2), "SAME"),
  ("strided", (2, 8, 7, 3), (3, 3, 3, 4), (2, 2), ((1, 1), (1, 1))),
  ("uneven_strides", (1, 8, 7, 3), (3, 2, 3, 4), (1, 3), ((1, 1), (0, 2))),
  ("projection", (1, 8, 8, 3), (1, 1, 3, 4), (2, 2), ((0, 0), (0, 0))),
  ("stem", (1, 15, 15, 3), (7, 7, 3, 4), (2, 2), ((3, 3), (3, 3))),
)


def _draw(seed, *shapes):
  generator = np.random.default_rng(seed)
  return [
    jnp.asarray(generator.standard_normal(shape), jnp.float32)
    for shape in shapes
  ]


def _value_and_grads(function, *operands):
  """The value, and the gradients for a cotangent that no symmetry hides."""

  @jax.jit
  def run(*operands):
    y, pullback = jax.vjp(function, *operands)
    cotangent = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    return y, pullback(cotangent)

  return run(*operands)


def _jaxpr(function, *operands):
  return str(jax.make_jaxpr(function)(*operands))


class ConvolutionTest(parameterized.TestCase):
  @parameterized.named_parameters(*_CONV_CASES)
  def test_value_and_gradients_equal_lax(
    self, x_shape, kernel_shape, strides, padding
  ):
    x, kernel = _draw(0, x_shape, kernel_shape)

    def run(convolve):
      return _value_and_grads(
        lambda x, kernel: convolve(
          x, kernel, strides, padding, dimension_numbers=_NHWC
        ),
        x,
        kernel,
      )

    ours = jax.tree.leaves(run(convolution.conv_general_dilated))
    theirs = jax.tree.leaves(run(lax.conv_general_dilated))
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  @parameterized.named_parameters(*_CONV_CASES)
  def test_no_convolution_is_left_in_the_gradient_on_a_cpu(
    self, x_shape, kernel_shape, strides, padding
  ):
    x, kernel = _draw(0, x_shape, kernel_shape)
    jaxpr = _jaxpr(
      jax.grad(
        lambda kernel, x: convolution.conv_general_dilated(
          x, kernel, strides, padding, dimension_numbers=_NHWC
        ).sum(),
        argnums=(0, 1),
      ),
      kernel,
      x,
    )
    self.assertIn("dot_general", jaxpr)
    self.assertNotIn("conv_general_dilated", jaxpr)

  @parameterized.named_parameters(
    ("groups", {"feature_group_count": 2}, (1, 6, 6, 4), (3, 3, 2, 4)),
    ("dilation", {"rhs_dilation": (2, 2)}, (1, 6, 6, 4), (3, 3, 4, 4)),
    ("transposed", {"lhs_dilation": (2, 2)}, (1, 6, 6, 4), (3, 3, 4, 4)),
    (
      "channels_first",
      {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
      (1, 4, 6, 6),
      (4, 4, 3, 3),
    ),
    (
      "result_type",
      {"preferred_element_type": jnp.float32},
      (1, 6, 6, 4),
      (3, 3, 4, 4),
    ),
  )
  def test_unusual_convolutions_are_left_to_lax(
    self, kwargs, x_shape, kernel_shape
  ):
    x, kernel = _draw(1, x_shape, kernel_shape)
    kwargs = {"dimension_numbers": _NHWC, **kwargs}
    ours, theirs = (
      convolve(x, kernel, (1, 1), ((1, 1), (1, 1)), **kwargs)
      for convolve in (
        convolution.conv_general_dilated,
        lax.conv_general_dilated,
      )
    )
    np.testing.assert_array_equal(ours, theirs)

  def test_one_dimensional_convolution_is_left_to_lax(self):
    conv = nn.Conv(4, (3,))
    fast = conv.copy(conv_general_dilated=convolution.conv_general_dilated)
    (x,) = _draw(0, (2, 7, 3))
    variables = conv.init(jax.random.key(0), x)
    np.testing.assert_array_equal(
      jax.jit(fast.apply)(variables, x), jax.jit(conv.apply)(variables, x)
    )

  @parameterized.named_parameters(("gpu", "gpu"), ("tpu", "tpu"))
  def test_other_backends_get_lax(self, backend):
    x, kernel = _draw(0, (1, 6, 6, 3), (3, 3, 3, 4))
    with mock.patch.object(jax, "default_backend", lambda: backend):
      jaxpr = _jaxpr(
        lambda x, kernel: convolution.conv_general_dilated(
          x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC
        ),
        x,
        kernel,
      )
    self.assertIn("conv_general_dilated", jaxpr)
    self.assertNotIn("dot_general", jaxpr)

  def test_vmap_over_kernels_equals_lax_one_by_one(self):
    x, kernels = _draw(3, (1, 5, 5, 3), (4, 3, 3, 3, 2))
    ours = jax.jit(jax.vmap(convolution.separable_convolution, (None, 0)))(
      x, kernels
    )
    theirs = jax.jit(
      lambda x, kernels: jnp.stack(
        [
          lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC
          )
          for kernel in kernels
        ]
      )
    )(x, kernels)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)

  def test_half_precision_is_kept(self):
    x, kernel = (
      a.astype(jnp.bfloat16) for a in _draw(0, (1, 5, 5, 3), (3, 3, 3, 2))
    )
    y, grads = _value_and_grads(convolution.separable_convolution, x, kernel)
    self.assertEqual({a.dtype for a in (y, *grads)}, {jnp.dtype(jnp.bfloat16)})


def _norm(num_groups):
  """Group Normalization with the parameters it starts with."""

  @jax.jit
  def norm(x):
    channels = x.shape[-1]
    params = {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}
    return normalization.GroupNorm(num_groups).apply({"params": params}, x)

  return norm


class GroupNormTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("batch_one", (1, 4, 5, 8), 4),
    ("batch", (3, 4, 5, 8), 4),
    ("one_group", (2, 4, 5, 8), 1),
    ("groups_of_one_channel", (2, 4, 5, 8), 8),
    ("vectors", (3, 8), 2),
    ("sequences", (3, 6, 8), 2),
  )
  def test_value_and_gradients_equal_linen(self, shape, num_groups):
    ours = normalization.GroupNorm(num_groups)
    theirs = nn.GroupNorm(num_groups, use_fast_variance=False)
    x, scale, bias = _draw(0, shape, shape[-1:], shape[-1:])
    params = {"params": {"scale": scale, "bias": bias}}
    ours, theirs = (
      jax.tree.leaves(_value_and_grads(module.apply, params, x))
      for module in (ours, theirs)
    )
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  def test_linen_parameters_are_unchanged(self):
    (x,) = _draw(0, (1, 4, 4, 8))
    ours, theirs = (
      jax.jit(module.init)(jax.random.key(0), x)
      for module in (normalization.GroupNorm(4), nn.GroupNorm(4))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)

  def test_a_large_mean_costs_no_digits(self):
    (x,) = _draw(0, (1, 8, 8, 4))
    # Multiples of 1/8 so that adding the mean rounds nothing.
    x = jnp.round(8 * x) / 8
    norm = _norm(2)
    np.testing.assert_allclose(norm(x + 1e5), norm(x), atol=1e-2)

  def test_a_constant_input_gives_the_bias(self):
    norm = normalization.GroupNorm(2)
    params = {"scale": jnp.ones(4), "bias": jnp.arange(4.0)}
    y, grads = _value_and_grads(
      lambda x: norm.apply({"params": params}, x), jnp.full((1, 3, 3, 4), 7.0)
    )
    np.testing.assert_array_equal(y[0, 1, 1], params["bias"])
    self.assertTrue(jnp.isfinite(grads[0]).all())

  def test_one_sample_does_not_see_another(self):
    (x,) = _draw(0, (2, 4, 4, 8))
    norm = _norm(4)
    np.testing.assert_allclose(norm(x)[1], norm(x[1:])[0], rtol=1e-5)

  def test_half_precision_has_statistics_in_single(self):
    (x,) = _draw(0, (1, 32, 32, 4))
    half = x.astype(jnp.bfloat16)
    norm = _norm(1)
    np.testing.assert_allclose(
      norm(half), norm(half.astype(jnp.float32)), rtol=1e-6
    )

  def test_groups_must_divide_the_channels(self):
    with self.assertRaisesRegex(ValueError, "num_groups must divide.*8.*got 3"):
      normalization.GroupNorm(3).init(jax.random.key(0), jnp.ones((1, 2, 2, 8)))


class LayerNormTest(parameterized.TestCase):
  @parameterized.named_parameters(("batch", (3, 8)), ("images", (2, 4, 5, 8)))
  def test_value_and_gradient_equal_linen(self, shape):
    (x,) = _draw(0, shape)
    theirs = nn.LayerNorm(
      use_scale=False, use_bias=False, use_fast_variance=False
    )
    for a, b in zip(
      jax.tree.leaves(_value_and_grads(normalization.layer_norm, x)),
      jax.tree.leaves(_value_and_grads(lambda x: theirs.apply({}, x), x)),
      strict=True,
    ):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

  def test_a_large_mean_costs_no_digits(self):
    (x,) = _draw(0, (1, 64))
    x = jnp.round(8 * x) / 8
    norm = jax.jit(normalization.layer_norm)
    np.testing.assert_allclose(norm(x + 1e4), norm(x), atol=1e-2)

  def test_a_constant_input_gives_zero(self):
    y, grads = _value_and_grads(normalization.layer_norm, jnp.full((1, 4), 7.0))
    np.testing.assert_array_equal(y, jnp.zeros((1, 4)))
    self.assertTrue(jnp.isfinite(grads[0]).all())


class OtherWeightsTest(parameterized.TestCase):
  """What these layers save of a forward pass does not depend on weights."""

  @parameterized.named_parameters(
    ("separable_convolution", layers.conv(4, 3)),
    ("patch_convolution", layers.conv(4, 3, strides=2)),
    ("group_norm", normalization.GroupNorm(2)),
  )
  def test_saved_backward_reads_the_newest_weights_only(self, layer):
    (x,) = _draw(0, (2, 6, 6, 4))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    leaves, treedef = jax.tree.flatten(shapes)
    forward, backward = (
      treedef.unflatten(_draw(seed, *(leaf.shape for leaf in leaves)))
      for seed in (1, 2)
    )
    apply = lambda params, x: layer.apply({"params": params}, x)
    saved = two_version_vjp.saved(apply)
    y, grads = _value_and_grads(
      lambda params, x: saved(forward, params, x), backward, x
    )
    value, _ = _value_and_grads(apply, forward, x)
    _, expected = _value_and_grads(apply, backward, x)
    np.testing.assert_allclose(y, value, rtol=1e-6, atol=1e-6)
    for a, b in zip(
      jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class PoolTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("even", (2, 4, 6, 3)), ("odd", (1, 5, 7, 2)), ("one_pixel", (1, 1, 1, 2))
  )
  def test_max_pool_equals_linen(self, shape):
    (x,) = _draw(0, shape)
    ours, theirs = (
      jax.tree.leaves(_value_and_grads(pool, x))
      for pool in (
        layers.max_pool,
        lambda x: nn.max_pool(x, (2, 2), (2, 2), padding="SAME"),
      )
    )
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_array_equal(a, b)


class InitialiserTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("he_normal", layers.he_normal, (2.0, "fan_out", "normal"), (3, 3, 4, 8)),
    (
      "linear_uniform",
      layers.linear_uniform,
      (1 / 3, "fan_in", "uniform"),
      (12, 5),
    ),
  )
  def test_equals_variance_scaling(self, ours, law, shape):
    theirs = nn.initializers.variance_scaling(*law)
    key = jax.random.key(5)
    np.testing.assert_allclose(
      ours(key, shape), theirs(key, shape), rtol=1e-5, atol=1e-7
    )


if __name__ == "__main__":
  absltest.main()
