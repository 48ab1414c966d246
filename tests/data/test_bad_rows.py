"""Every malformed file is one clear line, before anything is written, and no row is lost on the way to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.data.chat import Encoder
from blockdiff.data.dataset import load_dataset
from blockdiff.data.sources import Source
from blockdiff.data.stream import StreamedExamples
from blockdiff.errors import DataError
from tests.bad_rows import CORPUS, GOOD
from tests.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

ENCODER = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8)


@pytest.fixture(params=CORPUS)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """The file, the beginning of its line, and a word of the reason."""
    name, content, place, reason = CORPUS[request.param]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path, f"{path}{place}", reason


def check(message: str, begin: str, reason: str) -> None:
    assert message.startswith(begin) and reason in message
    assert "\n" not in message and "; " in message.removeprefix(begin)
    assert len(message) < 600


def test_the_corpus_is_large_enough_to_mean_something() -> None:
    assert len(CORPUS) >= 40


def test_a_bad_file_is_one_line_and_leaves_no_cache(bad: tuple[Path, str, str], tmp_path: Path) -> None:
    path, begin, reason = bad
    good = tmp_path / "good.jsonl"
    good.write_text(GOOD + "\n")
    with pytest.raises(DataError) as caught:
        load_dataset([Source(str(path))], ENCODER, cache=tmp_path / "cache")
    check(str(caught.value), begin, reason)
    assert list(tmp_path.glob("cache/*")) == []
    with pytest.raises(DataError) as caught:
        StreamedExamples([Source(str(path))], ENCODER, 8, seed=0)[0]
    check(str(caught.value), begin, reason)


def test_a_bad_file_is_one_line_on_stderr(bad: tuple[Path, str, str], tmp_path: Path) -> None:
    path, begin, reason = bad
    words = ["data", "tokenizer", str(path), "--vocab-size", "300", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    (said,) = result.stderr.splitlines()
    check(said.removeprefix("blockdiff: error: "), begin, reason)
    assert result.exit_code == 1 and result.stdout == "" and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
