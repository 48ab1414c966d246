"""SIGTERM, SIGINT and SIGHUP in training: the first stops after the current optimiser step, a second stops at once.

torchrun, and so `accelerate launch`, passes them on to its ranks. If it is killed itself, they stop as by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO = 1.0  # seconds in which another signal counts as the first: launchers repeat signals that the terminal also sent


class Interrupted(Exception):
    """Repeatable work was abandoned because a signal asked this rank or another one to stop."""


class Stopped(Exception):
    """Training ended early because a signal asked for it; everything up to `step` is saved."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.step, self.signal_number = step, signal_number

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect of a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + self.signal_number


class Signals:
    """The first signal caught: `is_stopping()` returns its number, or 0 if there was none.

    speaks: whether the first signal prints a line on stderr.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks, self._number, self._since = speaks, 0, 0.0
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # others may end before us

    def is_stopping(self) -> int:
        """Return the number of the signal that asked to stop, 0 if none; SIGTERM if our torchrun has ended."""
        if self._launcher not in (None, os.getppid()):
            self._launcher = None
            self.handle(signal.SIGTERM)
        return self._number

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Store a first signal; end the process by another one more than ECHO seconds later."""
        now = time.monotonic()
        if self._number and now - self._since > ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._number:
            self._number, self._since = number, now
            if self._speaks:  # not print(): the signal may have come in the middle of one
                name = signal.Signals(number).name
                with suppress(OSError):  # after SIGHUP the terminal is closed and cannot be written to
                    os.write(2, f"{name}: saving after this optimiser step; a second one ends at once\n".encode())


@contextmanager
def caught(speaks: bool = True, is_alone: bool = True) -> Iterator[Signals]:
    """Catch signals inside the `with` block, as `Signals` describes, with a line on stderr if `speaks`.

    The old handlers are restored at the end. But if one of several ranks (not `is_alone`) ends with an exception, it
    ignores SIGTERM from then on: launchers send it to all ranks once one has ended, and this one must still report its
    error. In a thread other than the main one Python allows no handlers, so nothing is caught. SIGHUP stays ignored if
    it was (`nohup`).
    """
    signals, is_main = Signals(speaks), threading.current_thread() is threading.main_thread()
    before = {}
    for number in HANDLED:
        if is_main and not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
            before[number] = signal.signal(number, signals.handle)
    try:
        yield signals
    except BaseException:
        if is_main and not is_alone:
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the handler was not set from Python
