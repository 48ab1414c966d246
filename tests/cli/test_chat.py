"""`blockdiff chat`: what is remembered, what is left out, what keys and commands do, on a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockdiff import checkpoint
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.cli.chat import Chat
from blockdiff.cli.live import Watcher
from blockdiff.cli.main import app, main
from blockdiff.data.template import packaged_template
from blockdiff.errors import RequestError
from blockdiff.models.pages import Pages
from blockdiff.sampling import Generation, Request, Result, Sampler
from blockdiff.sampling.trace import CommittedCanvas
from tests.support import forked
from tests.support.chat_tokenizer import chat_tokenizer


class Answers:
    """Stands in for a sampler: answers each request by a text, or raises what stands in its place."""

    def __init__(self, *answers: Any, positions: int = 10**6):
        self.tokenizer, self.generation = chat_tokenizer(), Generation(max_steps=8)
        self.settings, self.positions, self.pages = self, positions, None
        self.model = checkpoint.init("sudoku4", tokenizer=self.tokenizer, device="cpu")
        self.answers, self.asked = list(answers), []

    def excess(self, request: Request) -> int:
        return sum(len(message["content"]) for message in request.messages or ()) - self.positions

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def generate(self, requests: list[Request], on_canvas: Any, **_: Any) -> list[Result]:
        self.asked.append([(message["role"], message["content"]) for message in requests[0].messages or ()])
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            if answer.args:  # what was committed before
                tokens = self.tokenizer(answer.args[0], add_special_tokens=False)["input_ids"]
                on_canvas(CommittedCanvas(requests[0].id, 0, "", tokens, len(tokens), answer.args[0], 3, None))
            raise answer
        if isinstance(answer, Result):
            return [answer]
        return [Result(requests[0].id, answer, [1, 2], "eos", [8])]


def chat(answers: Answers, **more: Any) -> Chat:
    return Chat(answers, **more)  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_turn_sees_those_before_it_and_reset_forgets_them(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers("Hello.\n", "Ada.\n", "No.", "Yes.")
    talk = chat(answers, system="Be brief.")
    talk.say("I am Ada.")
    talk.say("Who am I?")
    system = ("system", "Be brief.")
    assert answers.asked[1] == [system, ("user", "I am Ada."), ("assistant", "Hello."), ("user", "Who am I?")]
    talk.command("/reset")
    talk.say("Who am I?")
    assert answers.asked[2] == [system, ("user", "Who am I?")]
    talk.command("/system -")
    talk.command("/reset")
    talk.say("Sure?")
    assert answers.asked[3] == [("user", "Sure?")]
    assert capsys.readouterr().out == "Hello.\nAda.\nNo.\nYes.\n"


@pytest.mark.quick
def test_the_oldest_exchanges_are_left_out_when_positions_run_out_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = Answers("b" * 10, "d" * 10, "f" * 10, positions=45)
    talk = chat(answers)
    for text in ("a" * 10, "c" * 10, "e" * 10):
        talk.say(text)
    assert answers.asked[2] == [("user", "c" * 10), ("assistant", "d" * 10), ("user", "e" * 10)]
    assert capsys.readouterr().err == "the oldest 2 messages are left out from here on: the model has 45 positions\n"
    talk.say("g" * 50)
    assert "error: the message is too long by 5 tokens; shorten it" in capsys.readouterr().err
    assert len(answers.asked) == 3 and talk.messages[-1] == {"role": "assistant", "content": "f" * 10}


@pytest.mark.quick
def test_an_answer_that_is_ended_keeps_what_was_committed_else_the_message_is_taken_back() -> None:
    answers = Answers(KeyboardInterrupt("half "), KeyboardInterrupt(), "whole")
    talk = chat(answers)
    for text in ("one", "two", "three"):
        talk.say(text)
    assert answers.asked[2] == [("user", "one"), ("assistant", "half"), ("user", "three")]


@pytest.mark.quick
def test_a_message_whose_answer_is_empty_is_taken_back_so_that_the_next_one_is_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = Answers("Hello.", " \n", KeyboardInterrupt(" "), "Fine.")
    talk = chat(answers)
    for text in ("Hi", "Well?", "And now?", "How are you?"):
        talk.say(text)
    assert answers.asked[3] == [("user", "Hi"), ("assistant", "Hello."), ("user", "How are you?")]
    printed = capsys.readouterr()
    assert printed.out == "Hello.\n\nFine.\n"  # through a pipe every message has its line
    assert printed.err.count("the message is taken back") == 2


@pytest.mark.quick
def test_a_message_that_cannot_be_answered_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(Result.failed(1, "not finite"), RequestError("no"), "fine")
    talk = chat(answers)
    for text in ("one", "two", "three"):
        talk.say(text)
    assert answers.asked[2] == [("user", "three")]
    assert capsys.readouterr() == ("fine\n", "error: not finite\nerror: no\n")
    talk.command("/what")
    assert capsys.readouterr().err.startswith("/what is no command (/help lists them)")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that knows the turn format."""
    tokenizer, place = chat_tokenizer(packaged_template()), tmp_path_factory.mktemp("chat") / "model"
    checkpoint.save(checkpoint.init("sudoku4", tokenizer=tokenizer, device="cpu"), place, tokenizer=tokenizer)
    return place


OPTIONS = ["--steps", "2", "--max-new-tokens", "34", "--seed", "7"]


