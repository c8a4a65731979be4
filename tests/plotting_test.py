import subprocess
import sys

from absl.testing import absltest, parameterized
import numpy as np

from pbp_jax import plotting


def _curve(**changes):
  return {
    "samples": [10, 20, 30],
    "loss": [[3.0, 2.0, 1.0], [2.5, 1.0, 0.5], [1.0, None, None]],
    "accuracy_samples": [15, 30],
    "accuracy": [[0.2, 0.6], [0.4, 0.8], [None, None]],
    **changes,
  }


def _axes(curves, **options):
  return plotting.training_curves(curves, **options).axes


class ArmsChartTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.axes = plotting.arms_chart(
      {
        "lost": {"loss": [None, 0.01, 0.02], "accuracy": [None, 0.9, 0.9]},
        "lost, better": {
          "loss": [None, 0.001, 0.002],
          "accuracy": [None, 1, 1],
        },
        "worse": {"loss": [1.0, 3.0, 2.0], "accuracy": [0.3, 0.1, 0.2]},
        "gone": {"loss": [None] * 3, "accuracy": [None] * 3},
        "better": {"loss": [0.1, 0.5, 5.0], "accuracy": [0.8, 0.7, 0.6]},
      }
    ).axes

  def test_rows_are_sorted_by_the_median_those_that_diverged_last(self):
    labels = [label.get_text() for label in self.axes[0].get_yticklabels()]
    self.assertEqual(
      labels,
      [
        "better",
        "worse",
        "lost, better (1 diverged)",
        "lost (1 diverged)",
        "gone (3 diverged)",
      ],
    )

  @parameterized.parameters((0, [0.1, 0.5, 5.0], 0.5), (1, [80, 70, 60], 70))
  def test_each_seed_is_a_dot_and_the_median_a_bar(self, axes, dots, median):
    first, bar = self.axes[axes].get_lines()[:2]
    np.testing.assert_allclose(first.get_xdata(), dots)
    np.testing.assert_allclose(first.get_ydata(), [0, 0, 0])
    np.testing.assert_allclose(bar.get_xdata(), [median])

  def test_no_arms_are_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one arm"):
      plotting.arms_chart({})


class SettingsChartTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    end = lambda loss, accuracy: {"loss": loss, "accuracy": accuracy}
    self.axes = plotting.settings_chart(
      {
        "pb": {
          1: end([1.0, 3.0, 2.5], [0.1, 0.2, 0.6]),
          64: end([None, 4.0, None], [None, 0.3, None]),
        },
        "sgdm": {1: end([None] * 3, [None] * 3)},
      },
      "delay",
      chance_loss=2.3,
    ).axes

  @parameterized.parameters((0, [2.5, 4.0]), (1, [20, 30]))
  def test_line_goes_through_the_medians_of_what_is_known(self, axes, medians):
    line = self.axes[axes].get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), medians)

  def test_each_seed_is_a_dot(self):
    dots = self.axes[0].get_lines()[1].get_ydata()
    np.testing.assert_allclose(dots, [1, 3, 2.5, np.nan, 4, np.nan])

  def test_settings_stand_at_even_distances_by_their_names(self):
    self.assertEqual(self.axes[0].get_xticks().tolist(), [0, 1])
    labels = [label.get_text() for label in self.axes[0].get_xticklabels()]
    self.assertEqual(labels, ["1", "64"])

  def test_names_of_several_words_do_not_run_into_each_other(self):
    end = {"loss": [1.0], "accuracy": [0.5]}
    axes = plotting.settings_chart(
      {"pb": {f"groups of {size}": end for size in range(6)}}
    ).axes[0]
    axes.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    for box, following in zip(boxes, boxes[1:], strict=False):
      self.assertLess(box.x1, following.x0)

  def test_diverged_seeds_are_counted_above(self):
    texts = [text.get_text() for text in self.axes[0].texts]
    self.assertEqual(texts, ["2×", "3×"])

  def test_no_lines_are_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one line"):
      plotting.settings_chart({})


class TrainingCurvesTest(parameterized.TestCase):
  def test_line_is_the_median_of_the_seeds_that_have_a_value(self):
    (line,) = _axes({"pb": _curve()})[0].get_lines()
    np.testing.assert_allclose(
      line.get_xydata(), [(10, 2.5), (20, 1.5), (30, 0.75)]
    )

  def test_band_reaches_from_the_lowest_to_the_highest_seed(self):
    (band,) = _axes({"pb": _curve()})[0].collections
    (path,) = band.get_paths()
    corners = {tuple(corner) for corner in path.vertices.tolist()}
    self.assertContainsSubset({(10, 1), (10, 3), (20, 1), (20, 2)}, corners)
    self.assertContainsSubset({(30, 0.5), (30, 1)}, corners)

  def test_accuracy_is_in_percent_at_its_own_places(self):
    (line,) = _axes({"pb": _curve()})[1].get_lines()
    np.testing.assert_allclose(line.get_xydata(), [(15, 30), (30, 70)])

  def test_every_arm_is_named_and_looks_different(self):
    axes = _axes({f"arm{i}": _curve() for i in range(20)})
    (legend,) = axes[0].figure.legends  # beside the axes, there are so many
    labels = [text.get_text() for text in legend.get_texts()]
    self.assertEqual(labels, [f"arm{i}" for i in range(20)])
    looks = {(x.get_color(), x.get_linestyle()) for x in axes[0].get_lines()}
    self.assertLen(looks, 20)

  def test_chance_loss_is_marked(self):
    lines = _axes({"pb": _curve()}, chance_loss=2.3)[0].get_lines()
    self.assertLen(lines, 2)
    self.assertEqual(set(lines[1].get_ydata()), {2.3})

  def test_arm_that_diverged_at_once_can_be_drawn(self):
    nothing = _curve(loss=[[None] * 3] * 2, accuracy=[[None] * 2] * 2)
    figure = plotting.training_curves({"pb": _curve(), "bad": nothing})
    figure.canvas.draw()
    self.assertLen(figure.axes[0].get_lines(), 2)

  def test_no_curves_are_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one arm, got none"):
      plotting.training_curves({})

  def test_wrong_number_of_points_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, r"curves\['pb'\] .*\[seeds, 2\].* got shape \(3, 3\)"
    ):
      plotting.training_curves({"pb": _curve(samples=[10, 20])})

  def test_import_needs_no_matplotlib_and_drawing_no_pyplot(self):
    code = (
      "import sys; from pbp_jax import plotting;"
      "assert 'matplotlib' not in sys.modules;"
      "plotting.training_curves({'pb': {'samples': [1], 'loss': [[1.0]],"
      " 'accuracy_samples': [1], 'accuracy': [[1.0]]}});"
      "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
  absltest.main()
