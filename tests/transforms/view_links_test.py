"""Published views against their formulas, written down again in NumPy.

Gradients are given, so that a method's updates and views depend on nothing but
its formula; three stages, each a vector of two, in float64.
"""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pbp_jax as pbp
from tests.transforms import gradient_sequences

_RATE = 0.1
_M = 0.8


def _falling(count):
  return 0.1 / (count + 1)


def _rate(rate, t):
  return rate(t) if callable(rate) else rate


def _momentum_chain(link, rate=_RATE, momentum=_M):
  """The link after an optax SGD with momentum."""
  return optax.chain(
    optax.trace(momentum), optax.scale_by_learning_rate(rate), link
  )


def _sgdm(gradients, rate=_RATE, momentum=_M):
  """Yields weights, velocity and the last update, from version 0 on."""
  w = gradient_sequences.start()
  v, u = np.zeros_like(w), np.zeros_like(w)
  yield w, v, u
  for t, g in enumerate(gradients):
    v = momentum * v + g
    u = -_rate(rate, t) * v
    w = w + u
    yield w, v, u


def _adam(gradients, rate=_RATE, decay=0.0, b1=0.9, b2=0.999, eps=1e-8):
  """Yields weights, both moments and the last direction, from version 0 on."""
  w = gradient_sequences.start()
  m, v, direction = (np.zeros_like(w) for _ in range(3))
  yield w, m, v, direction
  for t, g in enumerate(gradients):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    direction = (m / (1 - b1 ** (t + 1))) / (
      np.sqrt(v / (1 - b2 ** (t + 1))) + eps
    )
    w = w - _rate(rate, t) * (direction + decay * w)
    yield w, m, v, direction


def _column(values):
  return np.asarray(values, dtype=float)[:, None]


def _spectrain(gradients, delay, lead, rate):
  for t, (w, v, _) in enumerate(_sgdm(gradients, rate)):
    reach = _rate(rate, t) * v
    yield (
      w,
      w - _column(np.add(delay, lead)) * reach,
      w - _column(lead) * reach,
    )


def _msnag(gradients, delay, rate, momentum):
  for t, (w, v, _) in enumerate(_sgdm(gradients, rate, momentum)):
    ahead = w.copy()
    for s, stage_delay in enumerate(delay):
      velocity = v[s].copy()
      for k in range(stage_delay):
        velocity = momentum * velocity
        ahead[s] -= _rate(rate, t + k) * velocity
    yield w, ahead, w


def _msnag_adam(gradients, delay, rate, decay, b1=0.9, b2=0.999, eps=1e-8):
  for t, (w, m, v, _) in enumerate(_adam(gradients, rate, decay, b1, b2, eps)):
    ahead = w.copy()
    for s, stage_delay in enumerate(delay):
      for k in range(1, stage_delay + 1):
        rate_k = _rate(rate, t + k - 1)
        ahead[s] *= 1 - rate_k * decay
        ahead[s] -= (
          rate_k / (1 - b1 ** (t + k)) * b1**k * m[s]
          / (np.sqrt(v[s]) / np.sqrt(1 - b2 ** (t + k)) + eps)
        )  # fmt: skip
    yield w, ahead, w


def _along_momentum(gradients, forward, backward, rate):
  for t, (w, v, _) in enumerate(_sgdm(gradients, rate)):
    reach = _rate(rate, t) * v
    yield w, w - _column(forward) * reach, w - _column(backward) * reach


def _along_adam(gradients, forward, backward, rate):
  for t, (w, _, _, direction) in enumerate(_adam(gradients, rate)):
    reach = _rate(rate, t) * direction
    yield w, w - _column(forward) * reach, w - _column(backward) * reach


def _past(gradients, delay, decays):
  average = 0.0
  for t, (w, _, u) in enumerate(_sgdm(gradients)):
    if t > 0:
      average = _column(decays) * average + (1 - _column(decays)) * u
    yield w, w, w - _column(delay) * average


