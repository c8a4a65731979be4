"""The NumPy twin against numbers that programs of other hands made."""

from absl.testing import absltest, parameterized
import numpy as np

from tests.reference import (
  known_answers,
  optimizers,
  pipeline,
  stages,
  timetables,
)

_CHAIN = known_answers.load("pipeline_chain")


class KnownAnswersTest(parameterized.TestCase):
  def test_eighteen_cases_are_covered(self):
    self.assertLen(_CHAIN, 18)

  @parameterized.named_parameters((name, name) for name in _CHAIN)
  def test_twin_reproduces(self, name):
    case = _CHAIN[name]
    result = known_answers.run(case["settings"])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    close(result.losses[:3], case["loss_first"])
    close(result.losses[-3:], case["loss_last"])
    close(result.losses.mean(), case["loss_mean"])
    for got, expected in zip(result.params, case["final_params"], strict=True):
      for leaf in ("w", "b"):
        close(got[leaf], np.array(expected[leaf]))


class StagesTest(parameterized.TestCase):
  """Each hand-written backward against central differences."""

  @parameterized.named_parameters(
    ("dense_tanh", stages.dense_tanh, False),
    ("open_branch", stages.open_branch, False),
    ("in_branch", stages.in_branch, True),
    ("close_branch", stages.close_branch, True),
    ("identity", stages.identity, False),
  )
  def test_backward_is_the_derivative(self, stage, takes_a_branch):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 3)), "b": rng.normal(size=3)}
    shape = (2, 2, 3) if takes_a_branch else (2, 3)
    as_activation = tuple if takes_a_branch else np.asarray
    x = rng.normal(size=shape)
    y, saved = stage.forward(params, as_activation(x))
    dy = rng.normal(size=np.shape(y))
    grads, dx = stage.backward(
      params, saved, tuple(dy) if isinstance(y, tuple) else dy
    )

    def value(params, x):
      y, _ = stage.forward(params, as_activation(x))
      return np.sum(np.asarray(y) * dy)

    self._check(lambda x: value(params, x), x, np.asarray(dx))
    for name, grad in grads.items():
      self._check(
        lambda leaf, name=name: value({**params, name: leaf}, x),
        params[name],
        grad,
      )

  def _check(self, function, at, derivative):
    for index in np.ndindex(at.shape):
      step = np.zeros_like(at)
      step[index] = 1e-6
      slope = (function(at + step) - function(at - step)) / 2e-6
      self.assertAlmostEqual(slope, derivative[index], delta=1e-7)


class TimetablesTest(parameterized.TestCase):
  """The delays of `Schedules and their delays`, from what the twin read."""

  @parameterized.named_parameters(
    ("synchronous", timetables.synchronous, 1, lambda s: 0),
    ("fill_drain", lambda S, N: timetables.fill_drain(S, N, 3), 3, lambda s: 0),
    (
      "pipelined_backprop",
      timetables.pipelined_backprop,
      1,
      lambda s: 2 * (3 - s),
    ),
    ("one_f_one_b", timetables.one_f_one_b, 1, lambda s: 3 - s),
  )
  def test_delay_is_the_published_one(self, timetable, interval, delay):
    result = self._run(timetable, interval)
    update = np.arange(12) // interval
    for s in range(4):
      np.testing.assert_array_equal(
        result.forward_versions[s], np.maximum(update - delay(s), 0)
      )
      np.testing.assert_array_equal(result.backward_versions[s], update)

  def test_fill_drain_meets_the_weights_of_one_large_batch(self):
    result = self._run(lambda S, N: timetables.fill_drain(S, N, 3), 3)
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(2, 12, 1, 3))
    large = self._run(
      timetables.synchronous,
      1,
      inputs=inputs.reshape(4, 3, 3),
      targets=targets.reshape(4, 3, 3),
      loss=lambda y, t: tuple(v / 3 for v in stages.squared_error(y, t)),
    )
    for got, expected in zip(result.params, large.params, strict=True):
      for name in got:
        np.testing.assert_allclose(got[name], expected[name], atol=1e-14)

  def _run(self, timetable, interval, inputs=None, targets=None, loss=None):
    rng = np.random.default_rng(0)
    chain = [
      stages.open_branch,
      stages.in_branch,
      stages.close_branch,
      stages.dense_tanh,
    ]
    params = [
      {}
      if stage is stages.close_branch
      else {"w": rng.normal(size=(3, 3)), "b": rng.normal(size=3)}
      for stage in chain
    ]
    if inputs is None:
      inputs, targets = np.random.default_rng(1).normal(size=(2, 12, 1, 3))
    return pipeline.run(
      timetable(4, len(inputs)),
      chain,
      params,
      optimizers.sgdm(0.1, 0.9),
      loss or stages.squared_error,
      inputs,
      targets,
      update_interval=interval,
    )


if __name__ == "__main__":
  absltest.main()
