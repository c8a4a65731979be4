"""Stage counts, parameter counts, and equality with ordinary networks."""

import functools

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pbp_jax import backward_state, models, network

# As many as the paper has, as recalled; the laws are 9n + 7, 2 conv + 13 and
# 16 * 4 + 14.
_STAGE_COUNTS = {
  "resnet8": 16,
  "resnet20": 34,
  "resnet32": 52,
  "resnet44": 70,
  "resnet56": 88,
  "resnet110": 169,
  "resnet18": 32,
  "resnet50": 78,
  "vgg11": 29,
  "vgg13": 33,
  "vgg16": 39,
  "residual_mlp": 34,
}


def _compose(pipeline, x):
  """Parameters of every stage, and the function of the whole pipeline."""

  def init(key, x):
    params = []
    for s, stage in enumerate(pipeline):
      params.append(stage.init(jax.random.fold_in(key, s), x))
      x, _ = stage(params[-1], None, x, None)
    return tuple(params)

  def apply(params, x, key=None):
    for s, (stage, stage_params) in enumerate(
      zip(pipeline, params, strict=True)
    ):
      stage_key = None if key is None else jax.random.fold_in(key, s)
      x, _ = stage(stage_params, None, x, stage_key)
    return x

  return functools.partial(init, x=x), apply


def _shapes(pipeline, shape):
  """Shapes of all parameters and of the output, nothing computed."""
  x = jnp.zeros(shape)
  init, apply = _compose(pipeline, x)
  params = jax.eval_shape(init, jax.random.key(0))
  return params, jax.eval_shape(apply, params, x)


def _num_params(params):
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def _random_like(tree, scale=0.3):
  """Parameters that no symmetry of an initialisation hides."""
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: jnp.asarray(
      scale * generator.standard_normal(leaf.shape), jnp.float32
    ),
    tree,
  )


class PreactivationResNet(nn.Module):
  """ResNet-6n+2 written down as one ordinary network, with stock layers."""

  num_blocks: int
  width: int

  @nn.compact
  def __call__(self, x):
    conv = functools.partial(nn.Conv, padding=1, use_bias=False)
    norm = functools.partial(
      nn.GroupNorm, self.width // 2, use_fast_variance=False
    )
    x = conv(self.width, (3, 3))(x)
    for group in range(3):
      for block in range(self.num_blocks):
        features = self.width * 2**group
        strides = (2, 2) if group and not block else (1, 1)
        shortcut = x
        if strides == (2, 2):
          shortcut = conv(features, (1, 1), strides, padding=0)(x)
        y = conv(features, (3, 3), strides)(nn.relu(norm()(x)))
        y = conv(features, (3, 3))(nn.relu(norm()(y)))
        x = shortcut + y
    x = nn.relu(norm()(x)).mean((1, 2))
    return nn.Dense(10)(x)


