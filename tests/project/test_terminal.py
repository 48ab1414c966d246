"""Texts on a terminal cannot command it; files and pipes get them as they are."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

import blockdiff
import blockdiff.cli.main
from blockdiff.cli.main import _show_warning, report
from blockdiff.errors import BlockdiffError
from blockdiff.terminal import ESCAPED, counted, outliving, printable, say, say_out, shown, unread
from blockdiff.training.progress import Progress
from blockdiff.training.report import epochs_in_words

HOSTILE = {
    "\x1b[2J": "\\u001b[2J",
    "\0": "\\u0000",
    "\r": "\\u000d",
    "\x7f": "\\u007f",
    "\x9b31m": "\\u009b31m",
    "\u202e": "\\u202e",
    "\u2066": "\\u2066",
    "\ud800": "\\ud800",
    "\U000e0041": "\\udb40\\udc41",
}


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.mark.quick
@pytest.mark.parametrize(("text", "escaped"), HOSTILE.items())
def test_what_commands_a_terminal_is_written_as_its_code(text: str, escaped: str) -> None:
    assert printable(f"a{text}b") == f"a{escaped}b"
    line = json.dumps({"text": f"a{text}b"}, ensure_ascii=False)
    assert json.loads(printable(line)) == json.loads(line)


@pytest.mark.quick
def test_names_in_what_a_command_prints_cannot_command_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    say_out("runs/\x1b]0;gone\x07: a checkpoint")
    assert terminal.writes == ["runs/\\u001b]0;gone\\u0007: a checkpoint\n"]


@pytest.mark.quick
def test_an_error_that_quotes_a_long_text_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    report(BlockdiffError("x" * 100_000))
    assert 2000 < len(capsys.readouterr().err) < 2100


@pytest.mark.quick
def test_one_thing_is_not_counted_as_several() -> None:
    counts = [counted(1, "canvas"), counted(2000, "canvas"), counted(1, "optimiser step"), counted(0, "row")]
    assert counts == ["1 canvas", "2,000 canvases", "1 optimiser step", "0 rows"]
    assert [epochs_in_words(count) for count in (2.5, 0.04, 1200)] == ["2.5 epochs", "0.04 epochs", "1,200.0 epochs"]


@pytest.mark.quick
def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "a\tb\nשלום, 你好 👩\u200d🔬 é"
    assert printable(text) == text
    assert shown("\x1b", io.StringIO()) == "\x1b" and shown("\x1b", Terminal()) == "\\u001b"


@pytest.mark.quick
def test_errors_and_lines_of_training_reach_a_terminal_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}", Terminal())
    import sys

    report(BlockdiffError("id '\x1b]0;x\x07' is there twice"))
    Progress(1, is_shown=True).line("rows of \x1b[8m.jsonl")
    assert sys.stderr.getvalue() == "blockdiff: error: id '\\u001b]0;x\\u0007' is there twice\n"  # type: ignore[attr-defined]
    assert all(text.endswith("\n") for stream in (sys.stdout, sys.stderr) for text in stream.writes)  # type: ignore[attr-defined]
    assert "\x1b" not in sys.stdout.getvalue() and "\\u001b[8m.jsonl" in sys.stdout.getvalue()  # type: ignore[attr-defined]


@pytest.mark.quick
def test_a_line_is_written_at_once_so_that_other_threads_cannot_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    report(BlockdiffError("one"))
    _show_warning("two", UserWarning, blockdiff.__file__, 1)
    say("three")
    assert stream.writes == ["blockdiff: error: one\n", "blockdiff: warning: two\n", "three\n"]


@pytest.mark.quick
def test_whatever_is_printed_on_stderr_goes_through_the_functions_for_it() -> None:
    files = [*Path(blockdiff.__file__).parent.rglob("*.py"), *Path(blockdiff.cli.main.__file__).parent.glob("*.py")]
    found = [file.name for file in files if re.search(r"file=sys\.stderr|\berr=True", file.read_text())]
    assert found == ["__main__.py"]  # which has no other thread


@pytest.mark.quick
def test_work_goes_on_when_its_reader_leaves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    with open(writing, "w", encoding="ascii") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with unread():
            print("é", flush=True)
            assert os.read(reading, 100) == b"\\u00e9\n"
            os.close(reading)
            for number in range(5000):
                print(number)
            Progress(1, is_shown=True).line("more")
        assert sys.stdout is pipe
    assert [line.split(" cannot")[0] for line in capfd.readouterr().err.splitlines()] == ["blockdiff: stdout"]


@pytest.mark.quick
def test_a_stream_without_a_file_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        assert outliving("stderr") is stream
    monkeypatch.setattr("sys.stderr", None)
    with unread():
        say("nobody")


@pytest.mark.quick
def test_what_an_encoding_cannot_write_is_written_as_json_writes_it() -> None:
    text = "ä→😀"
    assert text.encode("ascii", ESCAPED) == json.dumps(text)[1:-1].encode()
    assert "\ud800".encode("utf-8", ESCAPED) == b"\\ud800"
