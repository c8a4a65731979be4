"""Arms by name: every word builds and trains, and contradictions are told."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from pbp_jax import mitigations
from tests import chain

_STAGES = 3
_SETTINGS = {
  "learning_rate": 0.05,
  "momentum": 0.9,
  "weight_decay": 1e-3,
  "num_updates": 8,
}
_WORDS = [*pbp.presets.CONSISTENCIES, *pbp.presets.MITIGATIONS]


def _weights():
  """New arrays: one seen in float32 was float32 again under x64."""
  return {"w": np.array([[0.3, -0.2], [0.5, 0.4]]), "b": np.ones(2)}


def _arm(name, **settings):
  return pbp.presets.make_arm(name, _STAGES, **(_SETTINGS | settings))


def _train(arm, optimizer=None, count=8):
  """Losses and weights of a few micro-batches on a tiny chain."""
  dense = chain.given(_weights())
  simulator = pbp.Simulator(
    (dense, dense, *pbp.as_stages([lambda x: x])),
    chain.squared_error,
    optimizer or arm.optimizer,
    arm.schedule,
    backward=arm.backward,
  )
  inputs = jnp.sin(jnp.arange(2.0 * count)).reshape(count, 1, 2)

  @jax.jit
  def run(key):
    state = simulator.init(key, inputs[0])
    state, metrics = simulator.run(state, inputs, 4 * jnp.cos(inputs))
    return metrics["loss"], state.params

  return run(jax.random.key(0))


@functools.cache
def _plain_losses():
  return np.asarray(_train(_arm("pb"))[0])


def _updates(make_optimizer, numbers=()):
  """What optimizers make of given gradients, and the views they leave.

  Args:
    make_optimizer: `make_optimizer(*numbers)`.
    numbers: What to map over, if anything.
  """
  params = jax.tree.map(jnp.asarray, (_weights(), _weights(), {}))
  rng = np.random.default_rng(0)
  gradients = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=(12, *leaf.shape)), leaf.dtype),
    params,
  )

  def run(*numbers):
    optimizer = optax.with_extra_args_support(make_optimizer(*numbers))

    def step(carry, gradients):
      params, state = carry
      stale = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
      updates, state = optimizer.update(
        gradients, state, params, stale_params=stale
      )
      params = optax.apply_updates(params, updates)
      return (params, state), (updates, pbp.predict_params(state, params))

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

  return jax.jit(jax.vmap(run) if numbers else run)(*numbers)


def _assert_close(got, expected, rtol):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10),
    got,
    expected,
  )


class ArmsTest(parameterized.TestCase):
  @parameterized.named_parameters((word, word) for word in _WORDS)
  def test_word_trains_and_makes_a_difference(self, word):
    losses, params = _train(_arm(f"pb+{word}"))
    for leaf in jax.tree.leaves((losses, params)):
      self.assertTrue(np.isfinite(leaf).all())
    self.assertFalse(np.array_equal(losses, _plain_losses()))

  @parameterized.named_parameters((base, base) for base in pbp.presets.BASES)
  def test_base_trains(self, base):
    losses, _ = _train(_arm(base))
    self.assertTrue(np.isfinite(losses).all())

  def test_all_listed_arms_can_be_made(self):
    names = pbp.presets.list_arms()
    self.assertLen(set(names), len(names))
    for name in names:
      self.assertEqual(_arm(name).name, name)

  def test_every_word_is_in_a_listed_arm_and_in_the_description(self):
    listed = {w for name in pbp.presets.list_arms() for w in name.split("+")}
    self.assertLessEqual({*_WORDS, *pbp.presets.BASES} - {"recompute"}, listed)
    rows = pbp.presets.describe_arms()
    self.assertEqual(
      [row.name for row in rows],
      [*pbp.presets.BASES, *(f"+{word}" for word in _WORDS)],
    )
    for row in rows:
      self.assertTrue(row.formula and row.source, row)
      self.assertNotIn("\n", row.formula + row.source)

  @parameterized.parameters("1f1b+t2", "pb+stash+rebuild", "1f1b+t1+t2")
  def test_view_that_no_pass_sees_is_refused(self, name):
    with self.assertRaisesRegex(ValueError, "must not say '(t2|rebuild)'"):
      _arm(name)
    self.assertNotIn(name, pbp.presets.list_arms())

  def test_order_of_words_makes_no_difference(self):
    name, turned = "pb+shrink+scd+ef", "pb+ef+shrink+scd"
    self.assertEqual(_arm(name).family, _arm(turned).family)
    jax.tree.map(
      np.testing.assert_array_equal,
      _updates(lambda: _arm(name).optimizer),
      _updates(lambda: _arm(turned).optimizer),
    )

  def test_links_stand_in_the_order_of_their_places(self):
    arm = _arm("pb+lwpwd+ef+staleness+scd+clip+dc+shrink")
    delay = arm.schedule.delay
    by_hand = optax.chain(
      pbp.shrink_gradients(0.8),
      pbp.delay_compensation(),
      pbp.clip_by_stage_norm(1.0),
      optax.add_decayed_weights(1e-3),
      pbp.spike_compensation(0.9, delay),
      pbp.scale_by_staleness(delay),
      optax.scale_by_learning_rate(0.05),
      pbp.error_feedback(),
      pbp.linear_weight_prediction(delay, "weight"),
    )
    jax.tree.map(
      np.testing.assert_array_equal,
      _updates(lambda: arm.optimizer),
      _updates(lambda: by_hand),
    )

  @parameterized.named_parameters(
    (
      "gap_aware_divides_the_decay_too",
      "pb+gap",
      [pbp.gap_aware(0.9, 0.05), optax.trace(0.9)],
    ),
    (
      "stagewise_scales_rate_and_momentum",
      "pb+stagewise",
      [
        pbp.spike_compensation(pbp.stage_momenta(0.9, _STAGES), delay=0),
        pbp.scale_by_stage(pbp.stage_rate_factors(_STAGES)),
      ],
    ),
    (
      "t1_anneals_within_a_quarter_of_the_run",
      "pb+t1",
      [optax.trace(0.9), pbp.scale_by_staleness([4, 2, 0], annealing_steps=2)],
    ),
    ("base_is_momentum", "pb", [optax.trace(0.9)]),
  )
  def test_arm_is_its_chain(self, name, links):
    by_hand = optax.chain(
      optax.add_decayed_weights(1e-3),
      *links,
      optax.scale_by_learning_rate(0.05),
    )
    _assert_close(
      _updates(lambda: _arm(name).optimizer),
      _updates(lambda: by_hand),
      rtol=1e-6,
    )

  def test_places_that_a_mitigation_fills_itself_stay_empty(self):
    whole = mitigations.Mitigation(
      role="momentum",
      replaces=("learning rate", "decay"),
      make=lambda context: optax.scale(-0.25),
      formula="",
      source="",
    )
    with absltest.mock.patch.dict(pbp.presets.MITIGATIONS, whole=whole):
      arm = _arm("pb+whole")
    self.assertEqual(arm.numbers, {})
    updates, _ = _updates(lambda: arm.optimizer)
    expected, _ = _updates(lambda: optax.scale(-0.25))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


class FamiliesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (
      "pb",
      ["pb", "pb+sc2d", "pb+lwpv2d", "pb+lwpvd+scd"],
    ),
    ("with_a_link", ["pb+shrink", "pb+scd+shrink", "pb+shrink+lwpvd"]),
    ("stashed", ["pb+stash", "pb+stash+lwpvd", "pb+stash+sc2d"]),
  )
  def test_stacked_arms_are_each_its_own_optimizer(self, names):
    self.enter_context(jax.enable_x64(True))
    arms = [_arm(name) for name in names]
    self.assertLen({arm.family for arm in arms}, 1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[a.numbers for a in arms])
    together = _updates(arms[0].make_optimizer, (stacked,))
    for i, arm in enumerate(arms):
      _assert_close(
        jax.tree.map(lambda x, i=i: x[i], together),
        _updates(lambda arm=arm: arm.optimizer),
        rtol=1e-12,
      )

  def test_arms_of_other_structures_are_no_family(self):
    names = ["pb", "1f1b", "pb+stash", "pb+recompute", "pb+shrink", "pb+lwpwd"]
    families = {_arm(name).family for name in names}
    self.assertLen(families, len(names))


class RefusalsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("base", "bp", "unknown word 'bp'.*Did you mean 'pb'.*1f1b.*scd"),
    ("word", "pb+lwpd", "unknown word 'lwpd'.*Did you mean 'lwp.*lwpv2d"),
    ("empty", "", "unknown word ''"),
    ("base_in_the_middle", "pb+1f1b", "unknown word '1f1b'"),
    ("twice", "pb+scd+scd", "twice"),
    ("no_delay", "sgdm+scd", "no delay"),
    ("two_momenta", "pb+scd+sc2d", "one momentum .*scd, sc2d.*'scd' and 'sc2d"),
    ("two_views", "pb+lwpvd+lwpwd", "at most one view"),
    ("two_rates", "pb+t1+staleness", "at most one rate"),
    ("two_corrections", "pb+dc+dca", "at most one correction"),
    ("stash_and_recompute", "pb+stash+recompute", "must not recompute"),
    ("stashed_already", "1f1b+recompute", "must not recompute"),
    ("rates_and_velocity", "pb+staleness+lwpvd", "'staleness'.*'lwpvd'"),
    ("rates_and_gap", "pb+stagewise+gap", "'stagewise'.*'gap'"),
  )
  def test_name_is_refused(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      _arm(name)

  def test_annealing_needs_the_length_of_the_run(self):
    with self.assertRaisesRegex(ValueError, "num_updates must be given"):
      _arm("pb+t1", num_updates=None)

  def test_a_word_of_two_tables_is_refused(self):
    with self.assertRaisesRegex(ValueError, "unique.*scd"):
      mitigations.entry.merge(
        {"scd": pbp.presets.MITIGATIONS["scd"]},
        {"scd": pbp.presets.MITIGATIONS["scd"]},
      )

  def test_an_unknown_place_is_refused(self):
    with self.assertRaisesRegex(ValueError, "role and replaces must.*nowhere"):
      mitigations.Mitigation(
        role="nowhere", make=lambda c: optax.identity(), formula="", source=""
      )


if __name__ == "__main__":
  absltest.main()
