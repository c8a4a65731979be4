import os
import signal

from absl.testing import absltest, parameterized

from experiments import interruption


class InterruptionTest(parameterized.TestCase):
  def test_without_a_signal_nothing_is_wished(self):
    with interruption.Interruption() as is_interrupted:
      self.assertFalse(is_interrupted())

  @parameterized.named_parameters(
    ("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT)
  )
  def test_first_signal_is_a_wish(self, number):
    with interruption.Interruption() as is_interrupted:
      os.kill(os.getpid(), number)
      self.assertTrue(is_interrupted())

  def test_second_signal_ends_at_once(self):
    # Whoever starts the tests in the background may have SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    with interruption.Interruption():
      os.kill(os.getpid(), signal.SIGTERM)
      with self.assertRaises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)

  def test_handlers_are_put_back(self):
    before = signal.getsignal(signal.SIGTERM)
    with interruption.Interruption():
      self.assertNotEqual(signal.getsignal(signal.SIGTERM), before)
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
  absltest.main()
