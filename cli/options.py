"""Options that several commands share, and checks of their values and files before the work begins."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, get_args

import typer

from blockdiff import stored_forms
from blockdiff.errors import BlockdiffError
from blockdiff.files import matching
from blockdiff.request_options import OPTIONS, PROMPTS, SAMPLING, RequestOptions
from blockdiff.terminal import say_out

# The groups of options in `--help`.
ROWS, OUTPUT, DEVICE = "Rows", "Output", "Model and device"
MAX_SEED = 2**64 - 1
STREAM = Path("-")  # standard input, or standard output


def _one_of(*words: str) -> Callable[[str | None], str | None]:
    """Return a callback of typer that refuses all values except `words` and None."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in words:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(words)}")
        return value

    return check


def _settings(values: list[str] | None) -> list[str] | None:
    for value in values or ():
        if not value.partition("=")[0].strip() or "=" not in value:
            raise typer.BadParameter(f"{value!r} is not KEY=VALUE, such as optim.lr=3e-4")
    return values


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is not one of auto, cpu, cuda, cuda:1")
    return value


def _seed(value: str | int) -> int:  # the default is an integer already
    if not re.fullmatch(r"\d+", str(value)) or int(value) > MAX_SEED:
        raise typer.BadParameter(f"{str(value)!r} is not an integer from 0 to 2^64 - 1")
    return int(value)


def _help_of_strategies(value: str | None) -> str | None:
    if value == "help":
        from blockdiff.sampling.strategies import strategies_table

        say_out(strategies_table())
        raise typer.Exit
    return value


