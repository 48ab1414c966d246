"""`blockdiff data`: make the data of a task, or a tokenizer from data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.errors import BlockdiffError
from blockdiff.terminal import say_out

data = typer.Typer(
    help="Make the data of a task, or a tokenizer from data.",
    epilog="Example: blockdiff data sudoku --size 4 --split train=20000 --split test=1000 --output data/s4",
)

Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for NAME.jsonl, images and tokenizer/.")
]
Splits = Annotated[list[str] | None, typer.Option("--split", metavar="NAME=N", help="N rows in NAME.jsonl.")]


@data.command(epilog="Example: blockdiff data sudoku --size 4 --split train=60000 --split test=1000 --output data/s4")
def sudoku(
    output: Output,
    overwrite: options.Overwrite = False,
    size: Annotated[int, typer.Option(metavar="N", help="Side of the grid: 4 or 9.")] = 4,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write sudoku puzzles with one solution each, and the tokenizer of their characters.

    No solved grid of one split equals a grid of another, not even after its
    digits are relabelled.
    """
    counts = _counts(split or ["train=60000", "test=1000"])
    if size not in (4, 9):
        raise typer.BadParameter(f"{size} is neither 4 nor 9", param_hint="--size")
    from blockdiff.recipes.sudoku import write_splits

    _write(output, counts, overwrite, lambda: write_splits(output, size, counts, seed))


@data.command(
    "pixel-sudoku",
    epilog="Example: blockdiff data pixel-sudoku --split train=10000 --split test=500 --output data/pixel_sudoku",
)
def pixel_sudoku(
    output: Output,
    overwrite: options.Overwrite = False,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write images of 4x4 sudokus, rows that name them, and the tokenizer with its image processor.

    Boards lie at random places and have random sizes, and every pixel is noisy.
    The puzzles are those of `blockdiff data sudoku`.
    """
    from blockdiff.recipes.pixel_sudoku import write_splits

    counts = _counts(split or ["train=10000", "test=500"])
    _write(output, counts, overwrite, lambda: write_splits(output, counts, seed))


@data.command(
    "sudoku-decisions",
    epilog="Example: blockdiff data sudoku-decisions --split train=20000 --split test=2000 --output data/decisions",
)
def sudoku_decisions(
    output: Output,
    overwrite: options.Overwrite = False,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write typed decisions about four cells of 4x4 sudokus with many solutions, and their tokenizer.

    For recipes/decisions_cpu.yaml; docs/decisions.md has the forms of the rows.
    """
    from blockdiff.recipes.sudoku_decisions import write_splits

    counts = _counts(split or ["train=20000", "heldout=500", "fit=1000", "test=2000"])
    _write(output, counts, overwrite, lambda: write_splits(output, counts, seed))


@data.command(
    epilog="Example: blockdiff data countdown --numbers 4 --split train=50000 --split test=1000 "
    "--output data/countdown4"
)
def countdown(
    output: Output,
    overwrite: options.Overwrite = False,
    numbers: Annotated[int, typer.Option(min=3, max=6, metavar="N", help="Numbers of a problem.")] = 4,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write Countdown problems (reach a target with all the numbers) and the tokenizer of their characters.

    No two problems, of one split or of two, have the same numbers.
    """
    from blockdiff.recipes.countdown import write_splits

    counts = _counts(split or ["train=50000", "test=1000"])
    _write(output, counts, overwrite, lambda: write_splits(output, numbers, counts, seed))


@data.command(
    "word-problems",
    epilog="Example: blockdiff data word-problems --split train=20000 --split test=300 --output data/word_problems",
)
def word_problems(
    output: Output,
    overwrite: options.Overwrite = False,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write arithmetic in sentences and a tokenizer learnt from it, for recipes/word_problems.yaml."""
    from blockdiff.recipes.word_problems import write_splits

    counts = _counts(split or ["train=20000", "test=300"])
    _write(output, counts, overwrite, lambda: write_splits(output, counts, seed))


@data.command(epilog="Example: blockdiff data chat --split train=20000 --split test=500 --output data/chat")
def chat(
    output: Output,
    overwrite: options.Overwrite = False,
    split: Splits = None,
    seed: options.SeedOfData = 0,
) -> None:
    """Write short conversations about a few facts and a tokenizer learnt from them, for recipes/chat_cpu.yaml."""
    from blockdiff.recipes.small_talk import write_conversations

    counts = _counts(split or ["train=20000", "test=500"])
    _write(output, counts, overwrite, lambda: write_conversations(output, counts, seed))


@data.command(
    epilog="Example: blockdiff data tokenizer train.jsonl --columns prompt=question,response=answer "
    "--vocab-size 4096 --output data/gsm8k/tokenizer"
)
def tokenizer(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="Files, directories, patterns or hub ids.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for the tokenizer's files.")],
    overwrite: options.Overwrite = False,
    columns: options.Columns = None,
    vocab_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens in all.")] = 4096,
    subset: options.Subset = None,
    split: options.Split = "train",
) -> None:
    """Learn a byte-level BPE tokenizer from the texts of rows.

    It has pad, eos, bos and mask tokens and those of the Gemma 4 turn format, so
    both prompt/response rows and conversations can be trained on.
    """
    from blockdiff.data.rows import written_texts
    from blockdiff.data.sources import Source, read_rows
    from blockdiff.data.tokenizer import byte_level_bpe, write_tokenizer
    from blockdiff.terminal import counted, quiet

    options.require_free(output / "tokenizer.json", *sources, overwrite=overwrite)
    quiet()
    chosen, counts = options.parse_columns(columns), Counter[str]()
    named = [Source(source, subset=subset, split=split, columns=chosen) for source in sources]

    def texts() -> Iterator[str]:
        for row in chain.from_iterable(map(read_rows, named)):
            counts["rows"] += 1
            for text in written_texts(row):
                counts["characters"] += len(text)
                yield text

    bpe = byte_level_bpe(texts(), vocab_size)
    options.make_parent(output / "tokenizer.json")
    write_tokenizer(bpe, output)
    say_out(f"{len(bpe):,} tokens from {counted(counts['rows'], 'row')}, {counted(counts['characters'], 'character')}")
    if len(bpe) < vocab_size:
        say_out(f"these texts give no more than that, fewer than the {vocab_size:,} of --vocab-size")
    say_out(f"written to {output}")


def _write(output: Path, counts: Iterable[str], overwrite: bool, write: Callable[[], Iterable[str]]) -> None:
    """Call `write`, which writes the splits and the tokenizer, and print its lines.

    Raises BlockdiffError before that if a file is in the way.
    """
    if output.exists() and not output.is_dir():
        raise BlockdiffError(f"{output}: is a file; name a directory for the files of the splits and the tokenizer")
    for name in (*(f"{name}.jsonl" for name in counts), "tokenizer/tokenizer.json"):
        options.require_free(output / name, overwrite=overwrite)
    for line in write():
        say_out(line)
    say_out(f"written to {output}")


def _counts(splits: list[str]) -> dict[str, int]:
    """Parse options such as `train=20000` to the number of rows by split name; typer.BadParameter if one is not so."""
    counts: dict[str, int] = {}
    for text in splits:
        name, _, number = text.partition("=")
        if not re.fullmatch(r"[\w-]+=0*[1-9][0-9]*", text):
            raise typer.BadParameter(f"{text!r} is not NAME=N, such as train=20000", param_hint="--split")
        if name in counts:
            raise typer.BadParameter(f"the name {name!r} appears twice", param_hint="--split")
        counts[name] = int(number)
    return counts
