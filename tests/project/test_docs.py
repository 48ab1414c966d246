"""Documents: what they draw and point to is there, and their Python runs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.cli.main import app
from blockdiff.images import ImageInput, PlacedImage
from blockdiff.metrics import METRICS
from blockdiff.spans import Spans, denoise_spans, encode_spans
from blockdiff.training.callbacks import Callback
from blockdiff.training.trainer import Trainer
from tests.project.test_imports import IMPORT_ORDER
from tests.support.documents import DOCUMENTS, ROOT, Shell, blocks, code_of, has_commands, name_of, shell, table_rows

COMING_FROM = ROOT / "docs" / "coming-from.md"  # its tables run too: test_coming_from.py
WALKED = [document for document in DOCUMENTS if has_commands(document)]
SHOWN = {"laptop.md": {"train", "sample", "eval"}}  # commands of a page that each have lines of their output in it
APART = {COMING_FROM, ROOT / "docs" / "one-gpu.md"}  # the Python of the second reads what its commands write
ROW, CANVASES = "pqrABCDstEF$", ("ABCD", "EF$$")


def drawn(spans: Spans, prefix: str, own: str, queries: str) -> list[str]:
    """The lines of a mask as docs/design.md draws it."""
    bar = " | " if prefix else ""
    lines = ["    " + " ".join(prefix) + bar + " ".join(own)]
    for query, seen in zip(queries, spans.dense(len(prefix), len(own))[0].tolist(), strict=True):
        marks = ["x" if is_seen else "." for is_seen in seen]
        left, right = " ".join(marks[: len(prefix)]), " ".join(marks[len(prefix) :])
        lines.append(f"{query}   {left}{bar}{right}")
    return lines


@pytest.mark.quick
def test_the_masks_of_the_design_are_those_of_the_code() -> None:
    canvases = [Canvas([*map(ord, CANVASES[0])], 3, 0), Canvas([*map(ord, CANVASES[1])], 9, 7)]
    batch = lay_out([CleanRow([*map(ord, ROW)], canvases, doc_starts=(0, 7))], 4, 0)
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```\n(.*?)```", text, re.S) if "encode, window 3" in block)
    encodings, denoisings = (part.splitlines()[1:] for part in block.split("\n\n"))
    geometry = batch.start_BC, batch.doc_start_BC, batch.length_BC, 4
    for place, window in enumerate((None, 3)):
        encoding = drawn(encode_spans(batch.doc_start_BS, window), "", ROW, ROW)
        assert [line[33 * place :][:27].rstrip() for line in encodings] == encoding
        denoising = drawn(denoise_spans(*geometry, window), ROW, "".join(CANVASES), "".join(CANVASES))
        assert [line[48 * place :][:45].rstrip() for line in denoisings] == denoising


@pytest.mark.quick
def test_the_masks_of_images_in_the_design_are_those_of_the_code() -> None:
    row = "pq1234r56s"
    images = [PlacedImage(ImageInput({}, n, bytes([n])), column) for n, column in ((3, 2), (1, 5), (2, 7))]
    batch = lay_out([CleanRow([*map(ord, row)], [], images=images)], 4, 0)
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```\n(.*?)```", text, re.S) if "encode with images" in block)
    for place, window in enumerate((None, 3)):
        found = drawn(encode_spans(batch.doc_start_BS, window, None, batch.images.run_BS2), "", row, row)
        assert [line[33 * place :][:23].rstrip() for line in block.splitlines()[1:]] == found


def test_the_import_order_of_the_design_is_that_of_the_code() -> None:
    rows = [row for _, row in table_rows(ROOT / "docs" / "design.md") if row[0].isdigit()]
    assert {code_of(row[1])[0].rstrip("/").removesuffix(".py"): int(row[0]) for row in rows} == IMPORT_ORDER


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub names them."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.quick
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.quick
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_that_a_document_names_in_full_exists(document: Path) -> None:
    words = re.findall(
        r"`((?:blockdiff|cli|tests|docs|recipes|benchmarks|notebooks)/[\w./-]+)`",
        document.read_text(encoding="utf-8"),
    )
    assert not [word for word in words if not (ROOT / word).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_target_and_benchmark_that_a_document_names_exists(document: Path) -> None:
    text, makefile = document.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^ *|`)make ([a-z]+)", text, re.M):
        assert re.search(rf"^{target}:.* ## ", makefile, re.M), target
    for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
        path = ROOT.joinpath(*module.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_every_option_that_a_document_or_a_recipe_types_is_one_of_its_command() -> None:
    commands = dict[str, Any](get_command(app).commands)  # type: ignore[attr-defined]
    commands |= {f"data {name}": each for name, each in commands.pop("data").commands.items()}
    names, typed = "|".join(sorted(commands, key=len, reverse=True)), 0
    for document in [*DOCUMENTS, *(ROOT / "recipes").glob("*.yaml")]:
        if document.stem == "CHANGELOG":  # which has those that are gone
            continue
        text = re.sub(r"\\\n#? *", "", document.read_text(encoding="utf-8"))  # a line may go on in the next one
        for name, words in re.findall(
            rf"\bblockdiff ({names})\b([^`\n]*)", text if document.stem != "CHANGELOG" else ""
        ):
            known = {option for each in commands[name].params for option in each.opts} | {"--help", "--debug"}
            asked = re.findall(r"(?<=\s)--?[a-z][a-z-]*", words.partition("  # ")[0])
            assert set(asked) <= known, (document.name, name, words)
            typed += len(asked)
    assert typed > 100


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d not in APART and [*blocks(d)]], ids=name_of)
def test_the_python_of_a_document_runs_from_top_to_bottom(
    document: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "heldout_margin", METRICS["loss"])  # a document puts it there; afterwards it is gone
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document):
        block.run(names)


@pytest.mark.parametrize(
    "document",
    [pytest.param(each, marks=[pytest.mark.portable] * (each.name in SHOWN)) for each in WALKED],
    ids=name_of,
)
def test_the_shell_of_a_user_page_runs_from_top_to_bottom(
    document: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDIFF_CACHE", str(quickstart / "cache"))
    for piece in shell(document):
        if piece.text:
            Path(piece.words[0]).write_text(piece.text)
        else:
            result = CliRunner().invoke(app, piece.words)
            assert result.exit_code == 0, (f"{document.name}:{piece.line}", result.output)
            assert not piece.missing(result.stdout), (piece.missing(result.stdout), result.output)
            assert piece.printed or piece.words[0] not in SHOWN.get(document.name, ()), piece.words
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document) if document in APART else ():
        block.run(names)


def test_a_line_that_a_page_shows_must_be_printed() -> None:
    (command,) = (piece for piece in shell(ROOT / "docs" / "laptop.md") if "red cat" in piece.words)
    assert command.missing("chat vert\n") == ["chat rouge"] and not command.missing("chat rouge\n")
    line = Shell(command.document, 1, [], printed=("loss ...  100.0% right",))
    assert line.missing("loss 0.1  98.0% right") and not line.missing("first\nloss 0.1  100.0% right\nlast")


def test_every_markdown_file_of_the_project_is_a_document_that_is_checked() -> None:
    folders = ("docs", "recipes", "benchmarks", "blockdiff", "cli", "tests", "notebooks")
    found = {*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))}
    assert found == {*DOCUMENTS}


@pytest.mark.quick
def test_every_message_of_the_troubleshooting_page_is_one_that_the_code_says() -> None:
    said = [text for folder in ("blockdiff", "cli") for file in (ROOT / folder).rglob("*.py") for text in texts(file)]
    messages = [code for _, cells in table_rows(ROOT / "docs" / "troubleshooting.md") for code in code_of(cells[0])]
    assert len(messages) > 25
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert parts and any(pattern.search(text) for text in said), message


def texts(file: Path) -> Iterator[str]:
    """The string constants of a module; what an f-string computes is left out."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(
    ("document", "owner", "names"),
    [("training.md", Trainer, {*vars(Trainer)} - {"fit"}), ("extending.md", Callback, {*vars(Callback)})],
)
def test_the_methods_that_a_document_lists_are_those_of_the_code(document: str, owner: type, names: set[str]) -> None:
    cells = [code for _, row in table_rows(ROOT / "docs" / document) for code in code_of(row[0])]
    calls = [call for cell in cells if (call := re.fullmatch(r"(\w+)\((.*)\)", cell)) and hasattr(owner, call[1])]
    assert {name for name in names if not name.startswith("_")} <= {call[1] for call in calls}
    for call in calls:
        arguments = [*inspect.signature(getattr(owner, call[1])).parameters]
        assert arguments == ["self", *filter(None, call[2].split(", "))]
