"""The code in docs/devices.md runs."""

import pathlib
import re

from absl.testing import absltest
import jax
import numpy as np

_DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "devices.md"


class DocumentTest(absltest.TestCase):
  def test_python_blocks_run(self):
    blocks = re.findall(r"```python\n(.*?)```", _DOCUMENT.read_text(), re.S)
    self.assertNotEmpty(blocks)
    for block in blocks:
      # It must not depend on the strictness of the tests.
      with jax.numpy_rank_promotion("allow"):
        names = {}
        exec(block, names)
      self.assertTrue(np.isfinite(names["metrics"]["loss"]).all())


if __name__ == "__main__":
  absltest.main()
