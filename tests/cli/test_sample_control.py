"""`blockdiff sample` with a template, a constraint, banned texts or a draft."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.data.tokenizer import character_tokenizer
from tests.support.little_model import LITTLE, save_preset

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model that writes letters and JSON."""
    from blockdiff import init, save

    folder = tmp_path_factory.mktemp("held")
    tokenizer = character_tokenizer('abc{}[]":, 0123456789-')
    save_preset(folder / "little.json", LITTLE)
    save(init(folder / "little.json", seed=0, tokenizer=tokenizer), folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def sample(model: Path, *words: str | Path) -> Any:
    return CliRunner().invoke(app, ["sample", str(model), "--device", "cpu", *(str(word) for word in words)])


def test_each_option_holds_the_response(model, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    said = {}
    for words in (
        ("--template", "a<?3>b"),
        ("--regex", "(ab|c){4}"),
        ("--json-schema", schema),
        ("--regex", "[abc]{9}", "--banned", "aa", "--banned", "bb", "--banned", "cc"),
        ("--draft", "abc", "--noise", "0.2", "--repetition-penalty", "1.2"),
    ):
        result = sample(model, "--prompt", "ab", *words)
        assert result.exit_code == 0, result.output
        said[words[0], len(words)] = result.stdout.rstrip("\n")
    assert re.fullmatch("a.{3}b", said["--template", 2]) and re.fullmatch("(ab|c){4}", said["--regex", 2])
    assert isinstance(json.loads(said["--json-schema", 2])["a"], int)
    assert re.fullmatch("(?!.*(aa|bb|cc))[abc]{9}", said["--regex", 8])


def test_a_line_of_a_prompts_file_goes_before_the_options(model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "regex": "b+"}\n{"prompt": "a"}\n{"prompt": "a", "regex": "["}\n')
    result = sample(model, "--prompts", prompts, "--regex", "c+")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert re.fullmatch("b+", lines[0]["text"]) and re.fullmatch("c+", lines[1]["text"])
    assert "cannot be used" in lines[2]["error"]


@pytest.mark.parametrize(
    "words,message,code",
    [
        (("--noise", "0.5"), "give a draft with it", 2),
        (("--regex", "["), "cannot be used", 2),
        (("--template", "abc"), "no hole to fill", 2),
        (("--json-schema", "nowhere.json"), "nowhere.json: cannot be read", 1),
        (("--repetition-penalty", "-1"), "must be a number from 0.001 to 1000", 2),
    ],
)
def test_what_cannot_hold_a_response_is_one_line(model, words, message, code):
    result = sample(model, "--prompt", "a", *words)
    assert result.exit_code == code and message in result.stderr and len(result.stderr.splitlines()) == 1
