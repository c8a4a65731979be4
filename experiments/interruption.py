"""Signals that ask a program to end, taken at a time that suits it."""

import os
import signal
import types

# sysexits.h's EX_TEMPFAIL: nothing is wrong, run the same command again. It is
# neither 0 (the run isn't done) nor 1 (an error, which would come again).
EXIT_CODE = 75


class Interrupted(Exception):
  """The run was asked to end and has saved where it is."""


class Interruption:
  """Turns the first SIGTERM or SIGINT into a wish; a second one ends at once.

  To be entered in the main thread, as `with Interruption() as interruption`.
  """

  _SIGNALS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self._previous = {}
    self._is_wished = False

  def __enter__(self) -> "Interruption":
    self._previous = {s: signal.signal(s, self._take) for s in self._SIGNALS}
    return self

  def __exit__(self, *unused) -> None:
    self._restore()

  def __call__(self) -> bool:
    """Whether the program was asked to end."""
    return self._is_wished

  def _take(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    self._is_wished = True
    self._restore()
    # Not by print, which a signal may have interrupted.
    os.write(
      2,
      f"\n{signal.Signals(number).name}: saving at the end of this chunk; once"
      " more ends at once.\n".encode(),
    )

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}
