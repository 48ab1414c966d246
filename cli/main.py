"""The `blockdiff` command: its subcommands, and the printing of errors."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import blockdiff
from blockdiff import __version__
from blockdiff.cli.chat import chat
from blockdiff.cli.data import data
from blockdiff.cli.decide import decide
from blockdiff.cli.eval import evaluate
from blockdiff.cli.export import export
from blockdiff.cli.init import init
from blockdiff.cli.inspect import inspect
from blockdiff.cli.plan import plan
from blockdiff.cli.plot import plot
from blockdiff.cli.sample import sample
from blockdiff.cli.serve import serve
from blockdiff.cli.train import train
from blockdiff.errors import BlockdiffError
from blockdiff.terminal import ESCAPED, outliving, say, say_error, say_out

# docs/ is beside the package in a checkout and inside an installed one.
DOCS = next(filter(Path.is_dir, (Path(home, "docs") for home in blockdiff.__path__)), Path("docs"))
OURS = (Path(blockdiff.__file__).parent, Path(__file__).parent)
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room there and start again")
REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; see to its permissions, or name another place")


class Commands(TyperGroup):
    """Runs a command and turns whatever goes wrong into one line on stderr: exit 1, or 2 for wrong usage."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        debug = "--debug" in words[:end]
        words = [word for i, word in enumerate(words) if word != "--debug" or i > end] or ["--help"]
        extra["standalone_mode"] = False
        try:
            code = super().main(args=words, prog_name=prog_name or "blockdiff", **extra)
        except Exception as error:
            if debug:
                raise
            sys.exit(report(error))
        sys.exit(code if isinstance(code, int) else 0)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    """Show a warning of this package in one line on stderr, others in Python's usual form."""
    if issubclass(category, UserWarning) and any(Path(filename).is_relative_to(home) for home in OURS):
        say("blockdiff: warning: " + " ".join(str(message).split()))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def report(error: Exception) -> int:
    """Print an error as one line on stderr and return the exit code."""
    code = 1
    if isinstance(error, BlockdiffError):
        message = str(error)
    elif hasattr(error, "format_message"):  # a usage error of typer (or of click, in older versions of it)
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "blockdiff"
        message, code = f"{error.format_message().rstrip('.')}; see `{command} --help`", error.exit_code  # type: ignore[attr-defined]
    elif type(error).__name__ == "Abort":
        message = "stopped"
    elif isinstance(error, OSError) and error.strerror:
        prefix = f"{error.filename}: " if error.filename else ""
        message = f"{prefix}{error.strerror}{REMEDIES.get(error.errno or 0, '')}"
    else:
        message = f"{type(error).__name__}: {error} (run again with --debug for the traceback)"
    say_error(message)
    return code


app = typer.Typer(
    cls=Commands,
    name="blockdiff",
    epilog="docs/glossary.md explains words such as canvas, fill and signal, and docs/cli.md every command. "
    f"The pages that messages name are in {DOCS}.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data, name="data")
for name, command, example in (
    ("train", train, "recipes/quickstart.yaml --set optim.lr=3e-4 --output runs/a"),
    ("sample", sample, "runs/a/model --prompts prompts.jsonl --output texts.jsonl --seed 1"),
    ("chat", chat, "runs/chat/model --system 'Answer in capital letters.'"),
    ("serve", serve, "runs/quickstart/model --port 8000"),
    ("eval", evaluate, "runs/a/model --task sudoku --data data/sudoku4/test.jsonl"),
    ("decide", decide, "runs/a/model --questions questions.jsonl --output answers.jsonl"),
    ("export", export, "runs/a --output merged"),
    ("init", init, "sudoku4 fresh-model"),
    ("inspect", inspect, "recipes/quickstart.yaml --step 2"),
    ("plan", plan, "recipes/quickstart.yaml --gpus 1 --gpu-memory 80 --tokens 64"),
    ("plot", plot, "runs/a runs/b --output compared.png"),
):
    app.command(name, epilog=f"Example: blockdiff {name} {example}")(command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say_out(f"blockdiff {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Train and sample block-diffusion language models."""


def main() -> None:
    """Run the command line, for the console script and `python -m blockdiff`."""
    warnings.showwarning = _show_warning
    sys.stderr = outliving("stderr")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPED)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's own warnings about a lost rank are C++ stacks
    try:
        app()
    except SystemExit as end:
        if _is_in_a_process_group():
            _end_at_once(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _is_in_a_process_group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _end_at_once(code: int) -> NoReturn:
    """Run the exit functions, flush stdout and stderr, and end the process without Python's own shutdown.

    A thread of gloo may still have to release the tensors of its last exchange, which takes Python's lock. During
    Python's shutdown it cannot have the lock, and would abort a process whose work is done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)