def option(group: str | None, metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Declare an option of a command; group: its panel in the help (None: the first); more: for `typer.Option`."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=group, help=help, **more)


def flag(group: str | None, name: str, help: str) -> Any:
    """Declare an option without a value."""
    return option(group, "", help, name)


def of_request(name: str) -> Any:
    """Return the option for a field of a request, from the table OPTIONS of `blockdiff.request_options`."""
    entry = OPTIONS[name]
    return option(
        entry.group, entry.metavar, entry.help, f"--{name.replace('_', '-')}", min=entry.least, max=entry.most
    )


def given_type(name: str, kind: Any) -> Any:
    """Return the type of the option for field `name` of a request: a path, a list of texts, or the field's own `kind`.

    A path is for a field whose value is in a file.
    """
    entry = OPTIONS[name]
    return Path | None if entry.is_file else list[str] | None if entry.rule.kind is Sequence else kind


def request_fields(given: RequestOptions) -> dict[str, Any]:
    """Return the fields of `Request` from options of the command, with the contents of files in place of paths."""
    values = {name: getattr(given, name) for name, entry in OPTIONS.items() if entry.help}
    for name, value in values.items():
        if OPTIONS[name].is_file:
            values[name] = read_text(value)
        elif OPTIONS[name].rule.kind is Sequence:
            values[name] = tuple(value or ())
    return values


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint directory or a hub id.")]
RunDirectory = Annotated[str | None, option(None, "DIR", "The run directory.", "--output", "-o")]
Resume = Annotated[bool, flag(None, "--resume", "Go on from the last checkpoint.")]
ReplaceRun = Annotated[bool, flag(None, "--overwrite", "Replace the run that is there.")]
Overrides = Annotated[
    list[str] | None,
    option(
        None,
        "KEY=VALUE",
        "Change a key of the recipe, such as optim.lr=1e-3 (repeatable).",
        "--set",
        callback=_settings,
    ),
]
SeedOfData = Annotated[int, option(None, "N", "Seed of all random draws.", "--seed", parser=_seed)]

System = Annotated[str | None, option(PROMPTS, "TEXT", "A system message, put before conversations that have none.")]
Images = Annotated[
    list[str] | None,
    option(
        PROMPTS, "FILE", "An image, put where the prompt says <image>, else before its text (repeatable).", "--image"
    ),
]
Thinking = Annotated[bool, of_request("thinking")]
AllowControlTokens = Annotated[bool, of_request("allow_control_tokens")]
Raw = Annotated[
    bool, flag(PROMPTS, "--raw", "Leave raw prompts of rows as they are, also for a model trained on conversations.")
]
Columns = Annotated[str | None, option(ROWS, "ROLE=COLUMN,...", "Names of the columns, such as prompt=question.")]
Subset = Annotated[str | None, option(ROWS, "NAME", "Configuration of a hub data set.")]
Split = Annotated[str, option(ROWS, "NAME", "Split of a hub data set or of a directory.")]

Seed = Annotated[int, option(SAMPLING, "N", "Seed of all random draws.", parser=_seed)]
MaxNewTokens = Annotated[
    int | None, option(SAMPLING, "N", "Most tokens of an answer, rounded up to whole canvases.", min=1)
]
MaxSteps = Annotated[int | None, option(SAMPLING, "N", "Most denoising steps of a canvas.", "--steps", min=1)]
Strategy = Annotated[
    str | None,
    option(
        SAMPLING,
        "NAME:KEY=VALUE,...",
        "The rule that decides which guesses of a step stay; `--strategy help` lists all names and keys.",
        callback=_help_of_strategies,
        is_eager=True,
    ),
]
Temperature = Annotated[
    float | None,
    option(
        SAMPLING, "T", "Temperature of a canvas's first step; later steps fall in proportion. 0 leaves the model's own."
    ),
]
TopP = Annotated[
    float | None, option(SAMPLING, "P", "Draw only from the likeliest tokens whose probabilities add up to P.")
]
BestOf = Annotated[int, of_request("best_of")]

Overwrite = Annotated[bool, flag(OUTPUT, "--overwrite", "Replace files that are there already.")]
AsJson = Annotated[bool, flag(OUTPUT, "--json", "Print one JSON object in place of the lines.")]

BatchSize = Annotated[int, option(DEVICE, "N", "Requests that run together.", min=1)]
Checkpoint = Annotated[str | None, option(DEVICE, "last|best|STEP", "Of a run: a checkpoint in place of its model.")]
Adapter = Annotated[str | None, option(DEVICE, "DIR", "An adapter of the model, in PEFT's format.")]
DraftModel = Annotated[
    str | None,
    option(DEVICE, "DIR", "A drafter of MODEL, or a canvas model of its tokenizer: MODEL verifies what it drafts."),
]
Dtype = Annotated[
    str,
    option(
        DEVICE,
        "NAME",
        "Number format: auto (as stored), float32, bfloat16, float16, float64.",
        callback=_one_of("auto", "float32", "bfloat16", "float16", "float64"),
    ),
]
Verify = Annotated[
    bool, flag(DEVICE, "--verify", "Read the weights first and compare them with the digests beside them.")
]
Quantize = Annotated[
    str | None,
    option(DEVICE, "FORM", stored_forms.HELP, callback=_one_of(*get_args(stored_forms.Quantize))),
]
Device = Annotated[str, option(DEVICE, "NAME", "auto, cpu, cuda or cuda:1.", callback=_device)]
Kernels = Annotated[str, option(DEVICE, "NAME", "auto, triton or torch.", callback=_one_of("auto", "triton", "torch"))]
TensorParallel = Annotated[
    int, option(DEVICE, "N", "Start N processes, each of which holds a part of the weights.", min=1)
]


def is_recipe(target: str, overrides: list[str] | None = None) -> bool:
    """True if `target` is a recipe: a .yaml or .yml file, or the name of a packaged one.

    Raises typer.BadParameter if there are overrides (--set) and it is none.
    """
    from blockdiff.recipes import packaged

    if Path(target).suffix in (".yaml", ".yml") or packaged(target) is not None:
        return True
    if overrides:
        raise typer.BadParameter("only a recipe (a .yaml file) has keys to set", param_hint="--set")
    return False


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse `prompt=question,response=answer` into a dict; typer.BadParameter if it is written otherwise."""
    columns: dict[str, str] = {}
    for entry in (text or "").split(","):
        if not entry.strip():
            continue
        role, _, column = (part.strip() for part in entry.partition("="))
        if not role or not column:
            raise typer.BadParameter(f"{entry.strip()!r} is not ROLE=COLUMN", param_hint="--columns")
        if role in columns:
            raise typer.BadParameter(f"{role} appears twice", param_hint="--columns")
        columns[role] = column
    return columns


def require_free(path: Path | None, *inputs: str | Path | None, overwrite: bool = False) -> None:
    """Raise BlockdiffError if `path` must not be written.

    It must not if it is a directory, if it is an input or lies in a directory that is one, or if it exists and
    `overwrite` is False. inputs: what the command reads, as the user named it: paths, patterns, or names of the Hub.
    """
    if path is not None and path.is_dir():
        raise BlockdiffError(f"{path}: is a directory; name a file in it")
    if path is None or not path.is_file():  # /dev/stdout or a pipe can always be written to
        return
    for file in (each for name in inputs if name is not None for each in matching(name)):
        if file.resolve() in (path.resolve(), path.resolve().parent):
            raise BlockdiffError(f"{path}: is read by this command, so it is not written; choose another file")
    if not overwrite:
        raise BlockdiffError(f"{path}: is there already; choose another place, or replace it with --overwrite")


def make_parent(path: Path | None) -> None:
    """Make the directory of the file `path`, and check that a file can be written there (None: nothing to do).

    Raises BlockdiffError if it cannot, or if the first directory below the root does not exist.
    """
    if path is None:
        return
    missing = [each for each in path.absolute().parents if not each.exists()]
    if missing and missing[-1].parent == Path(path.absolute().anchor):
        raise BlockdiffError(f"{path}: there is no {missing[-1]}; make it, or choose another place")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass  # a file can be written there
    except OSError as error:
        raise BlockdiffError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def read_text(path: Path | None) -> str | None:
    """Return the text of a file, or of standard input for `-`; None for None. BlockdiffError if it cannot be read."""
    try:
        if path == STREAM:
            return sys.stdin.read()
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BlockdiffError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
