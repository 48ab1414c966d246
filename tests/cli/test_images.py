"""Pictures on the command line: `sample --image`, files of prompts, `chat`, `eval`, and the page of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockdiff.cli.chat import Chat
from blockdiff.sampling import Request, Sampler
from tests.support.commands import refusal, run, works
from tests.support.seeing import png, seeing_checkpoint

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return seeing_checkpoint(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def red(tmp_path) -> Path:
    (tmp_path / "red.png").write_bytes(png())
    return tmp_path / "red.png"


def test_a_prompt_and_a_chat_see_the_pictures_of_image_options_and_the_page_shows_them(model, red, tmp_path):
    page, parts = tmp_path / "run.html", [{"type": "image", "image": str(red)}, {"type": "text", "text": "what?"}]
    said = works("sample", model, "--image", red, "--image", red, "--prompt", "total?", "--trace", page)
    chatted = works("sample", model, "--image", red, "--chat", "what?")
    requests = [
        Request(1, prompt="<image><image>total?", images=[str(red)] * 2),
        Request(1, messages=[{"role": "user", "content": parts}]),
    ]
    raw, of_chat = Sampler.from_pretrained(model, device="cpu").generate(requests)
    assert (said.strip(), chatted.strip()) == (raw.text.strip(), of_chat.text.strip())
    assert "[image][image]total?" in page.read_text() and len(page.read_text()) < 200_000


def test_lines_of_a_file_name_pictures_in_its_folder_and_bad_ones_are_lines_with_errors(model, red, tmp_path):
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "red.png").write_bytes(png())
    lines = [
        {"prompt": "what? <image>", "image": "pictures/red.png"},
        {"messages": [{"role": "user", "content": "what? <image>"}], "images": ["pictures/red.png"]},
        {"prompt": "what?", "image": "../red.png"},
        {"prompt": "what?", "image": "https://example.com/red.png"},
        {"prompt": "what?", "image": "pictures/none.png"},
        {"prompt": "what? <image>", "images": []},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("sample", model, "--prompts", folder / "rows.jsonl")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 2 + ["error"] * 3 + ["length"]
    words = ("lies outside of", "URLs are not fetched", "no such image")
    assert all(each in answer["error"] for each, answer in zip(words, answers[2:5], strict=True))


def test_what_cannot_be_is_said_in_one_line(model, red, tmp_path):
    words = ("sample", model, "--image", red)
    assert "lines of --prompts name their images themselves" in refusal(*words, "--prompts", "a.jsonl", code=2)
    (tmp_path / "half.png").write_bytes(png()[:40])
    assert "half.png" in refusal("sample", model, "--image", tmp_path / "half.png", "--prompt", "a")
    for name in ("--prompt", "--chat"):
        assert "2 of <image>, and the number of images is 1" in refusal(*words, name, "<image><image>")
    bare = seeing_checkpoint(tmp_path / "bare")
    (bare / "processor_config.json").unlink()
    assert "the settings of the image processor" in refusal("sample", bare, "--image", red, "--prompt", "a")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"image_token_id": 258_880}))  # as of a preset of text
    for name in ("--prompt", "--chat"):
        assert "the model takes no images" in refusal("sample", bare, "--image", red, name, "a")


def test_a_chat_puts_pictures_into_the_next_message_and_keeps_them_where_it_is_refused(model, red, capsys):
    sampler = Sampler.from_pretrained(model, device="cpu")
    talk = Chat(sampler)
    talk.command(f"/image {red}")
    talk.command("/image none.png")
    talk.command("/image")
    talk.say("what?")
    parts = [{"type": "image", "image": str(red)}, {"type": "text", "text": "what?"}]
    assert talk.messages[0]["content"] == parts and talk.images == []
    [expected] = sampler.generate([Request(1, messages=[{"role": "user", "content": parts}])])
    found = capsys.readouterr()
    assert found.out.strip() == expected.text.strip()
    assert "error: none.png: no such image" in found.err and "error: no image is named" in found.err
    talk.put(str(red))
    talk.say("<image> <image>")
    assert "2 of <image>" in capsys.readouterr().err and talk.images == [str(red)]
    talk.say("a" * 10**6)  # longer than the model's positions
    assert "too long" in capsys.readouterr().err and talk.images == [str(red)]


def test_templates_and_constraints_hold_in_answers_to_pictures(model, red):
    asked = [{"template": "It is <?3>."}, {"regex": "[0-9]{2}"}]
    requests = [Request(n, prompt="what?", images=[red], **each) for n, each in enumerate(asked)]
    form, digits = (each.text for each in Sampler.from_pretrained(model, device="cpu").generate(requests))
    assert form.startswith("It is ") and form.endswith(".") and len(digits) == 2 and digits.isdigit()


def test_an_evaluation_sees_the_pictures_of_its_rows(model, red):
    rows = [{"prompt": "", "image": name, "response": "a"} for name in ("red.png", "blue.png")]
    rows.append(
        {
            "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}],
            "image": "red.png",
        }
    )
    (red.parent / "blue.png").write_bytes(png("blue"))
    (red.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads(works("eval", model, "--task", "exact", "--data", red.parent / "rows.jsonl", "--json"))
    sampler = Sampler.from_pretrained(model, device="cpu")
    asked = [Request(n, prompt="", images=[red.parent / rows[n]["image"]]) for n in range(2)]
    asked.append(Request(2, messages=[{"role": "user", "content": [{"type": "image", "image": red}]}]))
    expected = sampler.generate(asked, max_new_tokens=report["max_new_tokens"])
    assert [record["text"] for record in report["records"]] == [result.text for result in expected]
    assert report["records"][2]["prompt"] == [{"role": "user", "content": [{"type": "image"}]}]
    assert expected[0].tokens != expected[1].tokens
