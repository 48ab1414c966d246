"""The terminal that commands and training print on, and how an error reaches the user."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

FIRST_SECONDS = 1.0  # of work without a line
LONGEST = 2000  # characters of an error, which may quote a stranger's file
ESCAPED = "blockdiff.escaped"  # the handler of characters that an encoding lacks: they are written as JSON writes them


def console(stderr: bool = False, wraps: bool = False) -> Console:
    """Return a terminal that neither interprets markup nor colours numbers.

    wraps: break lines at the terminal's width; otherwise the terminal breaks long ones.
    """
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=not wraps)


def quiet() -> None:
    """Keep libraries from drawing bars and printing warnings between our lines."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity(hub_logging.CRITICAL)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def counted(count: int, noun: str) -> str:
    """Format a number of things, such as "1 canvas" or "2,000 rows"."""
    plural = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{plural}"


# What a terminal obeys or hides: C0 and C1 controls but the line break and the tab, DEL, separators of lines, marks and
# overrides of direction, halves of surrogate pairs, and invisible tag characters.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Escape characters that control a terminal, as JSON writes them (`\\u001b`).

    Line breaks and tabs stay. JSON stays JSON of the same values.
    """
    return _COMMANDS.sub(lambda match: _escape(match[0]), text)


def _escape(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[index]:02x}{units[index + 1]:02x}" for index in range(0, len(units), 2))


def _escape_missing(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return _escape(error.object[error.start : error.end]), error.end


codecs.register_error(ESCAPED, _escape_missing)


class _Unread(io.RawIOBase):
    """The bytes of a stream. Bytes that cannot be written, because nobody reads them or a disk is full, are dropped."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._handle, self._is_terminal, self._name = stream.fileno(), stream.isatty(), name
        self._is_lost = False

    def write(self, content: Any) -> int:
        try:
            return os.write(self._handle, content)
        except OSError as error:
            if not self._is_lost:
                self._is_lost = True
                with suppress(OSError):
                    os.write(
                        2, f"blockdiff: {self._name} cannot be written ({error.strerror}); work goes on\n".encode()
                    )
            return len(content)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return self._is_terminal


def outliving(name: str) -> Any:
    """Wrap `sys.stdout` or `sys.stderr` so that it may lose its reader; without a file or pipe it is unchanged."""
    stream: Any = getattr(sys, name)
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_Unread(stream, name))
    return io.TextIOWrapper(buffer, stream.encoding, ESCAPED, line_buffering=stream.line_buffering)


@contextmanager
def unread() -> Iterator[None]:
    """Run a block whose work goes on if nobody reads its output any more: stdout and stderr are `outliving`.

    If stdout is lost, one line on stderr reports it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outliving("stdout"), outliving("stderr")
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):
                stream.flush()
        sys.stdout, sys.stderr = before


def shown(text: str, file: IO[str]) -> str:
    """Return the text to print on `file`: `printable` on a terminal, unchanged in a file or a pipe."""
    return printable(text) if file.isatty() else text


def say(text: str, file: IO[str] | None = None) -> None:
    """Print a text on stderr, or on `file`, as `shown` there.

    Text and line break are written at once, so that no other thread or process writes between them.
    """
    file = file or sys.stderr
    if file is None:  # the process was started without stderr
        return
    file.write(shown(text, file) + "\n")
    file.flush()


def say_out(text: str) -> None:
    """Print a text on stdout, as `shown` there, since the output of commands may have names that a stranger chose."""
    say(text, sys.stdout)


@contextmanager
def saying(line: Callable[[float], str | None], say: Callable[[str], object] = say) -> Iterator[None]:
    """Run a block that may be long: a thread passes `line(seconds)` to `say` after 1, 2, 4, ... seconds.

    If `line` returns None, nothing is printed.
    """
    is_over, began = Event(), time.perf_counter()

    def watch() -> None:
        wait = FIRST_SECONDS
        while not is_over.wait(wait):
            wait = seconds = time.perf_counter() - began
            if (text := line(seconds)) is not None:
                say(text)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def say_error(message: str) -> None:
    """Print why this process ends, as one line on stderr, or let its launcher do so."""
    words = " ".join(message.split())
    line = f"blockdiff: error: {words:.{LONGEST}}" + " ..." * (len(words) > LONGEST)
    if _told_by_launcher(line):
        say(line)


def _told_by_launcher(line: str) -> bool:
    """Report to torchrun, if it runs this process, why the process ends. Returns True if the process must print it.

    torchrun (and `accelerate launch`, which runs it) prints the file that it names instead of a traceback. The form is
    that of torch.distributed.elastic.multiprocessing.errors, whose `record` ignores exit codes. Of several processes
    with the same reason only the first prints it.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return True
    file = Path(name)
    about = {"timestamp": str(int(time.time()))}
    with suppress(OSError):  # a reason that cannot be written is printed
        file.write_text(json.dumps({"message": {"message": line, "extraInfo": about}}), encoding="utf-8")
        digest = hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
        try:
            (file.parents[1] / f"said-{digest}").touch(exist_ok=False)
        except FileExistsError:
            return False
    return True
