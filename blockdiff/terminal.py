"""The terminal that commands and training print on."""

from __future__ import annotations

import re
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False, wraps: bool = False) -> Console:
    """A terminal that neither guesses at markup nor colours numbers of its own accord.

    wraps: what is drawn is broken at the terminal's width; otherwise the terminal does that to long lines.
    """
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=not wraps)


def quiet() -> None:
    """Keep libraries from drawing bars and warnings between our lines."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity(hub_logging.CRITICAL)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# What a terminal obeys or hides: C0 and C1 controls but the line break and the tab, DEL, separators of lines, marks and
# overrides of direction, halves of surrogate pairs, and invisible tag characters.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """A text in which nothing can command a terminal: such characters are written as JSON writes them (`\\u001b`).

    Line breaks and tabs stay. JSON stays JSON of the same values.
    """
    return _COMMANDS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def shown(text: str, file: IO[str]) -> str:
    """The text as it may be printed on `file`: `printable` on a terminal, as it is in a file or a pipe."""
    return printable(text) if file.isatty() else text
