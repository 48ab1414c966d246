"""The documents of the repository, read: their Python blocks, the cells of their tables, a place to run them in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("recipes", "benchmarks")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")


def name_of(document: Path) -> str:
    """A document's path inside the repository."""
    return str(document.relative_to(ROOT))


@dataclass(frozen=True)
class Python:
    """A piece of Python in a document, at the line where it begins."""

    document: Path
    line: int
    source: str

    def run(self, names: dict[str, Any]) -> None:
        """Execute it; an error's traceback points into the document."""
        code: CodeType = compile("\n" * (self.line - 1) + self.source, str(self.document), "exec")
        exec(code, names)


def blocks(document: Path) -> Iterator[Python]:
    """The fenced `python` blocks of a document, but those under a line `<!-- not run: REASON -->`."""
    lines = document.read_text(encoding="utf-8").splitlines()
    first = None
    for number, line in enumerate(lines, start=1):
        if first is None and line.strip() == "```python":
            first = number
        elif first is not None and line.strip() == "```":
            if first < 2 or not NOT_RUN.fullmatch(lines[first - 2]):
                yield Python(document, first + 1, "\n".join(lines[first : number - 1]))
            first = None


@dataclass(frozen=True)
class Shell:
    """A piece of shell in a document: a `blockdiff` command, or a file that `cat > FILE <<'END'` writes."""

    document: Path
    line: int
    words: list[str]  # of the command
    text: str = ""  # of the file, whose name is then the only word
    printed: tuple[str, ...] = ()  # lines of its output, in which `...` is any text

    def missing(self, output: str) -> list[str]:
        """The lines of `printed` that an output lacks."""
        patterns = {line: ".*".join(map(re.escape, line.split("..."))) for line in self.printed}
        return [
            line for line, pattern in patterns.items() if not any(re.fullmatch(pattern, x) for x in output.splitlines())
        ]


def has_commands(document: Path) -> bool:
    """Whether a document has a fenced `sh` block that is not under a line `<!-- not run: REASON -->`."""
    return re.search(r"(?<! -->\n)^```sh$", document.read_text(encoding="utf-8"), re.M) is not None


def shell(document: Path) -> Iterator[Shell]:
    """The fenced `sh` blocks of a document, line by line, but those under a line `<!-- not run: REASON -->`.

    A command prints the text behind `  # prints: ` in its line. If the next fenced block has no language, the last
    command prints its lines. Raises ValueError for a line that is neither a `blockdiff` command nor writes a file.
    """
    lines = document.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        if lines[number].strip() != "```sh":
            number += 1
            continue
        is_run = not (number and NOT_RUN.fullmatch(lines[number - 1]))
        end = lines.index("```", number)
        place, number = number + 1, end + 1
        shown = _plain_block(lines, number)
        while is_run and place < end:
            words, begin = shlex.split(lines[place], comments=True), place + 1
            if words[:2] == ["cat", ">"] and words[3:] == ["<<END"]:
                place = lines.index("END", place)
                yield Shell(document, begin, [words[2]], "\n".join(lines[begin:place]) + "\n")
            elif words[:1] == ["blockdiff"]:
                told = lines[begin - 1].partition("  # prints: ")[2]
                block = shown if begin == end else ()
                yield Shell(document, begin, words[1:], printed=(*filter(None, [told]), *block))
            elif words:
                raise ValueError(f"{document.name}:{begin}: neither a blockdiff command nor a file")
            place += 1


def _plain_block(lines: list[str], number: int) -> tuple[str, ...]:
    """The lines of the first fenced block from `number` on; none if it has a language."""
    first = next((n for n in range(number, len(lines)) if lines[n].startswith("```")), len(lines))
    return tuple(lines[first + 1 : lines.index("```", first + 1)]) if lines[first:][:1] == ["```"] else ()


def table_rows(document: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a document's tables without their heads: line number and cells."""
    lines = document.read_text(encoding="utf-8").splitlines()
    for number, (line, before) in enumerate(zip(lines[1:], lines, strict=False), start=2):
        is_rule = set(line) <= set("|-: ")
        if line.startswith("|") and before.startswith("|") and not is_rule:
            yield number, [cell.strip() for cell in line.strip("|").split("|")]


def code_of(cell: str) -> list[str]:
    """The pieces of code in a table's cell."""
    return re.findall(r"`([^`]+)`", cell)
