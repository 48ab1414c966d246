"""SIGTERM, SIGINT and SIGHUP: a first is remembered, a second ends the process; handlers are put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from blockdiff.parallel.signals import Stopped, caught

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def hangup():
    """SIGHUP as it is without nohup, under which the tests themselves may run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_first_signal_is_remembered_with_one_line(number, capfd):
    before = signal.getsignal(number)
    with caught() as signals:
        assert signals.is_stopping() == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as a launcher passes it on, right after
        assert signals.is_stopping() == number
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.splitlines() == [
        f"{signal.Signals(number).name}: saving after this optimiser step; a second one ends at once"
    ]


def test_a_signal_is_remembered_where_nobody_reads_what_it_says(monkeypatch):
    monkeypatch.setattr("os.write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    with caught() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.is_stopping() == signal.SIGHUP


def test_a_hangup_that_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.is_stopping() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_ranks_say_nothing(capfd):
    with caught(speaks=False) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.is_stopping() == signal.SIGTERM
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_alone", [True, False])
def test_one_of_several_ranks_that_ends_with_an_error_is_not_ended_by_its_launcher_before_it_says_why(is_alone):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(RuntimeError), caught(is_alone=is_alone):
            raise RuntimeError
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) is not is_alone
        assert signal.getsignal(signal.SIGINT) is before[1]
        with caught(is_alone=is_alone):
            pass
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) is not is_alone
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_a_run_in_another_thread_goes_on_without_catching_signals():
    def handler_inside():
        with caught() as signals:
            return signals.is_stopping(), signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        assert threads.submit(handler_inside).result() == (0, signal.getsignal(signal.SIGINT))


def test_a_second_signal_ends_the_process_by_that_signal():
    code = (
        "import os, signal, time\n"
        "from blockdiff.parallel import signals\n"
        "with signals.caught():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    signals.time.monotonic = lambda now=time.monotonic(): now + signals.ECHO + 0.1\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=600, capture_output=True)
    assert done.returncode == -signal.SIGINT


def test_the_exit_code_is_what_a_shell_expects():
    assert [Stopped(3, number).exit_code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == [
        143,
        130,
        129,
    ]
    assert str(Stopped(3, signal.SIGINT)) == "stopped by SIGINT after step 3"
