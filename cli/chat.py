"""`blockdiff chat`: a conversation with a model on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from blockdiff.cli import options
from blockdiff.cli.model import ModelOptions, SamplingOptions, with_groups
from blockdiff.cli.requests import user_message
from blockdiff.cli.tally import Tally
from blockdiff.errors import CheckpointError, DataError, RequestError
from blockdiff.terminal import console, say, shown

if TYPE_CHECKING:
    from blockdiff.cli.live import Watcher
    from blockdiff.sampling import Request, Result, Sampler
    from blockdiff.sampling.response import ParsedResponse
    from blockdiff.sampling.trace import CommittedCanvas

HELP = """/image FILE    put an image into the next message (repeatable)
/system TEXT   tell the model something before the conversation; `/system -` takes it away, `/system` shows it
/reset         begin anew; the system message stays
/help          show these lines
/quit          end the chat, as Ctrl-D does
A line that ends in a backslash goes on in the next one. Ctrl-C ends an answer, Ctrl-D the chat."""


@with_groups
def chat(
    system: options.System = None,
    thinking: options.Thinking = False,
    *,
    opened: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model; /help in the chat lists its commands, /quit ends it.

    Canvases are shown while they are denoised. Through a pipe every line is a
    message, and the answers go to stdout.
    """
    from blockdiff.terminal import quiet

    quiet()
    files = opened.files
    settings, tokenizer = files.generation(), files.tokenizer()
    settings = replace(
        settings,
        max_new_tokens=sampling.max_new_tokens or settings.max_new_tokens,
        max_steps=sampling.steps or settings.max_steps,
    )
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"{opened.place}: the tokenizer has no chat template, so there is no conversation to continue; train on "
            "messages (or with data.chat: true), or ask by `blockdiff sample --prompt`"
        )
    sampler = opened.open(sampling.strategy_for(opened, settings), settings, tokenizer)
    talk = Chat(sampler, system, sampling.seed, thinking)
    if talk.is_terminal:
        talk.note(f"{opened.model}: type a message; /help lists the commands, /quit ends the chat")
    for line in lines(talk.is_terminal):
        if line == "/quit":
            break
        if line.startswith("/") and not line.startswith("//"):
            talk.command(line)
        else:
            talk.say(line.removeprefix("/"))
    if talk.failed and not talk.answered:
        raise typer.Exit(1)  # the error was printed before


def lines(is_terminal: bool) -> Iterator[str]:
    """Yield the messages that are typed or piped, without empty ones.

    A line that ends in a backslash continues in the next. At a terminal Ctrl-C discards the lines typed so far.
    """
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has a history and can be edited)
    elif hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    before = ""
    while True:
        try:
            line = input("… " if before else "> ") if is_terminal else sys.stdin.readline()
        except KeyboardInterrupt:
            print()  # noqa: T201
            before = ""
            continue
        except EOFError:
            print()  # noqa: T201
            return
        if not is_terminal and not line:
            if before.strip():
                yield before.strip()
            return
        line = line.rstrip("\n")
        if line.endswith("\\"):
            before += line[:-1] + "\n"
        elif text := (before + line).strip():
            before = ""
            yield text


class Ended(KeyboardInterrupt):
    """Ctrl-C, raised between two steps, so that no cache page is half written and the next turn can reuse them."""