class Vgg11(nn.Module):
  """VGG-11 in evaluation as one ordinary network, with stock layers."""

  width: int

  @nn.compact
  def __call__(self, x):
    for factor, num_convs in ((1, 1), (2, 1), (4, 2), (8, 2), (8, 2)):
      for _ in range(num_convs):
        x = nn.Conv(factor * self.width, (3, 3))(x)
        norm = nn.GroupNorm(self.width // 2, use_fast_variance=False)
        x = nn.relu(norm(x))
      x = nn.max_pool(x, (2, 2), (2, 2))
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(nn.Dense(8 * self.width)(x))
    x = nn.relu(nn.Dense(8 * self.width)(x))
    return nn.Dense(10)(x)


class ResidualMlp(nn.Module):
  """The residual MLP as one ordinary network."""

  num_blocks: int
  width: int

  @nn.compact
  def __call__(self, x):
    norm = nn.LayerNorm(use_bias=False, use_scale=False)
    x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
    for _ in range(self.num_blocks):
      x = x + nn.Dense(self.width)(nn.relu(norm(x)))
    return nn.Dense(10)(nn.relu(norm(x)))


def _by_kind(params):
  """All convolutions, norms and dense layers of stages, in order, by name."""
  layers, counts = {}, {}

  def visit(tree):
    if "kernel" in tree:
      kind = "Conv" if tree["kernel"].ndim == 4 else "Dense"
    elif "scale" in tree:
      kind = "GroupNorm"
    else:
      for subtree in tree.values():
        visit(subtree)
      return
    layers[f"{kind}_{counts.get(kind, 0)}"] = tree
    counts[kind] = counts.get(kind, 0) + 1

  for tree in params:
    visit(tree)
  return {"params": layers}


class ModelsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name, name, count) for name, count in _STAGE_COUNTS.items()
  )
  def test_stage_counts_are_the_papers(self, name, count):
    self.assertLen(models.get(name), count)

  @parameterized.named_parameters(
    (name, name, count)
    for name, count in _STAGE_COUNTS.items()
    if name != "residual_mlp"
  )
  def test_a_narrow_network_has_as_many_stages(self, name, count):
    self.assertLen(models.get(name, width=4), count)

  def test_every_model_is_counted_above(self):
    self.assertCountEqual(models.names(), _STAGE_COUNTS)

  @parameterized.named_parameters((name, name) for name in _STAGE_COUNTS)
  def test_last_stage_is_an_identity_for_the_loss(self, name):
    stage = models.get(name)[-1]
    x = jnp.arange(3.0)
    self.assertEqual(stage.name, "loss")
    self.assertEqual(stage.init(jax.random.key(0), x), {})
    self.assertIs(stage.apply({}, x), x)

  @parameterized.named_parameters(
    ("resnet_color", "resnet8", (2, 32, 32, 3)),
    ("resnet_mnist", "resnet8", (2, 28, 28, 1)),
    ("resnet_digits", "resnet8", (2, 8, 8, 1)),
    ("resnet18_mnist", "resnet18", (2, 28, 28, 1)),
    ("resnet50_imagenet", "resnet50", (2, 224, 224, 3)),
    ("vgg_color", "vgg11", (2, 32, 32, 3)),
    ("vgg_mnist", "vgg11", (2, 28, 28, 1)),
    ("vgg_digits", "vgg11", (2, 8, 8, 1)),
    ("mlp_digits", "residual_mlp", (2, 8, 8, 1)),
    ("mlp_flat", "residual_mlp", (2, 64)),
  )
  def test_outputs_are_logits_for_inputs_of(self, name, shape):
    _, y = _shapes(models.get(name, width=4, num_classes=7), shape)
    self.assertEqual(y.shape, (2, 7))

  def test_resnet20_has_as_many_parameters_as_by_hand(self):
    convs = 9 * (
      3 * 16 + 6 * 16 * 16 + (16 * 32 + 5 * 32 * 32) + (32 * 64 + 5 * 64 * 64)
    )
    projections = 16 * 32 + 32 * 64
    norms = 2 * (6 * 16 + (16 + 5 * 32) + (32 + 5 * 64) + 64)
    linear = 64 * 10 + 10
    params, _ = _shapes(models.resnet(depth=20), (1, 32, 32, 3))
    self.assertEqual(_num_params(params), convs + projections + norms + linear)
    self.assertEqual(_num_params(params), 272_282)

  @parameterized.named_parameters(
    ("resnet18", "resnet18", (1, 32, 32, 3), 11.17),
    ("resnet50", "resnet50", (1, 224, 224, 3), 25.5),
    ("vgg11", "vgg11", (1, 32, 32, 3), 9.76),
    ("vgg16", "vgg16", (1, 32, 32, 3), 15.2),
  )
  def test_millions_of_parameters_are_about(self, name, shape, millions):
    params, _ = _shapes(models.get(name), shape)
    self.assertAlmostEqual(_num_params(params) / 1e6, millions, delta=0.06)

  @parameterized.named_parameters(
    (
      "resnet",
      functools.partial(models.resnet, depth=14, width=4),
      PreactivationResNet(num_blocks=2, width=4),
      (2, 12, 12, 3),
    ),
    (
      "vgg",
      functools.partial(models.vgg, depth=11, width=4),
      Vgg11(width=4),
      (2, 32, 32, 1),
    ),
    (
      "residual_mlp",
      functools.partial(models.residual_mlp, num_stages=6, width=8),
      ResidualMlp(num_blocks=3, width=8),
      (3, 8, 8, 1),
    ),
  )
  def test_stages_equal_an_ordinary_network(self, make, network, shape):
    generator = np.random.default_rng(1)
    x = jnp.asarray(generator.standard_normal(shape), jnp.float32)
    init, apply = _compose(make(), x)
    params = _random_like(jax.eval_shape(init, jax.random.key(0)))
    labels = jnp.arange(shape[0])

    def loss(logits):
      return -jax.nn.log_softmax(logits)[labels, labels].sum()

    @jax.jit
    def ours(params, x):
      return jax.value_and_grad(lambda p, x: loss(apply(p, x)), (0, 1))(
        params, x
      )

    @jax.jit
    def theirs(params, x):
      return jax.value_and_grad(
        lambda p, x: loss(network.apply(_by_kind(p), x)), (0, 1)
      )(params, x)

    for a, b in zip(
      jax.tree.leaves(ours(params, x)),
      jax.tree.leaves(theirs(params, x)),
      strict=True,
    ):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

  def test_a_projection_stands_before_its_blocks_first_convolution(self):
    names = [stage.name for stage in models.resnet(depth=20)]
    at = names.index("group2_block1_projection")
    self.assertEqual(
      names[at - 1 : at + 4],
      [
        "group1_block3_sum",
        "group2_block1_projection",
        "group2_block1_conv1",
        "group2_block1_conv2",
        "group2_block1_sum",
      ],
    )

  def test_group_count_is_constant_and_group_size_two_at_first(self):
    x = jnp.zeros((1, 8, 8, 3))
    init, apply = _compose(models.resnet(depth=8, width=8), x)
    seen = []
    with nn.intercept_methods(_record_groups(seen)):
      jax.eval_shape(apply, jax.eval_shape(init, jax.random.key(0)), x)
    self.assertEqual({groups for groups, _ in seen}, {4})
    self.assertEqual(seen[0], (4, 8))
    self.assertEqual(seen[-1], (4, 32))

  def test_group_size_at_the_first_width_may_be_chosen(self):
    x = jnp.zeros((1, 8, 8, 3))
    init, apply = _compose(models.resnet(depth=8, width=8, group_size=4), x)
    seen = []
    with nn.intercept_methods(_record_groups(seen)):
      jax.eval_shape(apply, jax.eval_shape(init, jax.random.key(0)), x)
    self.assertEqual({groups for groups, _ in seen}, {2})

  @parameterized.named_parameters(
    # 7 norms: two in each of three blocks, and the last.
    ("resnet", "resnet8", 7),
    # Three norms in each of 16 bottleneck blocks, and the last.
    ("resnet50", "resnet50", 49),
    # One after each of 8 convolutions.
    ("vgg", "vgg11", 8),
  )
  def test_online_normalization_gives_each_norm_a_state(self, name, count):
    pipeline = models.get(name, width=4, normalization="online")
    _, states = jax.eval_shape(
      functools.partial(network.init, pipeline),
      jax.random.key(0),
      jnp.zeros((1, 32, 32, 3)),
    )
    values = [
      value for value in backward_state.get(states) if jax.tree.leaves(value)
    ]
    self.assertLen(values, count)

  def test_no_normalization_leaves_no_scales(self):
    params, _ = _shapes(
      models.resnet(depth=8, width=4, normalization="none"), (1, 8, 8, 3)
    )
    paths = [
      jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)
    ]
    self.assertNotEmpty(paths)
    self.assertFalse([path for path in paths if "scale" in path])

  @parameterized.named_parameters(
    ("flattening", 0, (1, 5, 5, 8)), ("plain", 1, (1, 200))
  )
  def test_dropout_stage(self, index, shape):
    pipeline = models.vgg(depth=11, width=4)
    stage = [stage for stage in pipeline if stage.stochastic][index]
    train = jax.jit(lambda x, key: stage.apply({}, x, key))
    x = jnp.ones(shape)
    one, again, other = (train(x, jax.random.key(k)) for k in (1, 1, 2))
    with self.subTest("drops_and_scales_with_a_key"):
      self.assertEqual(set(np.unique(one)), {0.0, 2.0})
    with self.subTest("follows_the_key"):
      np.testing.assert_array_equal(one, again)
      self.assertTrue((one != other).any())
    with self.subTest("does_nothing_in_evaluation"):
      np.testing.assert_array_equal(
        stage.apply({}, x, None), jnp.ones((1, 200))
      )

  @parameterized.named_parameters(
    ("depth_7", models.resnet, {"depth": 7}, r"depth must be 6n \+ 2.*got 7"),
    ("depth_2", models.resnet, {"depth": 2}, r"depth must be 6n \+ 2.*got 2"),
    ("odd_width", models.resnet, {"width": 5}, "width.*group_size=2, got 5"),
    ("zero_width", models.resnet18, {"width": 0}, "width.*positive.*got 0"),
    (
      "group_size",
      models.vgg,
      {"group_size": 0},
      "group_size must be positive, got 0",
    ),
    (
      "width_of_groups",
      models.resnet50,
      {"width": 8, "group_size": 3},
      "width.*multiple of group_size=3, got 8",
    ),
    (
      "batch_norm",
      models.resnet50,
      {"normalization": "batch"},
      "normalization must be one of group, layer, online, none, got 'batch'",
    ),
    ("vgg_depth", models.vgg, {"depth": 19}, "depth must.*11, 13, 16, got 19"),
    ("dropout", models.vgg, {"dropout": 1.0}, "dropout must lie.*got 1.0"),
    (
      "num_stages",
      models.residual_mlp,
      {"num_stages": 2},
      "num_stages must be at least 3.*got 2",
    ),
    ("mlp_width", models.residual_mlp, {"width": 1}, "width must.*got 1"),
  )
  def test_refuses(self, make, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      make(**kwargs)

  def test_unknown_name_lists_what_exists(self):
    with self.assertRaisesRegex(ValueError, "resnet20.*vgg11.*got 'alexnet'"):
      models.get("alexnet")

  @parameterized.named_parameters(("resnet", "resnet8"), ("vgg", "vgg11"))
  def test_flat_images_are_refused(self, name):
    with self.assertRaisesRegex(ValueError, r"\(batch, height.*got \(2, 64\)"):
      _shapes(models.get(name), (2, 64))


def _record_groups(seen):
  def intercept(call, args, kwargs, context):
    if hasattr(context.module, "num_groups") and "epsilon" in dir(
      context.module
    ):
      seen.append((context.module.num_groups, args[0].shape[-1]))
    return call(*args, **kwargs)

  return intercept


if __name__ == "__main__":
  absltest.main()
