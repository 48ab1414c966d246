"""Benchmarks that no other file here runs, each on something very small: what they print and what they check."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import adaptation, checkpoints, fp8, packing, pages, self_score, tune
from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.data.sudoku import make_splits
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.kernels import tiles
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Generation
from tests.forked import run_ranks
from tests.gathering_ranks import gathers
from tests.oracle import TWO_LAYERS, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt nothing."""
    directory = tmp_path_factory.mktemp("small") / "model"
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    settings = Generation(max_steps=2, max_new_tokens=8)
    checkpoint.save(made, directory, tokenizer=character_tokenizer("0123456789+="), generation=settings)
    return directory


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums."""
    file = tmp_path_factory.mktemp("sums") / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(8)))
    return file


def test_one_sweep_gathers_less_than_three_passes_over_every_mesh(tmp_path: Path) -> None:
    run_ranks(2, gathers, tmp_path)


def test_checkpoints_are_saved_and_loaded_in_every_way(tmp_path: Path) -> None:
    lines = checkpoints.measure(Ranks(CPU), tmp_path, mib=12, repeats=1)
    assert len(lines) == 5 and all(line.megabytes_per_second > 0 for line in lines)
    assert checkpoints.table(lines).count("\n") == 6


def test_a_model_in_fp8_is_smaller_and_near(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8", str(model), "--rows", "2", "--tokens", "5", "--device", "cpu"])
    assert fp8.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"][1] < found["bytes"][0]
    assert all(0 < found[name]["relative_error"] < 0.5 for name in ("fp8", "fp8-dynamic"))


def test_pages_are_timed_beside_dense_prefixes(model: Path) -> None:
    times = pages.measure(checkpoint.load(model, dtype="float32", device="cpu"), 4, 5, 1)
    assert len(times) == 4 and min(times) > 0


def test_packed_steps_have_the_losses_of_others(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "tiny", "--vocab-size", "300", "--pack", "64", "--batch-size", "4", "--micro-batch-size", "2"]
    packing.main([str(rows), *words, "--steps", "1", "--repeats", "1", "--device", "cpu"])
    assert capsys.readouterr().out.count("\n|") == 6


def test_draws_are_scored_by_the_model_itself(model: Path, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    words = ["--task", "exact", "--data", str(rows), "--draws", "2", "--limit", "2", "--output", str(output)]
    assert self_score.main([str(model), *words]) == 0
    assert json.loads(output.read_text())["machine"]


def test_a_model_adapts_to_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "make_splits", lambda *_, **__: make_splits(4, {"train": 64, "test": 2}))
    monkeypatch.setattr(adaptation, "solved", lambda model, rows: len(rows))
    monkeypatch.setattr(adaptation, "solved_by_transformers", lambda model, rows: len(rows))
    monkeypatch.setattr("blockdiff.training.export.draw_curves", lambda *_, **__: None)
    words = ["--base-steps", "1", "--steps", "1", "--count", "2", "--theirs", "1", "--batch-size", "2"]
    monkeypatch.setattr(sys, "argv", ["adaptation", "--output", str(tmp_path / "out"), *words])
    adaptation.main()
    found = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert found["letters_merged"] == found["puzzles"] == 2 and found["trained"] > 0


@pytest.mark.quick
@pytest.mark.parametrize("problem", tune.problems(), ids=lambda problem: f"{problem.line}, {problem.up_to:g}")
def test_a_line_of_tiles_that_is_chosen_anew_stands_in_the_table_among_what_is_tried(problem: tune.Problem) -> None:
    tile = dict(tiles.table()[problem.line, 90, 2])[problem.up_to]
    assert tile in tune.candidates(tile, {}, (0.5, 1, 2))
