"""A study's page: its numbers are those of the results beside it."""

import copy
import json
import pathlib

from absl.testing import absltest, parameterized

from experiments import study_page

_RESULTS = pathlib.Path(study_page.__file__).parent / "results"
_PAGES = sorted(_RESULTS.glob(f"*/{study_page.FILE_NAME}"))


def _arm(losses, accuracies, seconds=30.0, trained_with=("A @ 1", "A @ 2")):
  diverged = [None if loss is not None else 7 for loss in losses]
  known = [a for a in accuracies if a is not None]
  return {
    "final_loss": losses,
    "accuracy_mean": sum(known) / len(known),
    "accuracy_std": 0.01,
    "diverged_at": diverged,
    "train_seconds": seconds,
    "trained_with": list(trained_with),
  }


_FOUND = {
  "config": {
    "study": "small",
    "scale": "cpu",
    "workdir": "runs/small",
    "claim": "A claim.",
    "grid": {
      "base": {
        "seeds": 3, "dataset": "digits", "model": "residual_mlp",
        "num_stages": 0, "width": 0, "epochs": 2, "max_samples": 0,
        "learning_rate": 0.1, "momentum": 0.9, "reference_batch_size": 128,
        "weight_decay": 0.0,
      },
      "lines": {"A": {"arm": "pb"}},
      "points": {"1": {"momentum": 0.5}, "2": {"momentum": 0.6}},
    },
  },
  "versions": {"commit": "abc", "device": "2 x cpu"},
  "arms": {
    "A @ 1": _arm([0.3, 0.1, 0.2], [0.9, 0.8, 1.0]),
    "A @ 2": _arm([0.3, 0.1, 9.0], [0.9, 0.8, 0.1]),
  },
}  # fmt: skip


class StudyPageTest(parameterized.TestCase):
  def test_cells_are_median_and_mean(self):
    page = study_page.page(_FOUND)
    self.assertIn("|  | 1 | 2 |\n", page)
    self.assertIn("| A | 0.200; 90.0 ± 1.0 | 0.300; 60.0 ± 1.0 |\n", page)

  def test_arms_trained_together_count_once(self):
    self.assertIn(" 0.5 min of training", study_page.page(_FOUND))
    apart = copy.deepcopy(_FOUND)
    apart["arms"]["A @ 2"]["trained_with"] = ["A @ 2"]
    self.assertIn(" 1.0 min of training", study_page.page(apart))

  def test_what_varies_is_not_the_same_for_all(self):
    page = study_page.page(_FOUND)
    self.assertIn("learning_rate 0.1", page)
    self.assertNotIn("momentum 0.9", page)

  def test_no_mean_over_survivors(self):
    found = copy.deepcopy(_FOUND)
    found["arms"]["A @ 1"] = _arm([0.3, None, 0.2], [0.9, None, 1.0])
    page = study_page.page(found)
    self.assertIn("| A | 1 of 3 diverged | 0.300; 60.0 ± 1.0 |", page)

  @parameterized.named_parameters((p.parent.name, p) for p in _PAGES)
  def test_recorded_page_is_that_of_its_results(self, path):
    found = json.loads((path.parent / "results.json").read_text())
    self.assertEqual(path.read_text(), study_page.page(found))
    self.assertEqual(found["status"], "done")
    self.assertTrue((path.parent / f"{path.parent.name}.png").exists())


if __name__ == "__main__":
  absltest.main()