def _nesterov(gradients, rate, momenta):
  w = last = gradient_sequences.start()
  for t in range(len(gradients) + 1):
    ahead = momenta(t) * (w - last)
    yield w, w + ahead, w + ahead
    if t < len(gradients):
      step = _rate(rate, t) * (1 - momenta(t)) * gradients[t]
      w, last = w + ahead - step, w


def _nadam(gradients, rate, b1, b2=0.999, eps=1e-8, psi=0.004):
  w = gradient_sequences.start()
  m, v, product = np.zeros_like(w), np.zeros_like(w), 1.0
  yield w, w, w
  for t, g in enumerate(gradients, start=1):
    now = b1 * (1 - 0.5 * 0.96 ** (t * psi))
    following = b1 * (1 - 0.5 * 0.96 ** ((t + 1) * psi))
    product = product * now
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    m_hat = following * m / (1 - product * following)
    m_hat = m_hat + (1 - now) * g / (1 - product)
    w = w - rate * m_hat / (np.sqrt(v / (1 - b2**t)) + eps)
    yield w, w, w


def _cases():
  """Name, optimizer, and the same as a function of the gradients."""
  delay = [3, 1, 0]
  for name, rate, lead in (
    ("constant_rate", _RATE, None),
    ("schedule_and_given_lead", _falling, [0.0, 0.5, 1.0]),
  ):
    yield (
      f"spectrain_{name}",
      _momentum_chain(pbp.spectrain(delay, rate, lead), rate),
      lambda g, rate=rate, lead=lead: _spectrain(
        g, delay, [0, 1, 2] if lead is None else lead, rate
      ),
    )
  for name, rate, momentum in (
    ("constant_rate", _RATE, 0.8),
    ("schedule", _falling, 0.5),
  ):
    yield (
      f"msnag_{name}",
      _momentum_chain(pbp.msnag(delay, momentum, rate), rate, momentum),
      lambda g, rate=rate, momentum=momentum: _msnag(g, delay, rate, momentum),
    )
  yield (
    "msnag_adam_constant_rate",
    optax.chain(optax.adam(_RATE), pbp.msnag_adam(delay, _RATE)),
    lambda g: _msnag_adam(g, delay, _RATE, 0.0),
  )
  yield (
    "msnag_adamw_schedule",
    optax.chain(
      optax.adamw(_falling, b1=0.7, b2=0.95, eps=1e-3, weight_decay=0.2),
      pbp.msnag_adam(
        delay, _falling, b1=0.7, b2=0.95, eps=1e-3, weight_decay=0.2
      ),
    ),
    lambda g: _msnag_adam(g, delay, _falling, 0.2, 0.7, 0.95, 1e-3),
  )
  for name, rate, horizon in (
    ("constant_rate", _RATE, delay),
    ("schedule", _falling, [2.5, 1.0, 0.0]),
  ):
    yield (
      f"pipeoptim_after_momentum_{name}",
      optax.chain(
        optax.trace(_M),
        pbp.pipeoptim(horizon, rate),
        optax.scale_by_learning_rate(rate),
      ),
      lambda g, rate=rate, horizon=horizon: _along_momentum(
        g, horizon, [0, 0, 0], rate
      ),
    )
    yield (
      f"pipeoptim_after_adam_{name}",
      optax.chain(
        optax.scale_by_adam(),
        pbp.pipeoptim(horizon, rate),
        optax.scale_by_learning_rate(rate),
      ),
      lambda g, rate=rate, horizon=horizon: _along_adam(
        g, horizon, [0, 0, 0], rate
      ),
    )
  for name, rate, horizons in (
    ("constant_rate", _RATE, ([2, 2, 1], [0, 0, 1])),
    ("schedule", _falling, ([1, 1, 1], [1, 2, 0])),
  ):
    yield (
      f"xpipe_{name}",
      optax.chain(
        optax.scale_by_adam(),
        pbp.xpipe(*horizons, rate),
        optax.scale_by_learning_rate(rate),
      ),
      lambda g, rate=rate, horizons=horizons: _along_adam(g, *horizons, rate),
    )
  for name, tau, decay in (
    ("default", [4.0, 1.5, 0.0], np.exp(-2)),
    ("given", [1.0, 3.0, 2.0], 0.3),
  ):
    kept = [decay ** (1 / t) if t else 0.0 for t in tau]
    yield (
      f"discrepancy_correction_{name}",
      _momentum_chain(
        pbp.discrepancy_correction(tau)
        if name == "default"
        else pbp.discrepancy_correction(tau, decay)
      ),
      lambda g, tau=tau, kept=kept: _past(g, tau, kept),
    )
    yield (
      f"reconstructed_weights_{name}",
      _momentum_chain(pbp.reconstructed_weights(tau)),
      lambda g, tau=tau: _past(g, tau, [t / (t + 1) for t in tau]),
    )
  staged = np.array([0.96, 0.93, 0.9])
  yield (
    "nesterov_stage_adaptive",
    pbp.asynchronous_nesterov(_RATE, pbp.stage_adaptive_momentum([2, 1, 0], 3)),
    lambda g: _nesterov(g, _RATE, lambda t: staged[:, None]),
  )
  yield (
    "nesterov_scheduled",
    pbp.asynchronous_nesterov(_falling, pbp.nadam_momentum(0.95, 0.5)),
    lambda g: _nesterov(
      g, _falling, lambda t: 0.95 * (1 - 0.5 * 0.96 ** (0.5 * (t + 1)))
    ),
  )
  yield (
    "nadam_default",
    optax.chain(
      pbp.scale_by_asynchronous_nadam(), optax.scale_by_learning_rate(_RATE)
    ),
    lambda g: _nadam(g, _RATE, 0.99),
  )
  yield (
    "nadam_stage_adaptive",
    optax.chain(
      pbp.scale_by_asynchronous_nadam(staged, 0.9, 1e-3, 0.2),
      optax.scale_by_learning_rate(_RATE),
    ),
    lambda g: _nadam(g, _RATE, staged[:, None], 0.9, 1e-3, 0.2),
  )


