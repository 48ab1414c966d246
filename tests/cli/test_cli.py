"""The command line: what each command writes, and that every mistake is one line on stderr."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from blockdiff.__main__ import main
from blockdiff.cli.main import app
from tests.support.commands import refusal, run, works

DATA = [["data", "sudoku"], ["data", "chat"], ["data", "countdown"], ["data", "pixel-sudoku"], ["data", "tokenizer"]]
COMMANDS = [["train"], ["sample"], ["chat"], ["eval"], ["data"], *DATA, ["init"], ["inspect"]]


# --- help and usage ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    text = works(*command, "--help")
    assert "Example" in text and f"blockdiff {' '.join(command)}" in " ".join(text.split())


@pytest.mark.quick
@pytest.mark.parametrize("command", [*COMMANDS, ["plan"], ["plot"], ["export"]], ids=" ".join)
def test_help_at_80_columns_has_every_name_whole_and_short_types(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"--help +-h +<bool>", "", works(*command, "--help"))
    assert "…" not in text and not re.search(r"<(int|float|str|path|bool|list)", text.partition("Options")[2])
    found = get_command(app)
    for word in command:
        found = found.commands[word]  # type: ignore[attr-defined]
    assert all(len(line) <= 78 for line in found.help.splitlines()[1:]), "a paragraph is broken in its lines"
    for parameter in found.params:
        for option in parameter.opts:
            assert option == "--help" or not option.startswith("-") or re.search(rf" {option}\s", text), option


@pytest.mark.quick
def test_help_without_arguments_and_version() -> None:
    text = works()
    assert all(f" {command[0]} " in text for command in COMMANDS)
    assert works("--version").startswith("blockdiff ")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from blockdiff.cli.main import app\n"
        "try: app(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'yaml', 'matplotlib', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE'; see `blockdiff train --help`"),
        (["train", "a.yaml", "--nope"], "No such option: --nope"),
        (["train", "a.yaml", "--set", "optim.lr"], "'--set': 'optim.lr' is not KEY=VALUE, such as optim.lr=3e-4"),
        (["train", "a.yaml", "--output", ""], "--output: is empty; name a directory"),
        (["train", "a.yaml", "--resume", "--overwrite"], "give one of them"),
        (["sample", "m"], "give exactly one of --prompt, --chat and --prompts"),
        (["sample", "m", "--prompt", "a", "--chat", "b"], "give exactly one of"),
        (["sample", "m", "--prompt", "a", "--steps", "0"], "--steps"),
        (["sample", "m", "--prompt", "a", "--seed", str(2**64)], "--seed"),
        (["data", "sudoku", "--output", "o", "--seed", str(2**64)], "--seed"),
        (["init", "tiny", "d", "--seed", str(2**64)], "--seed"),
        (["sample", "m", "--prompt", "a", "-o", "x.png", "--trace", "x.png"], "x.png is the file of --output, too"),
        (["sample", "m", "--prompt", "a", "--as-rows", "--scores"], "--scores: a row to train on has no scores; leave"),
        (["sample", "m", "--prompt", "a", "--trace", "x.svg"], "x.svg ends in none of .html, .jsonl, .png, .gif"),
        (
            ["eval", "m", "--task", "chess", "--data", "d.jsonl"],
            "countdown, exact, gsm8k, pixel_sudoku, sudoku, module:function, lm-eval:NAME",
        ),
        (["eval", "m", "--task", "suduko", "--data", "d.jsonl"], "did you mean sudoku?"),
        (["data", "sudoku", "--size", "5", "--output", "o"], "5 is neither 4 nor 9"),
        (["data", "sudoku", "--split", "train", "--output", "o"], "'train' is not NAME=N"),
        (["data", "sudoku", "--split", "a/b=3", "--output", "o"], "'a/b=3' is not NAME=N"),
        (["data", "sudoku", "--split", "a=3", "--split", "a=4", "--output", "o"], "appears twice"),
        (["init", "tiny", "d", "--dtype", "int8"], "'int8' is neither float32 nor bfloat16"),
        (["inspect", "model", "--set", "seed=1"], "only a recipe"),
        (["inspect", "model", "--step", "2"], "only a recipe"),
        (["plan", "model", "--set", "seed=1"], "only a recipe"),
        (["plan", "model", "--device", "tpu"], "'tpu' is neither cuda nor cpu"),
        (["init", "tiny", "d", "--canvas-length", "8"], "a preset has its own"),
        (["init", "tiny", "d", "--prefix", "blocks"], "a preset has its own"),
        (["init", "tiny", "d", "--layers", "3"], "only --drafter-for takes it"),
        (["eval", "m", "--task", "lm-eval:"], "name a task of the harness"),
        (["eval", "m", "--task", "lm-eval:x", "--system", "a"], "goes without"),
        *(
            (["sample", "m", "--prompt", "a", *words], expected)
            for words, expected in (
                (["--dtype", "int3"], "'int3' is not one of auto, float32"),
                (["--device", "tpu9"], "'tpu9' is not one of auto, cpu"),
                (["--kernels", "fast"], "'fast' is not one of auto, triton, torch"),
                (["--quantize", "int4"], "'int4' is not one of nvfp4"),
                (["--seed", "1.5"], "'1.5' is not an integer from 0"),
                (["-n", "0"], "-n"),
                (["-n", "2", "--best-of", "2"], "leave one out"),
                (["--best-of", "5000"], "1024"),
                (["--template", "<?0>"], "a hole of 16 tokens is <?16>"),
                (["--regex", "[1"], "'[1' cannot be used: unterminated character set"),
                (["--noise", "0.5"], "give a draft with it"),
                (["--banned", ""], "banned must be a list"),
                (["--repetition-penalty", "nan"], "repetition_penalty must be"),
                (["--stop", ""], "stop must be a list"),
                (["--thinking"], "needs messages"),
                (["--system", "a"], "raw text"),
            )
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(words: list[str], expected: str) -> None:
    assert expected in refusal(*words, code=2)


# --- mistakes in what the commands read -------------------------------------------------------------------


GOOD = '{"prompt": "1=", "response": "2"}' + "\n"
CHAT = '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}' + "\n"
TRAIN = "train {recipe} --output {here}/run"
ROWS = TRAIN + " --set data.train={here}/rows.jsonl"
PUZZLE = json.dumps({"prompt": "4.2332.423..1..2=", "response": "4123321423411432"})
EVAL = "eval {model} --task sudoku --data {here}/rows.jsonl"
# What is wrong: the command line, what its one line says, and the content of {here}/rows.jsonl.
CORPUS: dict[str, tuple[str, str, str | bytes]] = {
    "no recipe": ("train {here}/no.yaml", "no.yaml: no such recipe", ""),
    "a directory as recipe": ("train {here}", "give the path of a YAML recipe", ""),
    "a run as recipe": ("train --resume {folder}/run", "run/recipe.yaml", ""),
    "a binary file as recipe": ("train {here}/rows.jsonl", "not a text file", b"\xff\xfe\x00"),
    "an unknown key": ("train {recipe} --set optim.lrr=1", "did you mean optim.lr?", ""),
    "no output": ("train {recipe}", "output: missing", ""),
    "a row that is no JSON": (ROWS, "rows.jsonl:2: ", GOOD + "{\n"),
    "a row that is an array": (ROWS, "rows.jsonl:3: ", GOOD + GOOD + "[1]\n"),
    "a row without response": (ROWS, "rows.jsonl:1: response is missing", '{"prompt": "1="}\n'),
    "a row that is not UTF-8": (ROWS, "rows.jsonl:2: not valid UTF-8", GOOD.encode() + b"\xff\n"),
    "no rows": (ROWS, "rows.jsonl: has no rows", "\n"),
    "foreign letters in a row": (ROWS, "rows.jsonl:1: ", '{"prompt": "x=", "response": "2"}\n'),
    "messages without a template": (ROWS, "no chat template", CHAT),
    "no room for a canvas": (TRAIN + " --set data.max_length=3", "raise data.max_length", ""),
    "a preset without tokenizer": (TRAIN + " --set model.tokenizer=null", "model.tokenizer: missing", ""),
    "an unknown preset": (TRAIN + " --set model.preset=tny", "no preset 'tny'; did you mean tiny? (there are", ""),
    "a preset like no other": (TRAIN + " --set model.preset=huge", "no preset 'huge' (there are", ""),
    "a run that is there": ("train {recipe} --output {folder}/run", "go on with --resume", ""),
    "an empty output": ("train {recipe} --set output=''", "output: missing", ""),
    "a picture that is there": ("plot {folder}/run --output {folder}/run/curves.png", "is there already", ""),
    "no model": ("sample {here}/a/b/m --prompt 1=", "no such directory", ""),
    "truncated weights": ("sample {folder}/broken --prompt 1=", "model.safetensors: truncated", ""),
    "no tokenizer": ("sample {folder}/bare --prompt 1=", "no tokenizer to be read there", ""),
    "a tokenizer that is gone": (TRAIN + " --set model.tokenizer=/no/tok", "/no/tok: no such directory", ""),
    "a checkpoint of no run": ("sample {model} --prompt 1= --checkpoint last", "is for the directory of a run", ""),
    "a prompt in foreign letters": ("sample {model} --prompt hello", "cannot be tokenised", ""),
    "chat without a template": ("sample {model} --chat 1", "has no chat template", ""),
    "no prompts file": ("sample {model} --prompts {here}/no.jsonl", "no.jsonl: No such file", ""),
    "an empty prompts file": ("sample {model} --prompts {here}/rows.jsonl", "holds no prompt", "\n"),
    "only bad prompts": ("sample {model} --prompts {here}/rows.jsonl", "rows.jsonl:1: not an object", "3\n"),
    "an unending answer": ("sample {model} --prompt 1= --max-new-tokens 1000000000", "leaves no room for a prompt", ""),
    "a seed of a recipe with more than 64 bits": (TRAIN + f" --set seed={2**64}", "seed: ", ""),
    "a full disk": (
        "sample {model} --prompts {here}/rows.jsonl --output /dev/full --steps 1",
        "/dev/full: No space left on device; it has the answers before that of 1,",
        GOOD,
    ),
    "data in a file": ("data sudoku --split a=5 --output {recipe}", "is a file; name a directory", ""),
    "an output below a file": ("sample {model} --prompt 1= --output {recipe}/o", "cannot be written", ""),
    "prompts as output": (
        "sample {model} --prompts {here}/rows.jsonl --output {here}/../{here.name}/rows.jsonl --overwrite",
        "rows.jsonl: is read by this command",
        GOOD,
    ),
    "prompts as trace": (
        "sample {model} --prompts {here}/rows.jsonl --trace {here}/rows.jsonl",
        "is read by this command",
        GOOD,
    ),
    "rows as output": (EVAL + " --output {here}/rows.jsonl --overwrite", "rows.jsonl: is read by this command", PUZZLE),
    "an output in a directory of rows": (
        "eval {model} --task sudoku --data {here} --output {here}/rows.jsonl --overwrite",
        "rows.jsonl: is read by this command",
        PUZZLE,
    ),
    "an output in the model": (
        "sample {model} --prompt 1= --output {model}/config.json --overwrite",
        "config.json: is read by this command",
        "",
    ),
    "an output that is there": ("sample {model} --prompt 1= --output {here}/rows.jsonl", "with --overwrite", GOOD),
    "a tokenizer that is there": (
        "data tokenizer {here}/rows.jsonl --output {folder}/puzzles/tokenizer",
        "tokenizer.json: is there already",
        GOOD,
    ),
    "puzzles that are there": (
        "data sudoku --split new=9 --split test=9 --output {folder}/puzzles",
        "test.jsonl: is there already",
        "",
    ),
    "rows of another task": (EVAL, "rows.jsonl:1: not a sudoku", GOOD),
    "a solution that is none": (
        EVAL,
        "rows.jsonl:1: ",
        json.dumps({"prompt": "." * 16 + "=", "response": "1" * 16}),
    ),
    "init over a checkpoint": ("init tiny {model}", "holds a checkpoint already", ""),
    "init of no preset": ("init tny {here}/new", "did you mean tiny?", ""),
    "inspect nothing": ("inspect {here}/nowhere", "no such directory; name a checkpoint directory or a hub id", ""),
    "inspect a file": ("inspect {here}/rows.jsonl", "is a file; a checkpoint is a directory", ""),
    "inspect no recipe": ("inspect {here}/no.yaml", "no such recipe", ""),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CORPUS)
def test_a_mistake_is_one_line_that_says_where(workshop: Path, tmp_path: Path, name: str) -> None:
    command, expected, content = CORPUS[name]
    (tmp_path / "rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    model, recipe = workshop / "run" / "model", workshop / "recipe.yaml"
    words = command.format(here=tmp_path, folder=workshop, model=model, recipe=recipe).split()
    assert expected in refusal(*words)
    assert (tmp_path / "rows.jsonl").read_bytes() == (content if isinstance(content, bytes) else content.encode())
    # A command that could not start leaves nothing behind that would stop the next try.
    assert not (tmp_path / "run").exists() and not (tmp_path / "new").exists()


@pytest.mark.quick
def test_torchrun_is_told_the_cause_and_ranks_with_the_same_one_print_it_once(tmp_path, monkeypatch) -> None:
    said = []
    for rank, words in enumerate((["train", "no.yaml"], ["train", "no.yaml"], ["init", "tny", "new"])):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        said.append(run(*words).stderr)
        shown = ChildFailedError("cli", {rank: ProcessFailure(rank, pid=1, exitcode=1, error_file=str(file))})
        assert f"traceback : {(said[rank] or said[0]).strip()}" in str(shown)
    assert ["no such recipe" in text for text in said] == [True, False, False] and "did you mean tiny" in said[2]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert "no such recipe" in run("train", "no.yaml").stderr


@pytest.mark.quick
def test_an_unforeseen_error_is_one_line_and_with_debug_a_traceback(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise KeyError("surprise\nin two lines")

    monkeypatch.setattr("blockdiff.training.recipe_files.read_recipe", burst)
    words = ["inspect", str(workshop / "recipe.yaml")]
    assert "KeyError" in refusal(*words) and "--debug" in refusal(*words)
    for debug in (["--debug", *words], [*words, "--debug"]):
        assert isinstance(run(*debug).exception, KeyError)


@pytest.mark.quick
def test_an_interrupt_while_the_command_is_imported_is_one_line_and_130(monkeypatch, capsys) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "blockdiff.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "blockdiff.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130 and capsys.readouterr().err == "blockdiff: error: stopped\n"


def test_errors_reach_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blockdiff", "train", str(tmp_path / "no.yaml")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(main.__code__.co_filename, run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 1 and out == ""
    assert err.splitlines() == [f"blockdiff: error: {tmp_path}/no.yaml: no such recipe; give the path of a YAML recipe"]


# --- what the commands say ---------------------------------------------------------------------------------


def test_data_have_a_file_for_each_split(tmp_path: Path) -> None:
    text = works("data", "sudoku", "--split", "train=5", "--output", tmp_path / "d")
    assert len((tmp_path / "d" / "train.jsonl").read_text().splitlines()) == 5
    assert text.startswith("train: 5 puzzles")


@pytest.mark.quick
def test_every_command_is_in_the_documentation_and_every_option_has_a_help() -> None:
    from typer.main import get_command

    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    group = get_command(app)
    commands = {**group.commands, **group.commands["data"].commands}  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert command.help and (name == "data" or name in text)
        assert [each.name for each in command.params if not getattr(each, "help", None)] == [], name


def test_our_warnings_are_one_line_and_those_of_others_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from blockdiff.cli import main

    main._show_warning(UserWarning("two\n  lines"), UserWarning, main.__file__, 7)
    main._show_warning(UserWarning("theirs"), UserWarning, "/elsewhere/library.py", 7)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["blockdiff: warning: two lines", "/elsewhere/library.py:7: UserWarning: theirs"]


@pytest.mark.quick
def test_a_table_is_no_output_and_a_key_goes_not_without_one(tmp_path: Path) -> None:
    for words, remedy in (
        (["sample", "none", "--prompt", "1=", "--output", str(tmp_path / "a.csv")], "name it .jsonl"),
        (["serve", "none", "--api-key-file", str(tmp_path), "--no-key"], "leave one of the two out"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and remedy in result.stderr, result.output
