"""The command line: what each command writes, and that every mistake is one line on stderr."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from blockdiff import checkpoint
from blockdiff.checkpoint.files import stored_tensors
from blockdiff.cli.main import app
from blockdiff.metrics import METRICS, decisive_metrics
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.training import export
from blockdiff.training.recipe import read_recipe
from tests.little_model import LITTLE, save_preset

DATA = [["data", "sudoku"], ["data", "chat"], ["data", "countdown"], ["data", "tokenizer"]]
COMMANDS = [["train"], ["sample"], ["chat"], ["eval"], ["data"], *DATA, ["init"], ["inspect"]]
RECIPE = """\
seed: 1
model: {preset: little.json, tokenizer: puzzles/tokenizer}
data: {train: puzzles/train.jsonl, heldout: puzzles/test.jsonl}
optim: {lr: 1.0e-3, warmup_steps: 1}
train: {steps: 3, batch_size: 6, micro_batch_size: 4, log_every: 1, eval_every: 2, save_every: 2}
"""


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def works(*words: str | Path) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refusal(*words: str | Path, code: int = 1) -> str:
    """The one line that a failing command writes to stderr."""
    result = run(*words)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("blockdiff: error: "), result.output
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return str(lines[0])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with puzzles, a recipe, and the run trained from it."""
    folder = tmp_path_factory.mktemp("workshop")
    works("data", "sudoku", "--split", "train=24", "--split", "test=6", "--output", folder / "puzzles")
    save_preset(folder / "little.json", LITTLE)
    (folder / "recipe.yaml").write_text(RECIPE.replace("little.json", str(folder / "little.json")))
    works("train", folder / "recipe.yaml", "--output", folder / "run")
    for name in ("broken", "bare"):
        shutil.copytree(folder / "run" / "model", folder / name)
    weights = (folder / "broken" / "model.safetensors").read_bytes()
    (folder / "broken" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()
    return folder


@pytest.fixture(autouse=True)
def no_pictures(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the run of the workshop draws its curves: they take longer than the training."""
    monkeypatch.setattr(export, "draw_curves", lambda *_, **__: None)


@pytest.fixture
def prompt(workshop: Path) -> str:
    row = json.loads((workshop / "puzzles" / "test.jsonl").read_text().splitlines()[0])
    return str(row["prompt"])


# --- help and usage ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    text = works(*command, "--help")
    assert "Example" in text and f"blockdiff {' '.join(command)}" in " ".join(text.split())


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
        (["sample", "m"], "give exactly one of --prompt, --chat and --prompts"),
        (["sample", "m", "--prompt", "a", "--chat", "b"], "give exactly one of"),
        (["sample", "m", "--prompt", "a", "--steps", "0"], "--steps"),
        (["sample", "m", "--prompt", "a", "--seed", str(2**64)], "--seed"),
        (["data", "sudoku", "--output", "o", "--seed", str(2**64)], "--seed"),
        (["init", "tiny", "d", "--seed", str(2**64)], "--seed"),
        (["sample", "m", "--prompt", "a", "-o", "x.png", "--trace", "x.png"], "x.png is the file of --output, too"),
        (["sample", "m", "--prompt", "a", "--trace", "x.svg"], "x.svg ends in none of .html, .jsonl, .png, .gif"),
        (["eval", "m", "--task", "chess", "--data", "d.jsonl"], "'chess' is none of countdown, exact, gsm8k, sudoku"),
        (["data", "sudoku", "--size", "5", "--count", "3", "--output", "o"], "5 is neither 4 nor 9"),
        (["data", "sudoku", "--output", "o"], "say how many rows"),
        (["data", "sudoku", "--split", "train", "--output", "o"], "'train' is not NAME=N"),
        (["data", "sudoku", "--split", "a/b=3", "--output", "o"], "'a/b=3' is not NAME=N"),
        (["data", "sudoku", "--split", "a=3", "--split", "a=4", "--output", "o"], "appears twice"),
        (["data", "sudoku", "--split", "a=3", "--count", "4", "--output", "o"], "the splits add up to 3"),
        (["init", "tiny", "d", "--dtype", "int8"], "'int8' is neither float32 nor bfloat16"),
        (["inspect", "model", "--set", "seed=1"], "only a recipe"),
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
    "a binary file as recipe": ("train {here}/rows.jsonl", "not a text file", b"\xff\xfe\x00"),
    "an unknown key": ("train {recipe} --set optim.lrr=1", "did you mean optim.lr?", ""),
    "no output": ("train {recipe}", "output: missing; give --output DIR", ""),
    "a row that is no JSON": (ROWS, "rows.jsonl:2: ", GOOD + "{\n"),
    "a row that is an array": (ROWS, "rows.jsonl:3: ", GOOD + GOOD + "[1]\n"),
    "a row without response": (ROWS, "rows.jsonl:1: response is missing", '{"prompt": "1="}\n'),
    "a row that is not UTF-8": (ROWS, "rows.jsonl:2: not valid UTF-8", GOOD.encode() + b"\xff\n"),
    "no rows": (ROWS, "rows.jsonl: has no rows", "\n"),
    "foreign letters in a row": (ROWS, "rows.jsonl:1: ", '{"prompt": "x=", "response": "2"}\n'),
    "messages without a template": (ROWS, "no chat template", CHAT),
    "no room for a canvas": (TRAIN + " --set data.max_length=3", "raise data.max_length", ""),
    "a preset without tokenizer": (TRAIN + " --set model.tokenizer=null", "model.tokenizer: missing", ""),
    "an unknown preset": (TRAIN + " --set model.preset=tny", "did you mean tiny?", ""),
    "a run that is there": ("train {recipe} --output {folder}/run", "go on with --resume", ""),
    "no model": ("sample {here}/a/b/m --prompt 1=", "no such directory", ""),
    "truncated weights": ("sample {folder}/broken --prompt 1=", "model.safetensors: truncated", ""),
    "no tokenizer": ("sample {folder}/bare --prompt 1=", "no tokenizer to be read there", ""),
    "a prompt in foreign letters": ("sample {model} --prompt hello", "cannot be tokenised", ""),
    "chat without a template": ("sample {model} --chat 1", "has no chat template", ""),
    "an unknown dtype": ("sample {model} --prompt 1= --dtype int3", "dtype 'int3' is not one of", ""),
    "an unknown device": ("sample {model} --prompt 1= --device tpu9", "device 'tpu9'", ""),
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

    monkeypatch.setattr("blockdiff.training.recipe.read_recipe", burst)
    words = ["inspect", str(workshop / "recipe.yaml")]
    assert "KeyError" in refusal(*words) and "--debug" in refusal(*words)
    for debug in (["--debug", *words], [*words, "--debug"]):
        assert isinstance(run(*debug).exception, KeyError)


def test_errors_reach_the_shell(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blockdiff", "train", str(tmp_path / "no.yaml")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"blockdiff: error: {tmp_path}/no.yaml: no such recipe; give the path of a YAML recipe"
    ]


# --- what the commands do ---------------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.quick
def test_a_run_directory_is_complete(workshop: Path) -> None:
    folder = workshop / "run"
    names = {path.name for path in folder.iterdir()}
    files = {"recipe.yaml", "metrics.jsonl", "data.json", "curves.png", "report.json"}
    assert names == files | {"checkpoints", "model"}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-2", "step-3"}
    logged = [record for record in metrics(folder) if "loss" in record]
    assert [record["step"] for record in logged] == [1, 2, 3]
    keys = {"step", "loss", "canvas_loss", "ar_loss", "grad_norm", "lr", "tokens_per_second", "seconds"}
    assert all(keys <= set(record) for record in logged)
    held = [record["step"] for record in metrics(folder) if "heldout_canvas_loss" in record]
    assert held == [0, 2, 3]
    files = {path.name for path in (folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= files
    assert checkpoint.load(folder / "model", dtype="auto").canvas_length == 9


def test_the_metrics_that_can_decide_are_those_that_are_measured(workshop: Path) -> None:
    records = metrics(workshop / "run")
    measured = {key for record in records if record["kind"] == "heldout" for key in record}
    decisive = {key for key in decisive_metrics() if METRICS[key].kind == "heldout"}
    assert measured == {*decisive, "step", "kind", "heldout_levels"}
    assert {record["kind"] for record in records} == {"train", "heldout"}
    logged = {key for record in records if record["kind"] == "train" for key in record} - {"step", "kind"}
    assert {METRICS[key].kind for key in logged - {"skipped"}} == {"train"}


def test_the_recipe_in_a_run_directory_repeats_the_run(workshop: Path, tmp_path: Path) -> None:
    recipe = read_recipe(workshop / "run" / "recipe.yaml")
    assert recipe.output == str(workshop / "run")
    assert recipe.model_copy(update={"output": None}) == read_recipe(workshop / "recipe.yaml")
    works("train", workshop / "run" / "recipe.yaml", "--output", tmp_path / "again")
    losses = [[record.get("loss") for record in metrics(folder)] for folder in (workshop / "run", tmp_path / "again")]
    assert losses[0] == losses[1]


def test_training_says_what_trains_and_what_the_data_are(workshop: Path, tmp_path: Path) -> None:
    row = json.loads((workshop / "puzzles" / "train.jsonl").read_text().splitlines()[0])
    long = {"prompt": row["prompt"] * 3, "response": row["response"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, row, long)))
    text = works(
        "train", workshop / "recipe.yaml", "--set", f"data.train={tmp_path / 'rows.jsonl'}",
        "--set", "train.steps=1",
        "--set", "data.max_length=30", "--set", "objective.router=frozen", "--output", tmp_path / "run",
    )  # fmt: skip
    assert "3 rows (1 dropped, 2 truncated: 16 tokens cut)" in text
    assert re.search(r"router +\d+ +- +[\d,]+\n", text)


def test_resuming_compares_the_model_and_the_rows_by_content_wherever_they_lie(workshop: Path, tmp_path: Path) -> None:
    for name in ("run", "puzzles"):
        shutil.copytree(workshop / name, tmp_path / name)
    again = ["train", workshop / "recipe.yaml", "--resume", "--output", tmp_path / "run"]
    moved = [*again, "--set", f"data.train={tmp_path}/puzzles/train.jsonl"]
    assert "resumed" in works(*moved)
    rows = (tmp_path / "puzzles" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "puzzles" / "train.jsonl").write_text("".join([*rows[1:], rows[0]]))
    assert "data.train" in refusal(*moved)
    (tmp_path / "puzzles" / "train.jsonl").write_text("".join(rows))
    vocabulary = tmp_path / "puzzles" / "tokenizer" / "tokenizer.json"
    swapped = {'"1": 5': '"1": 6', '"2": 6': '"2": 5'}
    text = vocabulary.read_text()
    vocabulary.write_text(re.sub("|".join(swapped), lambda found: swapped[found[0]], text))
    assert vocabulary.read_text() != text
    tokenizer = f"model.tokenizer={vocabulary.parent}"
    assert "started with another tokenizer (model.tokenizer); keep" in refusal(*moved, "--set", tokenizer)
    other = json.loads(json.dumps(LITTLE))
    other["text_config"]["sliding_window"] = 4
    try:
        save_preset(workshop / "little.json", other)
        assert "with a model of another shape (model); keep" in refusal(*again)
    finally:
        save_preset(workshop / "little.json", LITTLE)


def test_a_resumed_run_ends_where_the_whole_one_does(workshop: Path, tmp_path: Path) -> None:
    stopped = ["train", str(workshop / "recipe.yaml"), "--output", str(tmp_path / "run")]
    works(*stopped, "--set", "optim.warmup_steps=0", "--set", "optim.schedule=constant", "--set", "train.steps=2")
    words = [*stopped, "--set", "optim.warmup_steps=0", "--set", "optim.schedule=constant", "--resume"]
    assert "resumed" in works(*words)
    works(
        "train", workshop / "recipe.yaml", "--output", tmp_path / "whole",
        "--set", "optim.warmup_steps=0", "--set", "optim.schedule=constant",
    )  # fmt: skip
    last = [metrics(tmp_path / name)[-2] for name in ("run", "whole")]
    assert last[0]["step"] == last[1]["step"] == 3
    assert last[0]["loss"] == last[1]["loss"] and last[0]["grad_norm"] == last[1]["grad_norm"]
    assert "optim.lr" in refusal(*words, "--set", "optim.lr=1")


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
        assert list(record) == ["id", "text", "tokens", "finish_reason", "steps"]
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


def test_data_without_splits_is_one_training_file(tmp_path: Path) -> None:
    text = works("data", "sudoku", "--count", "5", "--output", tmp_path / "d")
    assert len((tmp_path / "d" / "train.jsonl").read_text().splitlines()) == 5
    assert text.startswith("train: 5 puzzles")


@pytest.mark.quick
def test_init_from_a_causal_model_adds_what_denoising_needs(tmp_path: Path) -> None:
    from tests.families import small_model

    checkpoint.save(small_model("qwen3", dtype=torch.float32), tmp_path / "causal")
    text = works("init", "--from", tmp_path / "causal", tmp_path / "m", "--canvas-length", "8")
    assert "canvases of 8 tokens" in text and "no tokenizer in it" in text
    model = checkpoint.load(tmp_path / "m", dtype="auto")
    assert model.denoises and model.canvas_length == 8
    assert "give PRESET DIR, or --from MODEL DIR" in refusal("init", "--from", tmp_path / "causal", code=2)
    assert "with canvases already" in refusal("init", "--from", tmp_path / "m", tmp_path / "n")
    for name, said in (("causal", "causal"), ("m", "canvas 8")):
        assert said in works("inspect", tmp_path / name)


def test_init_writes_a_model_that_loads(workshop: Path, tmp_path: Path) -> None:
    text = works("init", workshop / "little.json", tmp_path / "m", "--seed", "3", "--tokenizer",
                 workshop / "puzzles" / "tokenizer")  # fmt: skip
    model = checkpoint.load(tmp_path / "m", dtype="auto")
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert len(works("sample", tmp_path / "m", "--prompt", "1=", "--steps", "1")) > 0


@pytest.mark.quick
def test_inspect_counts_every_tensor_of_a_model(workshop: Path) -> None:
    model = checkpoint.load(workshop / "run" / "model", dtype="auto")
    stored = stored_tensors(workshop / "run" / "model")
    text = works("inspect", workshop / "run" / "model")
    carried = [math.prod(place.shape) for name, place in stored.items() if "vision" in name]
    assert f"{len(stored)} tensors as F32" in text
    assert f"{len(carried)} of them, {sum(carried):,} numbers, are carried" in text
    routers = sum(parameter.numel() for parameter in model.parameters_of("router"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert re.search(rf"router +\d+ +- +{routers:,}\n", text)
    assert re.search(rf"total +\d+ +{count - routers:,} +{routers:,}\n", text)
    assert f"of {count:,} parameters" in text


@pytest.mark.quick
def test_inspect_draws_the_batch_that_training_sees(workshop: Path) -> None:
    text = works("inspect", workshop / "recipe.yaml", "--step", "2", "--rows", "6")
    for word in ("(fill: ", "t: the noise level", "signal: the model's first prediction"):
        assert word in text, word
    assert "batch of optimiser step 2: 6 rows, 35 columns, 0 of them padding" in text
    # 17 response tokens in canvases of 9: the first is full, the second has one position of fill.
    assert "54 positions scored" in text
    firsts, seconds = (text.count(f"canvas at column {start}: ") for start in (18, 27))
    assert firsts + seconds == 6
    assert f"{seconds} of them fill" in text and text.count("1 fill") >= seconds
    assert "24 rows (0 dropped" in text and re.search(r"router +\d+ +[\d,]+ +-\n", text)


@pytest.mark.quick
@pytest.mark.parametrize("setting", ["optim.freeze=['layers.*.mlp.*']", "objective.router=frozen", "lora.rank=2"])
def test_inspect_and_train_name_and_count_the_same_parts(workshop: Path, tmp_path: Path, setting: str) -> None:
    def table(text: str) -> str:
        return re.search(r"part +tensors.*total [^\n]*\n", text, re.DOTALL)[0]  # type: ignore[index]

    words = [workshop / "recipe.yaml", "--set", setting, "--set", "optim.warmup_steps=9", "--set", "train.steps=1"]
    if setting == "lora.rank=2":
        words += ["--set", f"model.path={workshop}/run/model", "--set", "model.tokenizer=null"]
    looked, trained = works("inspect", *words), works("train", *words, "--output", tmp_path / "run")
    assert "training as the recipe says" in looked
    assert table(looked) == table(trained)
    note = "note      optim.warmup_steps: the warm-up of 9 steps does not end within the 1 steps of the run\n"
    assert note in looked and note in trained


@pytest.mark.quick
@pytest.mark.parametrize(
    "setting", ["optim.freeze=[nothing.*]", "optim.freeze=['*']", "evaluation.patience=2", "evaluation.task=gsm8k"]
)
def test_inspect_refuses_what_train_refuses_in_the_same_words(workshop: Path, tmp_path: Path, setting: str) -> None:
    prompts = f"evaluation.prompts={workshop}/puzzles/test.jsonl"
    words = [workshop / "recipe.yaml", "--set", setting, "--set", prompts]
    assert refusal("inspect", *words) == refusal("train", *words, "--output", tmp_path / "run")


@pytest.mark.quick
def test_inspect_names_what_a_model_class_of_ones_own_adds(workshop: Path, tmp_path: Path) -> None:
    class Scaled(DiffusionGemma):
        def __init__(self, config: Any, kernels: str = "auto") -> None:
            super().__init__(config, kernels)
            self.gain = torch.nn.Linear(3, 2)

    checkpoint.save(checkpoint.init(workshop / "little.json", model=Scaled), tmp_path / "m")
    text = works("inspect", tmp_path / "m")
    added = "gain.weight [2, 3], gain.bias [2]"
    assert re.search(r"added     blockdiff\.safetensors: 2 tensors of the model class \S*Scaled, 8 numbers: ", text)
    assert all(each in text for each in added.split(", g"))


@pytest.mark.quick
def test_the_documentation_names_every_option() -> None:
    from typer.main import get_command

    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    group = get_command(app)
    commands = {**group.commands, **group.commands["data"].commands}  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert name == "data" or name in text
        for parameter in command.params:
            option = next((word for word in parameter.opts if word.startswith("--")), None)
            assert option is None or f"`{option}" in text or f" {option}" in text, f"{name} {option}"


def test_our_warnings_are_one_line_and_those_of_others_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from blockdiff.cli import main

    main._show_warning(UserWarning("two\n  lines"), UserWarning, main.__file__, 7)
    main._show_warning(UserWarning("theirs"), UserWarning, "/elsewhere/library.py", 7)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["blockdiff: warning: two lines", "/elsewhere/library.py:7: UserWarning: theirs"]
