"""`blockdiff eval` from data files to numbers, for every task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.data.template import packaged_template
from blockdiff.sampling import Generation, Sampler
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.commands import run
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

GSM8K = [
    {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "What is 2 * 3?", "answer": "#### 6"},
]
CHAT = {"messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]}


def refusal(*words: str | Path) -> str:
    result = run(*words)
    assert result.exit_code in (1, 2) and len(result.stderr.splitlines()) == 1, result.output
    return str(result.stderr)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny_config(canvas_length=8, **TWO_LAYERS)
    folder = tmp_path_factory.mktemp("eval") / "model"
    made = init(config, seed=3, device="cpu", kernels="torch")
    settings = Generation(max_steps=3, max_new_tokens=16, eos_ids=(1,))
    checkpoint.save(made, folder, tokenizer=chat_tokenizer(packaged_template()), generation=settings)
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_needs_no_script(model, tmp_path):
    data, output = write(tmp_path / "test.jsonl", GSM8K), tmp_path / "e.json"
    columns = ("--columns", "prompt=question,response=answer")
    result = run("eval", model, "--task", "gsm8k", "--data", data, *columns, "--output", output, "--seed", "4")
    assert result.exit_code == 0, result.output
    numbers = json.loads(output.read_text())
    assert (numbers["task"], numbers["count"], numbers["seed"], numbers["max_steps"]) == ("gsm8k", 2, 4, 3)
    assert [record["prompt"] for record in numbers["records"]] == [row["question"] for row in GSM8K]
    assert [record["reference"] for record in numbers["records"]] == [row["answer"] for row in GSM8K]
    assert {"answer", "text", "is_solved", "steps"} <= numbers["records"][0].keys()
    # 26 tokens of the longest reference are 4 canvases of 8, more than the model's own limit of 16.
    assert {len(record["steps"]) for record in numbers["records"]} == {4}
    assert f"solved              {numbers['solved']} of 2" in result.stdout
    assert f"{numbers['steps_per_canvas']:.2f} (at most 3)" in result.stdout


def test_a_task_of_ones_own_is_named_by_module_and_function(model, tmp_path, monkeypatch):
    (tmp_path / "own_rules.py").write_text("def is_long(question, text):\n    return len(text) > 0\n")
    monkeypatch.chdir(tmp_path)
    data, output = write(tmp_path / "rows.jsonl", [CHAT] * 2), tmp_path / "e.json"
    result = run("eval", model, "--task", "own_rules:is_long", "--data", data, "--output", output)
    assert result.exit_code == 0, result.output
    numbers = json.loads(output.read_text())
    assert numbers["task"] == "own_rules:is_long" and numbers["max_new_tokens"] == 16
    assert [record["is_solved"] for record in numbers["records"]] == [bool(each["text"]) for each in numbers["records"]]


def test_exact_takes_conversations_and_a_limit_on_tokens(model, tmp_path):
    data, output = write(tmp_path / "test.jsonl", [CHAT] * 3), tmp_path / "e.json"
    words = ("eval", model, "--task", "exact", "--data", data, "--output", output, "--overwrite", "--limit", "2")
    assert run(*words).exit_code == 0
    numbers = json.loads(output.read_text())
    assert (numbers["count"], numbers["errors"]) == (2, 0)
    assert {len(record["steps"]) for record in numbers["records"]} == {1}
    assert run(*words, "--max-new-tokens", "17").exit_code == 0
    assert {len(record["steps"]) for record in json.loads(output.read_text())["records"]} == {3}


def test_the_record_says_everything_that_decided_the_numbers(model, tmp_path):
    data, output = write(tmp_path / "test.jsonl", [CHAT]), tmp_path / "e.json"
    words = ("--output", output, "--seed", "4", "--steps", "2", "--batch-size", "7", "--best-of", "2")
    assert run("eval", model, "--task", "exact", "--data", data, *words).exit_code == 0
    numbers = json.loads(output.read_text())
    asked = {"seed": 4, "max_steps": 2, "max_new_tokens": 2, "batch_size": 7, "best_of": 2}
    asked |= {"thinking": False, "allow_control_tokens": False}
    assert {name: numbers[name] for name in asked} == asked
    settings = numbers["settings"]
    assert (settings["family"], settings["canvas_length"]) == ("diffusion_gemma", 8)
    assert (settings["dtype"], settings["device"]) == ("float32", "cpu")
    assert settings["generation"]["eos_ids"] == [1] and settings["generation"]["entropy_bound"] == 0.1
    assert "EntropyBound" in settings["strategy"] and settings["corruption"] == "uniform"
    assert {"python", "blockdiff", "torch", "transformers", "tokenizers"} == settings["versions"].keys()
    assert numbers["first_canvas_seconds"] <= numbers["seconds"]
    (record,) = numbers["records"]
    assert record["draw"] in (0, 1) and record["score"] < 0


def test_two_models_are_compared_on_the_same_rows(model, tmp_path):
    other = tmp_path / "other"
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=8, device="cpu", kernels="torch")
    settings = Generation(max_steps=2, max_new_tokens=16, eos_ids=(1,))
    checkpoint.save(made, other, tokenizer=chat_tokenizer(packaged_template()), generation=settings)
    data, output = write(tmp_path / "test.jsonl", [CHAT] * 3), tmp_path / "e.json"
    result = run("eval", model, "--compare", other, "--task", "exact", "--data", data, "--output", output)
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert [each["model"] for each in written["models"]] == [str(model), str(other)]
    assert [each["settings"]["generation"]["max_steps"] for each in written["models"]] == [3, 2]
    assert written["comparison"]["neither"] == 3 and written["comparison"]["p_value"] == 1.0
    assert written["comparison"]["forwards"]["difference"] == -1.0
    rows = written["records"]
    assert [(row["first"]["steps"], row["second"]["steps"]) for row in rows] == [([3], [2])] * 3
    assert "McNemar" in result.stdout and "-1.00 on average" in result.stdout
    alone = tmp_path / "alone.json"
    assert run("eval", other, "--task", "exact", "--data", data, "--output", alone).exit_code == 0
    assert [r["text"] for r in json.loads(alone.read_text())["records"]] == [row["second"]["text"] for row in rows]


def test_an_adapter_is_compared_with_the_model_under_it(model, tmp_path, monkeypatch):
    read, loaded = Sampler.from_pretrained, []

    def from_pretrained(path: str, adapter: str | None = None, **how: Any) -> Sampler:
        loaded.append((path, adapter))
        return read(path, **how)

    monkeypatch.setattr(Sampler, "from_pretrained", from_pretrained)
    data, adapter = write(tmp_path / "test.jsonl", [CHAT]), tmp_path / "a"
    adapter.mkdir()
    result = run("eval", model, "--adapter", adapter, "--compare", model, "--task", "exact", "--data", data)
    assert result.exit_code == 0, result.output
    assert loaded == [(str(model), str(adapter)), (str(model), None)]


def test_rows_are_asked_in_the_form_that_the_model_was_trained_in(model, tmp_path):
    taught = tmp_path / "model"
    shutil.copytree(model, taught)
    raw, chat = {"prompt": "2+3", "response": "5"}, CHAT
    data = write(tmp_path / "test.jsonl", [raw, chat])
    words = ("--task", "exact", "--data", data, "--steps", "1", "--output", tmp_path / "e.json", "--overwrite")

    def asked(place: Path, *more: str) -> tuple[list[Any], str]:
        result = run("eval", place, *words, *more)
        assert result.exit_code == 0, result.output
        return [r["prompt"] for r in json.loads((tmp_path / "e.json").read_text())["records"]], str(result.stderr)

    question = [{"role": "user", "content": "2+3"}]
    DiffusionSettings(prompts="chat").save(taught)
    prompts, said = asked(taught)
    assert prompts == [question, question] and "note: 1 raw prompt is put into the chat template" in said
    with pytest.warns(UserWarning, match="was trained on conversations, and a raw prompt .*--chat"):
        assert asked(taught, "--raw") == (["2+3", question], "")
    DiffusionSettings(prompts="raw").save(taught)
    assert asked(taught) == (["2+3", question], "")
    prompts, said = asked(model)
    assert prompts == ["2+3", question] and "note: 1 row is a raw prompt, and the model has a chat template" in said
    assert asked(model, "--chat") == ([question, question], "")
    assert "--raw" in refusal("eval", model, *words, "--raw", "--chat")
    DiffusionSettings(prompts="chat").save(taught)
    result = run("eval", model, *words, "--compare", taught)  # each as it was trained
    assert result.exit_code == 0, result.output
    assert "1 raw prompt is put" in result.stderr and "1 row is a raw prompt" in result.stderr


def test_thinking_is_asked_for_in_chats_only(model, tmp_path):
    data, output = write(tmp_path / "test.jsonl", GSM8K), tmp_path / "e.json"
    columns = ("--columns", "prompt=question,response=answer", "--output", output)
    words = ("eval", model, "--task", "gsm8k", "--data", data, *columns, "--thinking")
    assert "is a prompt in raw text, which has no place for it; give --chat as well" in refusal(*words)
    assert run(*words, "--chat").exit_code == 0
    asked = json.loads(output.read_text())
    assert asked["thinking"] is True
    assert run(*words[:-1], "--chat", "--overwrite").exit_code == 0
    plain = json.loads(output.read_text())
    assert [r["text"] for r in asked["records"]] != [r["text"] for r in plain["records"]]


def test_rows_that_cannot_be_answered_are_said_and_an_evaluation_without_any_answer_is_one_line(model, tmp_path):
    deaf = tmp_path / "model"
    shutil.copytree(model, deaf)
    (deaf / "chat_template.jinja").unlink()
    chat, raw = CHAT, {"prompt": "2+3=", "response": "5"}
    words = ("eval", deaf, "--task", "exact", "--steps", "1", "--data")
    result = run(*words, write(tmp_path / "both.jsonl", [chat, raw]))
    said = f"not answered      1, first {tmp_path}/both.jsonl:1: the tokenizer has no chat"
    assert result.exit_code == 0 and said in result.stdout
    output = tmp_path / "e.json"
    said = refusal(*words, write(tmp_path / "chat.jsonl", [chat, chat]), "--output", output)
    assert f"no row could be answered: {tmp_path}/chat.jsonl:1: the tokenizer has no chat" in said
    assert not output.exists()


def test_the_same_seed_gives_the_same_answers(model, tmp_path):
    data, output = write(tmp_path / "test.jsonl", GSM8K), tmp_path / "e.json"
    texts = []
    for seed in ("1", "1", "2"):
        words = ("--columns", "prompt=question,response=answer", "--output", output, "--overwrite", "--seed", seed)
        assert run("eval", model, "--task", "gsm8k", "--data", data, *words).exit_code == 0
        texts.append([record["text"] for record in json.loads(output.read_text())["records"]])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("rows", "words", "expected"),
    [
        ([GSM8K[0]], ("--task", "gsm8k"), "question"),
        ([{"prompt": "a", "response": "b"}], ("--task", "gsm8k"), "rows.jsonl:1: the response has no number after"),
        ([CHAT, {"prompt": "a", "response": "b"}], ("--task", "sudoku"), "rows.jsonl:1: not a sudoku prompt"),
        ([CHAT], ("--task", "no_rules:at_all"), "no_rules:at_all cannot be imported (ModuleNotFoundError"),
        ([CHAT], ("--task", "exact", "--columns", "question"), "'question' is not ROLE=COLUMN"),
        ([CHAT], ("--task", "exact", "--columns", "ask=question"), "columns has the unknown key 'ask'"),
        ([CHAT], ("--task", "exact", "--columns", "id=a,id=b"), "id appears twice"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_before_the_model_is_read(tmp_path, rows, words, expected):
    data = write(tmp_path / "rows.jsonl", rows)
    assert expected in refusal("eval", tmp_path / "no-model", "--data", data, *words)


def test_a_place_that_cannot_be_written_is_refused_before_and_the_json_never_lost(model, tmp_path, monkeypatch):
    data, output = write(tmp_path / "test.jsonl", [CHAT]), tmp_path / "e.json"
    words = ("eval", model, "--task", "exact", "--data", data, "--output")
    result = run(*words, Path("/none-of-these/e.json"))
    assert result.exit_code == 1 and "there is no /none-of-these; make it" in result.stderr and not result.stdout
    kept = Path.write_text

    def full(path, *rest, **more):
        if path == output:
            raise OSError(28, "No space left on device")
        return kept(path, *rest, **more)

    monkeypatch.setattr(Path, "write_text", full)
    result = run(*words, output)
    assert result.exit_code == 1 and "e.json: cannot be written (No space left on device); the JSON is" in result.stderr
    assert json.loads(result.stdout[result.stdout.index("{") :])["count"] == 1
