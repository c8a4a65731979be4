import importlib.util
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from experiments import benchmark, benchmark_cases, figure_program
import pbp_jax as pbp


def _count(params):
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def _parameters(model):
  simulator = benchmark_cases.make_simulator(model, "sgdm")
  example = benchmark_cases.example_of(model)
  return jax.eval_shape(simulator.init, jax.random.key(0), example).params


class BenchmarkTest(parameterized.TestCase):
  def test_smoke(self):
    folder = pathlib.Path(tempfile.mkdtemp()) / "run"
    found = figure_program.run_in_workdir(
      figure_program.Flags(workdir=str(folder), smoke=True),
      benchmark.SCALES,
      benchmark.run,
    )
    self.assertSameElements(
      found["arms"],
      [
        "residual_mlp sgdm",
        "residual_mlp pb",
        "residual_mlp/one_kernel sgdm",
        "residual_mlp/replicas 2",
      ],
    )
    self.assertTrue(
      found["arms"]["residual_mlp/one_kernel sgdm"]["is_one_kernel"]
    )
    row = found["arms"]["residual_mlp sgdm"]
    self.assertLen(row["ms"], 1)
    self.assertGreater(row["ms_median"], 0)
    self.assertGreater(row["compile_s"], 0)
    self.assertGreater(row["draw_s"], 0)
    self.assertFalse(row["is_one_kernel"])
    # Well below, in the programs that take seconds.
    self.assertLess(row["second_start_s"], row["lower_s"] + row["compile_s"])
    delayed = found["arms"]["residual_mlp pb"]
    self.assertAlmostEqual(
      delayed["over"]["sgdm"]["median"], delayed["ms"][0] / row["ms"][0]
    )
    self.assertNotIn("over", row)
    self.assertTrue((folder / "milliseconds.png").is_file())

  def test_the_readme_gives_the_flag_of_one_kernel(self):
    readme = pathlib.Path(benchmark.__file__).with_name("README.md")
    line = f"    export XLA_FLAGS={benchmark_cases.ONE_KERNEL}"
    self.assertIn(line, readme.read_text().splitlines())

  def test_a_small_loop_inside_is_not_one_kernel(self):
    def halve(x):
      return jax.lax.fori_loop(0, 3, lambda _, y: y / 2, x)

    def run(large, small):
      step = lambda carry, _: ((jnp.sin(carry[0]), halve(carry[1])), None)
      return jax.lax.scan(step, (large, small), length=50)[0]

    program = (
      jax.jit(run).lower(jnp.ones(10000), jnp.ones(2)).compile().as_text()
    )
    self.assertIn("xla_cpu_small_call", program)
    self.assertFalse(benchmark_cases.is_one_kernel(program))

  def test_eight_times_the_delay_and_half_the_memory(self):
    plain = pbp.schedules.pipelined_backprop(34).delay
    for contender, factor, history_dtype in [
      ("pb", 1, None),
      ("pb@8", 8, None),
      ("pb:bfloat16", 1, "bfloat16"),
      ("pb@8:bfloat16", 8, "bfloat16"),
    ]:
      simulator = benchmark_cases.make_simulator("residual_mlp", contender)
      self.assertEqual(
        simulator.schedule.delay.tolist(), (factor * plain).tolist()
      )
      self.assertEqual(simulator.history_dtype, history_dtype)

  def test_naive_network_has_our_parameters(self):
    def start_and_step(sample):
      step, carry = benchmark_cases.naive("resnet20")
      return carry, *step(carry, sample)

    sample = (jnp.zeros((1, 32, 32, 3)), jnp.array([3]))
    carry, after, loss = jax.eval_shape(start_and_step, sample)
    self.assertEqual(_count(carry[0]), _count(_parameters("resnet20")))
    self.assertEqual(loss.shape, ())
    jax.tree.map(lambda a, b: self.assertEqual(a.shape, b.shape), after, carry)

  @parameterized.parameters("residual_mlp", "resnet20", "resnet18", "vgg11")
  def test_networks_of_pytorch_have_our_parameters(self, model):
    if importlib.util.find_spec("torch") is None:
      self.skipTest(
        "PyTorch, which only the benchmark compares with, is absent"
      )
    from experiments import torch_baseline

    channels = benchmark_cases.example_of(model).shape[-1]
    self.assertEqual(
      torch_baseline.num_parameters(model, channels),
      _count(_parameters(model)),
    )


if __name__ == "__main__":
  absltest.main()