@contextmanager
def ended_between_steps() -> Iterator[Callable[[Callable[..., None]], Callable[..., None]]]:
    """Within the block the first Ctrl-C waits until a step or canvas has been shown, then raises Ended.

    Yields a function that wraps the one that shows a step or a canvas. A second Ctrl-C does not wait.
    """
    is_asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True

    def then_ended(show: Callable[..., None]) -> Callable[..., None]:
        def show_and_end(*arguments: Any) -> None:
            show(*arguments)
            if is_asked:
                raise Ended

        return show_and_end

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else SIGINT is ignored, or another program handles it
        signal.signal(signal.SIGINT, ask)
    try:
        yield then_ended
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation with a model. The oldest messages are dropped if it exceeds the model's positions."""

    def __init__(self, sampler: Sampler, system: str | None = None, seed: int = 0, thinking: bool = False):
        self.sampler, self.system, self.seed, self.thinking = sampler, system, seed, thinking
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.messages: list[dict[str, Any]] = []
        self.images: list[str] = []  # paths of the next message's images
        self.answered, self.failed = 0, False  # the number of answers; whether any message got none
        self._turn = 0  # every turn has draws of its own, also after a /reset

    def command(self, line: str) -> None:
        """Run a command, a line that begins with /."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.messages.clear()
            self.note("the conversation begins anew")
        elif name == "/system":
            if text.strip():
                self.system = None if text.strip() == "-" else text.strip()
            self.note(f"system: {self.system or 'none'}")
        elif name == "/image":
            try:
                self.put(text.strip())
            except DataError as error:
                self.note(f"error: {error}")
        elif name == "/help":
            self.note(HELP)
        else:
            self.note(f"{name} is no command (/help lists them); a message that begins with / is written with //")

    def put(self, image: str) -> None:
        """Add the image in a file to the next message. Raises DataError if it cannot be read."""
        from blockdiff.data.tokenise import NO_IMAGES

        reader = self.sampler.settings.image_reader
        if reader is None:
            raise DataError(NO_IMAGES)
        if not image:
            raise DataError("no image is named; write /image FILE")
        image = str(Path(image).expanduser())
        reader.read(image)
        self.images.append(image)
        self.note(f"{image}: in the next message")

    def say(self, text: str) -> None:
        """Send a message, show the answer as it fills in, and add both to the conversation."""
        from blockdiff.cli.live import Watcher

        self._turn += 1
        self.messages.append(user_message(text, ()))
        images, self.images = self.images, []
        view = Watcher(self.sampler.tokenizer, several=False)
        canvases: list[CommittedCanvas] = []
        try:
            self.messages[-1] = user_message(text, images)
            self._make_room()

            def show(canvas: CommittedCanvas) -> None:
                canvases.append(canvas)
                (view.commit if self.thinking or not self.is_terminal else view.canvas)(canvas)

            with ended_between_steps() as then_ended:
                (result,) = self.sampler.generate(
                    [self._request(self.messages)],
                    seed=self.seed,
                    on_canvas=then_ended(show),
                    on_step=then_ended(view.step) if view.is_live else None,
                )
        except (DataError, RequestError) as error:
            self.images = images
            self._refused(str(error))
        except KeyboardInterrupt:
            self._ended(view, canvases)
        else:
            view.close()
            self._show(result)

    def note(self, text: str) -> None:
        """Print a note on stderr, dim at a terminal; answers go to stdout."""
        console(stderr=True).print(shown(text, sys.stderr), style="dim")

    def _request(self, messages: list[dict[str, Any]]) -> Request:
        from blockdiff.sampling import Request

        first = [{"role": "system", "content": self.system}] if self.system else []
        return Request(self._turn, messages=[*first, *messages], thinking=self.thinking)

    def _make_room(self) -> None:
        """Drop the oldest exchanges until the conversation and an answer fit the model's positions.

        Raises RequestError if the last message alone is too long.
        """
        settings = self.sampler.settings
        if (too_many := settings.excess(self._request(self.messages[-1:]))) > 0:
            raise RequestError(f"the message is too long by {too_many} tokens; shorten it or lower --max-new-tokens")
        dropped = 0
        while settings.excess(self._request(self.messages)) > 0:
            later = [index for index, message in enumerate(self.messages) if index and message["role"] == "user"]
            dropped += later[0]
            del self.messages[: later[0]]
        if dropped:
            has = f"the model has {settings.positions} positions"
            self.note(f"the oldest {dropped} messages are left out from here on: {has}")

    def _show(self, result: Result) -> None:
        if result.error is not None:
            self._refused(result.error)
            return
        self.answered += 1
        text = self._print(result)
        if self.is_terminal:
            tally = Tally()
            tally.add(result)
            words = f"{len(result.tokens)} tokens, {tally.cost(self.sampler.generation.max_steps)}"
            self.note(words + ", cut off: no room for more" * (result.finish_reason == "length"))
        self._remember(text, "the answer is empty; the message is taken back")

    def _print(self, answer: Result | ParsedResponse) -> str:
        """Show what was not yet shown of an answer: its reasoning, and its text if none was shown. Returns the text."""
        text = answer.text.strip()  # a turn ends with a line break
        if answer.reasoning is not None:
            self.note(answer.reasoning)
        if self.thinking or not self.is_terminal:
            say(text, sys.stdout)
        return text

    def _remember(self, text: str, otherwise: str) -> None:
        """Add an answer to the conversation. If it is empty, remove the user's message and print `otherwise`."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()
            self.note(otherwise)

    def _refused(self, reason: str) -> None:
        """Remove the last message, which cannot be answered, and print why."""
        self.messages.pop()
        self.failed = True
        self.note(f"error: {reason}")

    def _ended(self, view: Watcher, canvases: list[CommittedCanvas]) -> None:
        """After Ctrl-C, take the committed canvases as the answer; without any, remove the message."""
        from blockdiff.sampling.response import parse

        view.close()
        text = ""
        if canvases:
            tokens = [token for canvas in canvases for token in canvas.tokens[: canvas.kept]]
            answer = parse(tokens, self._request([]), self.sampler.settings, canvases[0].prompt)
            text = self._print(answer) if answer.text.strip() else ""
        self._remember(text, "ended before anything was committed; the message is taken back")
        if text:
            self.note("ended; what stands there is the answer")