class FormulaTest(parameterized.TestCase):
  @parameterized.named_parameters(*_cases())
  def test_weights_and_both_views_are_the_formula(self, optimizer, formula):
    gradients = gradient_sequences.gradients()
    with jax.enable_x64(True):
      versions = gradient_sequences.run(optimizer, gradients)
    for t, (got, expected) in enumerate(
      zip(versions, formula(gradients), strict=True)
    ):
      for what, a, b in zip(
        ("weights", "forward view", "backward view"), got, expected, strict=True
      ):
        np.testing.assert_allclose(
          a, b, rtol=1e-12, atol=1e-14, err_msg=f"{what} of version {t}"
        )


class HelperFormulaTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("one_micro_batch", 5, 1, [4, 4, 3, 3, 2], [0, 0, 1, 1, 2]),
    ("four", 6, 4, [2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]),
  )
  def test_xpipe_horizons(self, num_stages, interval, forward, backward):
    got = pbp.xpipe_horizons(num_stages, interval)
    np.testing.assert_array_equal(got, (forward, backward))

  def test_nadam_momentum_starts_at_half_and_ends_at_b1(self):
    momentum = pbp.nadam_momentum(0.99)
    self.assertAlmostEqual(float(momentum(0)), 0.495081, places=5)
    self.assertAlmostEqual(float(momentum(100_000)), 0.99, places=5)

  def test_stage_adaptive_momentum_spans_nine_tenths_to_one(self):
    got = pbp.stage_adaptive_momentum(np.arange(4)[::-1], 4)
    np.testing.assert_allclose(got, [0.9675, 0.945, 0.9225, 0.9])


_ADAM = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(_RATE))


class NeutralTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("spectrain", _momentum_chain(pbp.spectrain(0, _RATE, 0))),
    ("msnag", _momentum_chain(pbp.msnag(0, _M, _RATE))),
    ("msnag_schedule", _momentum_chain(pbp.msnag(0, _M, _falling))),
    (
      "msnag_adam",
      optax.chain(_ADAM, pbp.msnag_adam(0, _RATE, weight_decay=0.1)),
    ),
    ("pipeoptim", _momentum_chain(pbp.pipeoptim(0, _RATE))),
    ("xpipe", _momentum_chain(pbp.xpipe(0, 0, _RATE))),
    ("discrepancy_correction", _momentum_chain(pbp.discrepancy_correction(0))),
    ("reconstructed_weights", _momentum_chain(pbp.reconstructed_weights(0))),
    ("nesterov", pbp.asynchronous_nesterov(_RATE, 0.0)),
  )
  def test_zero_horizon_shows_the_raw_weights_bit_for_bit(self, optimizer):
    for w, *seen in gradient_sequences.run(
      optimizer, gradient_sequences.gradients()
    ):
      for view in seen:
        np.testing.assert_array_equal(view, w)

  @parameterized.named_parameters(
    ("spectrain", _momentum_chain(pbp.spectrain(3, _RATE))),
    ("msnag", _momentum_chain(pbp.msnag(3, _M, _RATE))),
    ("discrepancy_correction", _momentum_chain(pbp.discrepancy_correction(3))),
    ("reconstructed_weights", _momentum_chain(pbp.reconstructed_weights(3))),
    ("msnag_adam", optax.chain(_ADAM, pbp.msnag_adam(3, _RATE))),
    (
      "xpipe",
      optax.chain(
        optax.scale_by_adam(),
        pbp.xpipe(3, 1, _RATE),
        optax.scale_by_learning_rate(_RATE),
      ),
    ),
  )
  def test_a_view_changes_no_update_bit_for_bit(self, optimizer):
    gradients = gradient_sequences.gradients()
    plain = _ADAM
    if any(hasattr(s, "trace") for s in optimizer.init([jnp.ones(2)])):
      plain = _momentum_chain(optax.identity())
    for got, expected in zip(
      gradient_sequences.run(optimizer, gradients),
      gradient_sequences.run(plain, gradients),
      strict=True,
    ):
      np.testing.assert_array_equal(got[0], expected[0])

  def test_nesterov_without_momentum_is_sgd(self):
    gradients = gradient_sequences.gradients()
    for got, expected in zip(
      gradient_sequences.run(pbp.asynchronous_nesterov(_RATE, 0.0), gradients),
      gradient_sequences.run(optax.sgd(_RATE), gradients),
      strict=True,
    ):
      np.testing.assert_array_equal(got[0], expected[0])


class ErrorTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("spectrain_delay", lambda: pbp.spectrain(-1, 0.1), "delay"),
    (
      "spectrain_lead",
      lambda: pbp.spectrain(1, 0.1, -1.0),
      "backward_horizon",
    ),
    ("spectrain_rate", lambda: pbp.spectrain(1, None), "learning_rate"),
    ("msnag_momentum", lambda: pbp.msnag(1, 1.5, 0.1), "momentum"),
    (
      "msnag_fraction_of_schedule",
      lambda: pbp.msnag(1.5, 0.5, _falling),
      "horizon must hold ints",
    ),
    (
      "msnag_adam_fraction",
      lambda: pbp.msnag_adam(1.5, 0.1),
      "horizon must hold ints",
    ),
    ("msnag_adam_eps", lambda: pbp.msnag_adam(1, 0.1, eps=0.0), "eps"),
    ("pipeoptim", lambda: pbp.pipeoptim(-1, 0.1), "horizon"),
    ("xpipe_forward", lambda: pbp.xpipe(-1, 0, 0.1), "forward_horizon"),
    ("xpipe_backward", lambda: pbp.xpipe(0, -1, 0.1), "backward_horizon"),
    ("xpipe_horizons", lambda: pbp.xpipe_horizons(0), "num_stages"),
    (
      "discrepancy_delay",
      lambda: pbp.discrepancy_correction(-1),
      "delay",
    ),
    (
      "discrepancy_decay",
      lambda: pbp.discrepancy_correction(1, 1.0),
      "decay",
    ),
    ("reconstructed", lambda: pbp.reconstructed_weights(-1), "delay"),
    (
      "nesterov_momentum",
      lambda: pbp.asynchronous_nesterov(0.1, 1.1),
      "momentum",
    ),
    ("nadam_b1", lambda: pbp.scale_by_asynchronous_nadam(b1=1.0), "b1"),
    (
      "stage_adaptive",
      lambda: pbp.stage_adaptive_momentum([5, 0, 0, 0], 4),
      "delay must hold",
    ),
    (
      "stage_adaptive_of_fewer_stages",
      lambda: pbp.stage_adaptive_momentum([2, 1, 0], 4),
      r"^delay must have one .* shape \(4,\), got \[2, 1, 0\]\.",
    ),
    (
      "stage_adaptive_of_all_stages",
      lambda: pbp.stage_adaptive_momentum(2, 4),
      r"^delay must have one .* shape \(4,\), got 2\.",
    ),
  )
  def test_a_wrong_argument_is_named(self, make, name):
    with self.assertRaisesRegex(ValueError, name):
      make()

  @parameterized.named_parameters(
    ("spectrain", lambda delay: pbp.spectrain(delay, 0.1), "delay"),
    ("msnag", lambda delay: pbp.msnag(delay, 0.5, 0.1), "horizon"),
    ("msnag_adam", lambda delay: pbp.msnag_adam(delay, 0.1), "horizon"),
    ("pipeoptim", lambda delay: pbp.pipeoptim(delay, 0.1), "forward_horizon"),
    ("discrepancy", pbp.discrepancy_correction, "delay"),
    ("reconstructed", pbp.reconstructed_weights, "delay"),
  )
  def test_a_misfit_with_the_stages_is_named_at_init(self, make, name):
    link = make([1, 2])
    with self.assertRaisesRegex(ValueError, f"{name} must be a real scalar"):
      link.init([jnp.ones(2)] * 3)

  def test_spectrain_needs_stages_to_count(self):
    with self.assertRaisesRegex(ValueError, "backward_horizon must be given"):
      pbp.spectrain(1, 0.1).init({"w": jnp.ones(2)})

  @parameterized.named_parameters(
    ("none", (), "found 0 states"),
    ("two", (optax.scale_by_adam(), optax.scale_by_adam()), "found 2 states"),
  )
  def test_msnag_adam_needs_one_adam(self, others, message):
    params = jnp.ones(2)
    state = optax.chain(*others, pbp.msnag_adam(1, 0.1)).init(params)
    with self.assertRaisesRegex(ValueError, message):
      pbp.predict_params(state, params)

  @parameterized.named_parameters(
    ("spectrain", pbp.spectrain(1, 0.1), "xpipe, which"),
    ("msnag", pbp.msnag(1, 0.9, 0.1), "msnag_adam after Adam"),
    (
      "velocity",
      pbp.linear_weight_prediction(1, learning_rate=0.1),
      'form="weight", which',
    ),
  )
  def test_a_prediction_along_momentum_says_what_fits_without(
    self, link, instead
  ):
    params = [jnp.ones(2)]
    state = optax.chain(optax.adam(0.1), link).init(params)
    message = f"no momentum buffer .*, or use {instead}"
    with self.assertRaisesRegex(ValueError, message):
      pbp.predict_params(state, params)
    momenta = optax.trace(0.9), optax.trace(0.9)
    state = optax.chain(*momenta, link).init(params)
    message = f"found 2 momentum buffers .*, or use {instead}"
    with self.assertRaisesRegex(ValueError, message):
      pbp.predict_params(state, params)


if __name__ == "__main__":
  absltest.main()
