"""A directory as a reader of the documents has it after `make quickstart`, only smaller."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.documents import ROOT


@pytest.fixture(scope="session")
def _quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not at the top: a bare GPU machine, which has not all of this, reads this file too.
    from blockdiff import checkpoint
    from blockdiff.data.template import packaged_template
    from blockdiff.data.tokenizer import character_tokenizer
    from blockdiff.recipes.sudoku import alphabet, write_splits
    from tests.support.chat_tokenizer import chat_tokenizer

    place = tmp_path_factory.mktemp("quickstart")
    (place / "recipes").symlink_to(ROOT / "recipes")
    puzzles = place / "data" / "sudoku4"
    tokenizer = character_tokenizer(alphabet(4))
    tokenizer.save_pretrained(puzzles / "tokenizer")
    write_splits(puzzles, 4, {"train": 24, "test": 4})
    for run, tokens in {"quickstart": tokenizer, "chat": chat_tokenizer(packaged_template())}.items():
        model = checkpoint.init("sudoku4", tokenizer=tokens, device="cpu")
        checkpoint.save(model, place / "runs" / run / "model", tokenizer=tokens)
    return place


@pytest.fixture
def quickstart(_quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a test: recipes, a few puzzles, and an untrained model where the trained one lies."""
    place = tmp_path / "quickstart"
    shutil.copytree(_quickstart, place, symlinks=True)
    monkeypatch.chdir(place)
    return place
