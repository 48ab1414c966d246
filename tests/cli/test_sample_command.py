"""sample and eval from prompts to lines: fields, seeds, traces and streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import refusal, run, works


def output_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.quick
def test_output_lines_have_the_documented_fields(workshop: Path, tmp_path: Path, prompt: str) -> None:
    lines = [
        {"id": "a", "prompt": prompt},
        {"prompt": prompt, "seed": 3},
        {"prompt": 3},
        {"id": "a", "prompt": "1="},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n")
    words = ["sample", workshop / "run" / "model", "--prompts", tmp_path / "p.jsonl", "--steps", "2"]
    records = output_lines(works(*words, "--max-new-tokens", "10"))
    assert [record["id"] for record in records] == ["a", 2, 3, "a", 5]
    for record in records[:2]:
        assert list(record) == ["id", "text", "tokens", "finish_reason", "steps", "forwards"]
        assert record["finish_reason"] in ("eos", "length")
        assert len(record["tokens"]) <= 18 and all(1 <= steps <= 2 for steps in record["steps"])
    for record, line in zip(records[2:], (3, 4, 5), strict=True):
        assert record["finish_reason"] == "error" and f"p.jsonl:{line}: " in record["error"]
        assert (record["text"], record["tokens"], record["steps"]) == ("", [], [])
    written = tmp_path / "made" / "o.jsonl"
    assert works(*words, "--max-new-tokens", "10", "--output", written, "--batch-size", "1") == ""
    assert [r["id"] for r in output_lines(written.read_text())] == ["a", 2, 3, "a", 5]
    assert "is there already" in refusal(*words, "--output", written)
    works(*words, "--output", written, "--overwrite")


@pytest.mark.quick
def test_a_word_tells_of_an_answer_that_was_cut_at_one_canvas(workshop: Path, prompt: str) -> None:
    model = workshop / "run" / "model"
    length = json.loads((model / "config.json").read_text())["canvas_length"]
    words = ["sample", model, "--prompt", prompt, "--steps", "1", "--min-tokens"]
    said = f"note: 1 answer was cut at one canvas, {length} tokens, as the settings say; give --max-new-tokens"
    assert run(*words, length).stderr.splitlines() == [said]
    assert run(*words, length, "--max-new-tokens", length).stderr == ""
    assert run(*words, length, "--regex", f"[0-9]{{{length}}}").stderr == ""


def test_a_prompts_file_without_a_prompt_is_one_message_and_no_record(workshop: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('nonsense\n\n{"response": "2"}\n{"prompt": "1=", "messages": []}\n')
    words = ["sample", workshop / "run" / "model", "--prompts", tmp_path / "p.jsonl"]
    line = refusal(*words, "--output", tmp_path / "o.jsonl")
    assert "p.jsonl:1: not valid JSON" in line and "nor is any of the other 2 lines a prompt" in line
    assert run(*words).stdout == "" and not (tmp_path / "o.jsonl").exists()


def test_sampling_imports_neither_a_compiler_nor_the_generation_of_transformers(workshop: Path, prompt: str) -> None:
    unwanted = (
        *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "accelerate", "datasets"),
        *("transformers.generation.utils", "transformers.modeling_utils", "transformers.activations"),
        *("matplotlib", "rich.console", "blockdiff.training", "blockdiff.objective"),
    )
    code = (
        "import sys; from blockdiff.cli.main import app\n"
        f"try: app(['sample', {str(workshop / 'run' / 'model')!r}, '--prompt', {prompt!r}, '--steps', '1'])\n"
        f"finally: print(sorted({set(unwanted)} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.quick
def test_seeds_come_from_the_line_then_from_the_option_and_the_id(workshop: Path, tmp_path: Path, prompt: str) -> None:
    def texts(lines: list[dict[str, Any]], seed: int) -> list[str]:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt, **line}) + "\n" for line in lines))
        words = ["sample", workshop / "run" / "model", "--prompts", tmp_path / "p.jsonl", "--steps", "1"]
        return [record["text"] for record in output_lines(works(*words, "--seed", str(seed)))]

    first = texts([{"id": "a"}, {"id": "b"}, {"seed": 7}, {}], 0)
    assert len(set(first)) == 4
    # Another order and another line number: the id and the line's own seed go with the request.
    assert texts([{"id": "x", "seed": 7}, {"id": "b"}, {"id": "a"}], 0) == [first[2], first[1], first[0]]
    other = texts([{"id": "a"}, {"id": "b"}, {"seed": 7}, {}], 1)
    assert other[2] == first[2] and other[0] != first[0] and other[3] != first[3]


def test_traces_are_written_as_the_suffix_says(workshop: Path, tmp_path: Path, prompt: str) -> None:
    words = ["sample", workshop / "run" / "model", "--prompt", prompt, "--steps", "2", "--trace"]
    text = works(*words, tmp_path / "t.jsonl")
    (trace,) = output_lines((tmp_path / "t.jsonl").read_text())
    assert trace["text"] == text.rstrip("\n") and trace["prompt"].removeprefix("<bos>") == prompt
    works(*words, tmp_path / "t.html")
    assert 'id="data"' in (tmp_path / "t.html").read_text()
    works(*words, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    works(*words, tmp_path / "t.gif")
    assert (tmp_path / "t.gif").read_bytes().startswith(b"GIF89a")


@pytest.mark.quick
def test_streaming_prints_every_canvas_once(workshop: Path, prompt: str) -> None:
    words = [
        "sample",
        workshop / "run" / "model",
        "--prompt",
        prompt,
        "--steps",
        "2",
        "--max-new-tokens",
        "36",
    ]
    assert works(*words, "--stream") == works(*words)


@pytest.mark.quick
def test_eval_reports_accuracy_and_steps_together(workshop: Path, tmp_path: Path) -> None:
    text = works(
        "eval", workshop / "run" / "model", "--task", "sudoku", "--data", workshop / "puzzles" / "test.jsonl",
        "--steps", "2", "--limit", "4", "--output", tmp_path / "e.json",
    )  # fmt: skip
    numbers = json.loads((tmp_path / "e.json").read_text())
    assert numbers["count"] == 4 and len(numbers["records"]) == 4 and numbers["max_steps"] == 2
    assert 1 <= numbers["steps_per_canvas"] <= 2
    assert f"{numbers['solved']} of 4" in text and f"{numbers['steps_per_canvas']:.2f}" in text