def test_a_pipe_gets_an_answer_to_each_line_as_sample_gives_it(model: Path) -> None:
    run = CliRunner().invoke(app, ["chat", str(model), *OPTIONS], input="Hi\n\nTwo \\\nlines\n/reset\nHi\n")
    assert run.exit_code == 0, run.output
    assert "Traceback" not in run.output and run.stderr == "the conversation begins anew\n"
    alone = CliRunner().invoke(app, ["sample", str(model), "--chat", "Hi", *OPTIONS])
    assert run.stdout.startswith(alone.stdout.strip())
    again = CliRunner().invoke(app, ["chat", str(model), *OPTIONS], input="Hi\nTwo \\\nlines\n/reset\nHi\n")
    assert again.stdout == run.stdout  # the same seed, the same conversation


@pytest.mark.quick
def test_a_model_without_a_chat_template_is_refused_before_the_first_message(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, bare := tmp_path / "bare")
    for file in bare.glob("chat_template*"):
        file.unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    run = CliRunner().invoke(app, ["chat", str(bare), *OPTIONS], input="Hi\n")
    assert run.exit_code == 1 and run.stdout == "" and len(run.stderr.splitlines()) == 1, run.output
    assert run.stderr.startswith(f"blockdiff: error: {bare}: the tokenizer has no chat template")
    assert "train on messages" in run.stderr


def test_a_talk_in_which_nothing_could_be_answered_says_why_once_and_fails(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, broken := tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no talk') }}")
    run = CliRunner().invoke(app, ["chat", str(broken), *OPTIONS], input="Hi\n")
    assert run.exit_code == 1 and run.stdout == "" and len(run.stderr.splitlines()) == 1, run.output
    assert "no talk" in run.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--strategy", "entropy_bound:bound=-1"], ["--strategy", "quick"]]
)
def test_settings_that_cannot_be_are_refused_in_one_line(model: Path, words: list[str]) -> None:
    run = CliRunner().invoke(app, ["chat", str(model), *words], input="Hi\n")
    assert run.exit_code in (1, 2) and len(run.stderr.splitlines()) == 1, run.output


def test_a_turn_encodes_only_what_is_new(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Pages] = []

    class Kept(Pages):
        def __init__(self, model: Any, page_tokens: int, **more: Any):
            super().__init__(model, 8, **more)
            kept.append(self)

    monkeypatch.setattr("blockdiff.sampling.engine.Pages", Kept)
    said = "A message that is long enough to fill some pages.\nAnd again.\n"
    run = CliRunner().invoke(app, ["chat", str(model), *OPTIONS], input=said)
    assert run.exit_code == 0, run.output
    (pages,) = kept
    assert pages.statistics.reused_tokens > 8


def test_an_answer_that_is_ended_keeps_the_pages_of_the_turns_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the second answer's first canvas is committed: the third turn encodes only what is new."""
    weights, tokenizer = checkpoint.load(model), load_tokenizer(model)
    pages = Pages(weights, page_tokens=8)
    settings = Generation.from_pretrained(model)
    sampler = Sampler(weights, tokenizer, replace(settings, max_steps=2, max_new_tokens=51), pages=pages)
    talk, commit = Chat(sampler, seed=3), Watcher.commit

    def interrupted(view: Watcher, canvas: CommittedCanvas) -> None:
        if len(talk.messages) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        commit(view, canvas)

    monkeypatch.setattr(Watcher, "commit", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without
    try:
        talk.say("A message that is long enough to fill some pages.")
        talk.say("And again, as long as that.")
    finally:
        signal.signal(signal.SIGINT, before)
    assert talk.answered == 1 and len(talk.messages) in (2, 4)  # what was committed is the answer, if it has words
    reused = pages.statistics.reused_tokens
    talk.say("And again.")
    assert talk.answered == 2 and sampler.pages is pages
    pages.check()
    assert pages.statistics.reused_tokens - reused > 60


def in_terminal(terminal: str, words: list[str]) -> None:
    """Be `blockdiff WORDS` in a terminal.

    What Ctrl-C means is the terminal's business, so it has to be the controlling one of the process; and tests that run
    in the background of a shell inherit that it is ignored.
    """
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(opened, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(opened, stream)
    sys.stdin = os.fdopen(0, closefd=False)  # those of a forked process are no terminal
    sys.stdout = os.fdopen(1, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["blockdiff", *words]
    main()


def test_a_terminal_shows_canvases_and_ctrl_d_ends_the_chat(model: Path, tmp_path: Path) -> None:
    """A real terminal: a message, Ctrl-C while typing, Ctrl-C during an answer, /help, Ctrl-D."""
    ours, theirs = pty.openpty()
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 600
        while text not in seen:
            assert time.monotonic() < end, seen.decode("utf-8", "replace")
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        seen = seen[seen.index(text) + len(text) :]

    words = ["chat", str(model), "--max-new-tokens", "17", "--steps", "100000"]
    size = {"TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
    with forked.started(in_terminal, os.ttyname(theirs), words, log=tmp_path / "log", **size) as process:
        until(b"> ")
        os.write(ours, b"half a")
        until(b"half a")
        os.write(ours, b"\x03\n")  # where another thread takes the signal, it is noticed with the next key
        until(b"> ")
        os.write(ours, b"Hi\n")
        until(b"step 2")
        os.write(ours, b"\x03")
        until(b"the message is taken back")
        os.write(ours, b"/help\n")
        until(b"Ctrl-C ends an answer")
        until(b"> ")
        os.write(ours, b"\x04")
        process.join(forked.HUNG)
        assert process.exitcode == 0, (tmp_path / "log").read_text()
    os.close(theirs)
    os.close(ours)
