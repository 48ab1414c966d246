"""The requests of `blockdiff sample`, from its options and its file of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from blockdiff.errors import DataError, RequestError

if TYPE_CHECKING:
    from blockdiff.sampling import Request, Result


def asked_requests(
    prompt: str | None, chat: str | None, prompts: Path | None, images: Sequence[str] = ()
) -> list[Request | Result]:
    """Return the requests: one for `prompt` or `chat`, or one for each line of the file `prompts`.

    A bad line of the file gives a Result with its error instead.
    """
    from blockdiff.sampling import Request, read_prompts

    if prompts is not None:
        return read_prompts(prompts)
    if prompt is not None:
        return [Request(1, prompt=prompt, images=images)]
    return [Request(1, messages=[user_message(str(chat), images)])]


def as_conversations(entries: Sequence[Request | Result]) -> list[Request | Result]:
    """Convert each raw prompt with its images to a user's message. Other requests and failed lines are unchanged."""
    from blockdiff.sampling import Request

    return [
        replace(each, prompt=None, images=(), messages=(user_message(each.prompt, each.images),))
        if isinstance(each, Request) and each.prompt is not None
        else each
        for each in entries
    ]


def user_message(text: str, images: Sequence[Any]) -> dict[str, Any]:
    """Return a user's message with images at each `<image>` of the text, or before it if there is none.

    Raises DataError if the number of images differs from the number of `<image>`.
    """
    from blockdiff.data.image_parts import text_with_images
    from blockdiff.data.messages import BadRow

    try:
        return {"role": "user", "content": text_with_images(text, images) if images else text}
    except BadRow as error:
        raise DataError(str(error)) from None


def check_fields(fields: Mapping[str, Any], is_raw: bool) -> None:
    """Raise typer.BadParameter if fields of `Request` are invalid for any prompt.

    is_raw: prompts are raw text, else conversations.
    """
    from blockdiff.sampling import Request
    from blockdiff.sampling.constraints.regex import regex_automaton
    from blockdiff.sampling.template import parse_template

    prompt: dict[str, Any] = {"prompt": ""} if is_raw else {"messages": [{"role": "user", "content": ""}]}
    try:
        Request(1, **prompt, **fields).check()
        if fields["template"] is not None:
            parse_template(fields["template"])
        if fields["regex"] is not None:
            regex_automaton(fields["regex"])  # it is kept, so it is not compiled again
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None


def with_options(
    entries: Sequence[Request | Result], asked: Mapping[str, Any], system: str | None
) -> list[Request | Result]:
    """Fill the fields of requests that have their defaults from the command's options. Failed lines stay as they are.

    asked: options by field name; system: a system message for conversations without one. Raises typer.BadParameter if
    `system` is given and a prompt is raw text.
    """
    from blockdiff.sampling import Request

    defaults = Request(1)
    filled: list[Request | Result] = []
    for entry in entries:
        if isinstance(entry, Request):
            changes = {name: value for name, value in asked.items() if getattr(entry, name) == getattr(defaults, name)}
            entry = replace(entry, **changes)
            entry = entry if system is None else _with_system(entry, system)
        filled.append(entry)
    return filled


def _with_system(entry: Request, system: str) -> Request:
    """Return a conversation with a system message first, unless it has one. Raises typer.BadParameter for raw text."""
    if entry.messages is None:
        raise typer.BadParameter(
            f"the prompt {entry.id!r} is raw text, which has no place for it; give a conversation",
            param_hint="--system",
        )
    if entry.messages[0]["role"] == "system":
        return entry
    return replace(entry, messages=({"role": "system", "content": system}, *entry.messages))


@dataclass(frozen=True)
class Wanted:
    """One answer to make: its request (or failed line), and the id of its output line.

    id: the id of the prompt; draw: the answer's number among several answers to it, from 0 (None: it is the only one).
    """

    entry: Request | Result
    id: str | int
    draw: int | None = None

    def named(self, result: Result) -> Result:
        """Return the result with the id of its line and the number of its draw, if there are several draws."""
        return result if self.draw is None else replace(result, id=self.id, draw=self.draw)


def drawn(entries: Sequence[Request | Result], count: int, seed: int) -> Iterator[Wanted]:
    """Yield every request `count` times, with the seeds that --best-of would use; a failed line once."""
    from blockdiff.sampling import Request
    from blockdiff.seeding import child_seed

    for entry in entries:
        if count == 1 or not isinstance(entry, Request):
            yield Wanted(entry, entry.id)
            continue
        first_seed = child_seed(seed, entry.id) if entry.seed is None else entry.seed
        yield Wanted(replace(entry, seed=first_seed), entry.id, 0)
        for draw in range(1, count):
            again = replace(entry, id=f"{entry.id} draw {draw}", seed=child_seed(first_seed, draw))
            yield Wanted(again, entry.id, draw)
