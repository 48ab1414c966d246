"""Several answers to a prompt, standard input and output, system messages, JSON, and the end of a chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockdiff import checkpoint
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.cli.main import app
from blockdiff.data.template import packaged_template
from blockdiff.request_options import OPTIONS, RequestOptions
from blockdiff.sampling import Request, Sampler
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.commands import refusal, works


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model with random weights."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = packaged_template()
    checkpoint.save(checkpoint.init("sudoku4", tokenizer=tokenizer, device="cpu"), folder, tokenizer=tokenizer)
    return folder


def piped(text: str, *words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], input=text)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that reach the sampler."""
    seen: list[Request] = []
    stream = Sampler.stream

    def noted(self: Sampler, prompts: Any, **settings: Any) -> Any:
        seen.extend(prompts := list(prompts))
        return stream(self, prompts, **settings)

    monkeypatch.setattr(Sampler, "stream", noted)
    return seen


QUICK = ("--steps", "1", "--max-new-tokens", "8", "--device", "cpu")


def test_n_answers_are_those_among_which_best_of_chooses(model: Path) -> None:
    prompt = json.dumps({"id": "a", "prompt": "Hi"}) + "\nnonsense\n"
    words = ("sample", model, "--prompts", "-", "--scores", *QUICK)
    lines = [json.loads(line) for line in piped(prompt, *words, "-n", "3").stdout.splitlines()]
    assert [(line["id"], line.get("draw")) for line in lines] == [("a", 0), ("a", 1), ("a", 2), (2, None)]
    assert "stdin:2: not valid JSON" in lines[3]["error"]
    alone = json.loads(piped(prompt, *words).stdout.splitlines()[0])
    best = json.loads(piped(prompt, *words, "--best-of", "3").stdout.splitlines()[0])
    assert alone["tokens"] == lines[0]["tokens"] != lines[1]["tokens"]
    denoised = best.pop("forwards")["denoise"]
    assert denoised == sum(line.pop("forwards")["denoise"] for line in lines[:3])
    assert best == max(lines[:3], key=lambda line: line["score"])


# Of each option of a request that the command has, words and what they ask for.
GIVEN: dict[str, tuple[list[str], Any]] = {
    "thinking": (["--thinking"], True),
    "allow_control_tokens": (["--allow-control-tokens"], True),
    "best_of": (["--best-of", "2"], 2),
    "scores": (["--scores"], True),
    "template": (["--template", "a<?2>"], "a<?2>"),
    "regex": (["--regex", "a{3}"], "a{3}"),
    "json_schema": (["--json-schema", "-"], '{"type": "null"}'),
    "banned": (["--banned", "a", "--banned", "b"], ("a", "b")),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "min_tokens": (["--min-tokens", "2"], 2),
    "draft": (["--draft", "ab"], "ab"),
    "noise": (["--draft", "ab", "--noise", "0.25"], 0.25),
    "stop": (["--stop", "a"], ("a",)),
}


def test_each_option_of_a_request_arrives_in_it_alone(model: Path, asked: list[Request]) -> None:
    assert {*GIVEN} == {name for name, option in OPTIONS.items() if option.help}
    defaults = RequestOptions()
    for name, (words, value) in GIVEN.items():
        asked.clear()
        piped(GIVEN["json_schema"][1], "sample", model, "--chat", "Hi", *words, *QUICK)
        [request] = asked
        others = [other for other in OPTIONS if other not in (name, "draft")]
        assert getattr(request, name) == value, name
        assert all(getattr(request, other) == getattr(defaults, other) for other in others), name


def test_one_prompt_gives_its_texts_or_with_an_output_json_lines(model: Path) -> None:
    schema = '{"type": "boolean"}'
    words = ("sample", model, "--prompt", "Hi", "--json-schema", "-", "-n", "2", *QUICK)
    texts = piped(schema, *words).stdout.splitlines()
    assert len(texts) == 2 and {*texts} <= {"true", "false"}
    lines = piped(schema, *words, "--output", "-").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


def test_streamed_draws_are_marked_and_the_answer_stands_alone_on_stdout(model: Path) -> None:
    run = piped("", "sample", model, "--prompt", "Hi", "--best-of", "2", "--stream", *QUICK)
    assert "[1] " in run.stderr and "[1 draw 1] " in run.stderr and "draw" not in run.stdout


def test_a_system_message_comes_before_conversations_that_have_none(
    model: Path, tmp_path: Path, asked: list[Request]
) -> None:
    system = {"role": "system", "content": "own"}
    rows = [[{"role": "user", "content": "Hi"}], [system, {"role": "user", "content": "Hi"}]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    works("sample", model, "--prompts", tmp_path / "p.jsonl", "--system", "given", *QUICK)
    answered = [[*row, {"role": "assistant", "content": "x"}] for row in rows]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in answered))
    works("eval", model, "--task", "exact", "--data", tmp_path / "r.jsonl", "--system", "given", *QUICK)
    assert [request.messages[0]["content"] for request in asked if request.messages] == ["given", "own"] * 2


def test_eval_prints_json_and_nothing_else(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    words = ("eval", model, "--task", "exact", "--data", tmp_path / "r.jsonl", *QUICK, "--temperature", "0.5")
    numbers = json.loads(works(*words, "--json"))
    assert numbers["count"] == 1 and "t_min=0.25, t_max=0.5" in numbers["settings"]["strategy"]
    assert "--json" in refusal(*words, "--output", "-", code=2)
    assert "--thinking" in refusal(*words, "--thinking", code=2)


def test_inspect_and_plan_print_json(model: Path) -> None:
    found = json.loads(works("inspect", model, "--json"))
    assert found["parameters"] == sum(part["trained"] + part["frozen"] for part in found["parts"])
    made = json.loads(works("plan", model, "--json", "--device", "cpu", "--gpu-memory", "1"))
    assert made["fits"] and made["rows"] > 0


def test_a_chat_ends_with_quit_and_its_help_names_it(model: Path) -> None:
    run = piped("/help\n/quit\nHi\n", "chat", model, *QUICK)
    assert run.exit_code == 0 and run.stdout == "" and "/quit          end the chat" in run.stderr


def test_completion_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_BLOCKDIFF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "blockdiff sample m --temp")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert "--temperature" in piped("").stdout


def test_prompts_of_a_file_are_asked_in_the_form_that_the_model_was_trained_in(
    model: Path, tmp_path: Path, asked: list[Request]
) -> None:
    taught = tmp_path / "model"
    shutil.copytree(model, taught)
    DiffusionSettings(prompts="chat").save(taught)
    lines = '{"prompt": "Hi", "seed": 3}\n{"messages": [{"role": "user", "content": "Ho"}]}\nnonsense\n'
    result = piped(lines, "sample", taught, "--prompts", "-", *QUICK)
    assert "note: 1 raw prompt is put into the chat template" in result.stderr
    first, second, _ = asked
    assert (first.prompt, first.messages, first.seed) == (None, ({"role": "user", "content": "Hi"},), 3)
    assert second.messages == ({"role": "user", "content": "Ho"},)
    asked.clear()
    with pytest.warns(UserWarning, match="trained on conversations"):
        piped(lines, "sample", taught, "--prompts", "-", "--raw", *QUICK)
        works("sample", taught, "--prompt", "Hi", *QUICK)
    assert [each.prompt for each in asked if isinstance(each, Request)] == ["Hi", None, "Hi"]
    result = piped(lines, "sample", model, "--prompts", "-", *QUICK)
    assert "note: 1 row is a raw prompt, and the model has a chat template; write" in result.stderr
