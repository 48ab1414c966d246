"""`blockdiff sample --prompts FILE --output FILE`: order, going on after an interruption, and several processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from blockdiff.checkpoint import init, load, save, save_adapter
from blockdiff.cli import together
from blockdiff.cli.answers import Answers, fingerprint
from blockdiff.cli.main import app
from blockdiff.cli.tally import AnsweredSoFar
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import BlockdiffError, RunError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, draw_adapters, targets
from blockdiff.sampling import Request, Result
from tests.support import forked
from tests.support.commands import refusal, run
from tests.support.oracle import tiny_config

TOKENIZER = character_tokenizer("abcdefgh")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(init(tiny_config(canvas_length=8), seed=0, device="cpu", kernels="torch"), folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "abc"[: 1 + n % 3]}) + "\n" for n in range(9)))
    return folder


def words(model: Path, output: Path, *more: str) -> list[str]:
    given = "--prompts", str(model / "prompts.jsonl"), "--output", str(output)
    return ["sample", str(model), *given, "--steps", "3", "--max-new-tokens", "16", "--batch-size", "4", *more]


def works(given: list[str]) -> str:
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_a_file_of_some_answers_is_gone_on_with_and_ends_as_if_never_interrupted(model, tmp_path):
    whole, some = tmp_path / "whole.jsonl", tmp_path / "some.jsonl"
    works(words(model, whole))
    lines = whole.read_text().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == list(range(1, 10))
    some.write_text("".join(lines[n] for n in (7, 2, 4)) + lines[1][:20])  # out of order, and killed while writing
    assert "6 answered, 0 failed" in (said := works(words(model, some))) and "3 were there already" in said
    assert some.read_bytes() == whole.read_bytes()
    assert "0 answered, 0 failed" in works(words(model, some)) and some.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("more", [("--seed", "1"), ("--steps", "2"), ("--strategy", "quota")])
def test_answers_to_other_settings_are_never_mixed(model, tmp_path, more):
    output = tmp_path / "o.jsonl"
    works(words(model, output))
    before = output.read_bytes()
    result = CliRunner().invoke(app, words(model, output, *more))
    assert result.exit_code == 1 and "answers to other prompts or by other settings" in result.stderr
    assert output.read_bytes() == before
    works(words(model, output, *more, "--overwrite"))
    assert output.read_bytes() != before


def test_answers_of_other_weights_in_the_same_directory_are_never_mixed(model, tmp_path):
    shutil.copytree(model, other := tmp_path / "model")
    works(words(other, output := tmp_path / "o.jsonl"))
    changed = load(other)
    with torch.no_grad():
        changed.layers[0].mlp.up_proj.weight.add_(1)
    save(changed, other, overwrite=True)
    shutil.copy(model / "prompts.jsonl", other)
    result = CliRunner().invoke(app, words(other, output))
    assert result.exit_code == 1 and "answers to other prompts or by other settings" in result.stderr


def test_a_request_with_another_image_in_the_same_file_is_another_one(tmp_path):
    file, found = tmp_path / "a.png", set()
    for content in (b"one", b"other", b"one"):
        file.write_bytes(content)
        found.add(fingerprint(Request(1, prompt="a", images=[str(file)]), {}))
    file.unlink()
    assert len(found | {fingerprint(Request(1, prompt="a", images=[str(file)]), {})}) == 3


def test_what_failed_is_asked_again(model, tmp_path):
    output = tmp_path / "o.jsonl"
    works(words(model, output))
    lines = output.read_text().splitlines(keepends=True)
    failed = {**json.loads(lines[3]), "finish_reason": "error", "error": "no"}
    output.write_text("".join([*lines[:3], json.dumps(failed) + "\n", *lines[4:]]))
    assert "1 answered" in works(words(model, output))
    assert output.read_text().splitlines(keepends=True) == lines


def test_answers_stand_in_order_on_stdout_and_in_the_file_although_they_come_as_they_finish(tmp_path, capfdbinary):
    results = [Result(n, "", [], "eos", [1]) for n in range(3)]
    shown, file = Answers(None, ["a", "b", "c"]), Answers(tmp_path / "o", ["a", "b", "c"])
    for place in (2, 0, 1):
        shown.write(place, results[place])
        file.write(place, results[place])
    assert [json.loads(line)["id"] for line in capfdbinary.readouterr().out.splitlines()] == [0, 1, 2]
    ids = lambda: [json.loads(line)["id"] for line in (tmp_path / "o").read_text().splitlines()]  # noqa: E731
    assert ids() == [2, 0, 1]
    file.close()
    assert ids() == [0, 1, 2]


def test_rows_to_train_on_keep_images_and_an_empty_answer_has_none(tmp_path):
    asked = [Request(n, prompt=f"{n}?", images=["i.png"] * (n == 2)) for n in range(3)]
    path, answers = tmp_path / "o", ["a", "b", "c"]
    file = Answers(path, answers, rows=asked)
    for place, text in ((2, "x"), (1, " "), (0, "y")):
        file.write(place, Result(place, text, [5], "eos", [1]))
    file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["id"], row["response"], row.get("images")) for row in rows] == [(0, "y", None), (2, "x", ["i.png"])]
    again = Answers(path, answers, rows=asked)
    again.keep(overwrite=False)
    assert again.missing == [1]


def test_a_file_that_an_editor_has_saved_stays_one_answer_a_line(tmp_path):
    path = tmp_path / "o"
    path.write_bytes(b'\xef\xbb\xbf{"asked": "a"}\r\n\r\n{"asked": "b"}')
    answers = Answers(path, ["a", "b", "c"])
    answers.keep(overwrite=False)
    assert path.read_bytes() == b'{"asked": "a"}\n{"asked": "b"}\n'
    answers.write(2, Result(3, text="", tokens=[], finish_reason="eos", steps=[1]))
    answers.close()
    assert [json.loads(line)["asked"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_directory_as_the_file_to_write_is_refused_before_anything_is_answered(model, tmp_path, monkeypatch):
    monkeypatch.setattr("blockdiff.sampling.Sampler.from_pretrained", None)
    for option in ("--output", "--trace"):
        (given := tmp_path / "d.html").mkdir(exist_ok=True)
        result = CliRunner().invoke(app, ["sample", str(model), "--prompt", "abc", option, str(given)])
        assert result.exit_code == 1 and "d.html: is a directory; name a file in it" in result.stderr


def test_lines_that_are_no_answers_are_refused(tmp_path):
    (tmp_path / "o").write_text('{"id": 1}\n')
    with pytest.raises(BlockdiffError, match="--overwrite"):
        Answers(tmp_path / "o", ["a"]).keep(overwrite=False)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys):
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr("blockdiff.cli.tally.time.monotonic", lambda: float(next(clock)))
    progress = AnsweredSoFar(8)
    for _ in range(8):
        progress.add()
    assert capsys.readouterr().err == "3 of 8 answered, 0.2 a second\n6 of 8 answered, 0.2 a second\n"


def test_an_interruption_says_where_it_stands_and_keeps_what_is_answered(model, tmp_path, monkeypatch):
    output = tmp_path / "o.jsonl"
    add = AnsweredSoFar.add

    def interrupted(progress: AnsweredSoFar) -> None:
        add(progress)
        if progress.done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnsweredSoFar, "add", interrupted)
    result = CliRunner().invoke(app, words(model, output))
    assert result.exit_code == 130
    assert f"stopped: 5 of 9 answered and in {output}; the same command goes on from there" in result.stderr
    assert len(output.read_text().splitlines()) == 5


def test_processes_share_the_prompts_and_write_one_file(model, tmp_path):
    whole, shared = tmp_path / "whole.jsonl", tmp_path / "shared.jsonl"
    works(words(model, whole))
    lines = whole.read_text().splitlines(keepends=True)
    (tmp_path / ".shared.jsonl.part-3").write_text(lines[0])  # of processes that were killed
    first, other = forked.run_command(2, words(model, shared, "--device", "cpu"), tmp_path)
    assert "8 answered, 0 failed" in first and "1 were there already" in first and "answered" not in other
    tokens = [[json.loads(line)["tokens"] for line in found] for found in (shared.read_text().splitlines(), lines)]
    assert tokens[0] == tokens[1]
    assert not list(tmp_path.glob(".*part*"))


def adapter_of(model: Path, directory: Path) -> Path:
    """An adapter of everything that can be adapted, which changes what the model says."""
    adapted = load(model, dtype="float32", device="cpu")
    adapt(adapted, targets(adapted, dict.fromkeys(("attention", "mlp", "experts"), LowRank(2, 4))), [3])
    draw_adapters(adapted, 0, torch.device("cpu"), torch.float32)
    for tensor in adapter_tensors(adapted).values():
        tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    return save_adapter(adapted, directory)


def test_a_long_prompt_is_not_read_in_silence(model, monkeypatch):
    ask = "sample", model, "--prompt", "abcd" * 10, "--max-new-tokens", "64", "--steps", "2"
    assert "encoded" not in run(*ask).stderr
    monkeypatch.setattr("blockdiff.terminal.FIRST_SECONDS", 0.001)
    monkeypatch.setattr("blockdiff.cli.sample.LONG", 40)
    assert re.match(r"\d+ tokens encoded so far\n", run(*ask).stderr)


def test_a_directory_without_an_adapter_is_said_to_be_one(model, tmp_path):
    text = refusal("sample", model, "--adapter", tmp_path, "--prompt", "1")
    assert "holds no adapter (no adapter_config.json); name the directory of one" in " ".join(text.split())


def test_processes_that_share_a_model_are_launched_as_one_group_and_end_with_an_error_of_any(tmp_path):
    script = "import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    run = "from blockdiff.cli import together; import sys; sys.exit(together.launch(2, sys.argv[1:]))"
    launcher = [sys.executable, "-c", run, sys.executable, "-c", f"{script}; sys.exit(7 * int(os.environ['RANK']))"]
    assert subprocess.run([*launcher, str(tmp_path / "rank-")], timeout=forked.HUNG).returncode == 7
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_processes_that_share_a_model_end_when_their_launcher_is_killed(tmp_path):
    os.mkfifo(alive := tmp_path / "alive")
    script = "import sys, time; from blockdiff.cli import together; together.end_with_launcher()"
    script += "; held = open(sys.argv[1], 'w'); held.write('x'); held.flush(); time.sleep(600); held.write('late')"
    run = "from blockdiff.cli import together; import sys; sys.exit(together.launch(2, sys.argv[1:]))"
    launcher = subprocess.Popen([sys.executable, "-c", run, sys.executable, "-c", script, str(alive)])
    with alive.open() as said:
        assert said.read(2) == "xx"
        launcher.kill()
        launcher.wait()
        assert said.read() == ""  # the end, which comes when no process has the file any more


def test_more_processes_than_cores_or_than_divide_the_heads_are_refused_before_any_starts(model, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(together, "launch", None)
    with pytest.raises(typer.BadParameter, match="8 cores"):
        together.join(100, "cpu", str(model))
    with pytest.raises(RunError, match=r"^parallel\.tensor: 3 .*128.*self_conditioning"):
        together.join(3, "cpu", str(model))


def test_processes_run_one_model_together_with_its_adapter_and_answer_as_one_does(model, tmp_path):
    whole, shared, plain = (tmp_path / f"{name}.jsonl" for name in ("whole", "shared", "plain"))
    how = "--adapter", str(adapter_of(model, tmp_path / "adapter")), "--strategy", "entropy_bound:top_k=9"
    works(words(model, whole, *how))
    works(words(model, plain, *how[2:]))
    assert plain.read_text() != whole.read_text()
    given = words(model, shared, *how, "--device", "cpu", "--tensor-parallel", "2")
    first, other = forked.run_command(2, given, tmp_path)
    assert first.count("9 answered, 0 failed") == 1 and "answered" not in other, (first, other)
    tokens = [[json.loads(line)["tokens"] for line in found.read_text().splitlines()] for found in (shared, whole)]
    assert tokens[0] == tokens[1]
