"""The pipeline on devices against the known answers of pipelined training.

Compiling a case takes seconds: those that have most in them are run, and all
with `PBP_LONG=1`.
"""

import os

from absl.testing import absltest, parameterized
import jax
import numpy as np

from tests import chain
from tests.reference import known_answers

_CASES = {
  name: case
  for name, case in known_answers.load("pipeline_chain").items()
  if case["settings"].get("pipelined", True)
}
_RUN = (
  list(_CASES)
  if "PBP_LONG" in os.environ
  else [
    "pb_lwpvd_scd_weight_decay",
    "pb_lwpvd_scd_recompute",
    "pb_lwpvd_scd_stash",
    "pb_lwpwd_scd",
    "pb_accumulate3_lwpvd_scd",
  ]
)


class KnownAnswersTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in _RUN)
  def test_agrees_to_ten_digits(self, name):
    case = _CASES[name]
    simulator = chain.simulator(case["settings"])
    inputs, targets = chain.samples()
    pipeline = chain.on_devices(simulator, (inputs[0], targets[0]))
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.run(state, inputs, targets, drain=True)
    losses = np.asarray(metrics["loss"])
    self.assertEqual(losses.dtype, np.float64)
    close = lambda got, expected: np.testing.assert_allclose(
      got, expected, rtol=0, atol=1e-10
    )
    close(losses[:3], case["loss_first"])
    close(losses[-3:], case["loss_last"])
    close(losses.mean(), case["loss_mean"])
    params = pipeline.gather(state).params
    for got, expected in zip(params, case["final_params"], strict=True):
      self.assertEqual(set(got), set(expected))
      for leaf in expected:
        close(got[leaf], expected[leaf])

  def test_there_are_sixteen(self):
    self.assertLen(_CASES, 16)


if __name__ == "__main__":
  absltest.main()
