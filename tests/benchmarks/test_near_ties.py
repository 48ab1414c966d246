"""The measurement of near-ties: exact where nothing differs, and it sees what does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.near_ties import compare, main
from blockdiff import checkpoint
from blockdiff.data.sudoku import alphabet
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.sampling import Request, Sampler

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer(alphabet(4))
    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(checkpoint.init("sudoku4", tokenizer=tokenizer, device="cpu"), directory, tokenizer)
    return directory


def test_in_fp64_no_request_differs_between_batch_sizes(model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.json"
    rows = [{"prompt": "1" * n + "="} for n in range(1, 7)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(model), "--prompts", str(prompts), "--batch-size", "4", "--limit", "5", "--steps", "3"]
    double, half = main([*words, "--dtypes", "float64", "bfloat16", "--output", str(output)])
    assert (double.requests, double.other_tokens, double.other_steps) == (5, 0, 0)
    assert half.dtype == "bfloat16" and half.requests == 5
    assert [found["share"] for found in json.loads(output.read_text())["dtypes"]] == [0.0, half.share]


class Forgetful(Sampler):
    """Answers differently when requests share a batch."""

    def generate(self, prompts, batch_size=32, **limits):  # type: ignore[no-untyped-def, override]
        return super().generate(prompts, seed=batch_size, batch_size=batch_size, max_steps=1)


def test_a_request_that_answers_differently_is_counted(model: Path) -> None:
    sampler = Forgetful(checkpoint.load(model, dtype="float32", device="cpu"))
    found = compare(sampler, [Request(n, tokens=[2, 5 + n]) for n in range(3)], batch_size=3)
    assert found.other_tokens == 3 and found.share == 1.0 and found.other_steps == 0
