"""Commands that train and that look at recipes and models: what a run directory has, and what train and inspect say."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import blockdiff
from blockdiff import checkpoint
from blockdiff.checkpoint.files import stored_tensors
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import RunError
from blockdiff.metrics import METRICS, decisive_metrics, reproducible
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.run import Run
from tests.support.commands import refusal, works
from tests.support.little_model import LITTLE, save_preset


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


def flip(file: Path) -> None:
    """Flip a bit of a file of weights."""
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def test_weights_that_are_not_as_they_were_written_are_not_built_upon(workshop: Path, tmp_path: Path, prompt) -> None:
    shutil.copytree(workshop / "run" / "model", model := tmp_path / "model")
    sampled = ("sample", model, "--prompt", prompt)
    assert "the weights are as they were written" in works("inspect", model)
    works(*sampled, "--verify")
    over = ["train", workshop / "recipe.yaml", "--set", "model.preset=null", "--set", f"model.path={model}"]
    over += ["--set", "train.steps=1", "--set", "data.heldout=null", "--set", "train.eval_every=0"]
    works(*over, "--set", "lora.rank=2", "--output", tmp_path / "run")
    flip(model / "model.safetensors")
    attempts = [
        ("inspect", model),
        (*sampled, "--verify"),
        (*over, "--set", "lora=none", "--output", tmp_path / "full"),
        (*over, "--set", "lora.rank=2", "--output", tmp_path / "lora"),
        ("export", tmp_path / "run", "--output", tmp_path / "merged"),
        ("export", tmp_path / "run", "--checkpoint", "last", "--output", tmp_path / "merged"),
        ("init", "--from", model, tmp_path / "more", "--add-tokens", tmp_path / "tokens"),
        ("serve", model, "--port", 0),
    ]
    (tmp_path / "tokens").write_text("<new>")
    for words in attempts:
        assert "model.safetensors: is not as it was written" in refusal(*words), words
    works(*sampled)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_that_is_not_as_it_was_written_is_neither_merged_nor_served(workshop: Path, tmp_path: Path) -> None:
    model, adapter = workshop / "run" / "model", tmp_path / "run" / "adapter"
    over = ["train", workshop / "recipe.yaml", "--set", "model.preset=null", "--set", f"model.path={model}"]
    works(*over, "--set", "train.steps=1", "--set", "lora.rank=2", "--output", tmp_path / "run")
    flip(adapter / "adapter_model.safetensors")
    (tmp_path / "serve.yaml").write_text(f"adapters: {{one: {adapter}}}")
    for words in (
        ("export", tmp_path / "run", "--output", tmp_path / "merged"),
        ("serve", model, "--port", 0, "--adapter", adapter),
        ("serve", model, "--port", 0, "--config", tmp_path / "serve.yaml"),
    ):
        assert "adapter_model.safetensors: is not as it was written" in refusal(*words), words


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ({"../model.safetensors": "1:2"}, "'../model.safetensors' is no file of the directory"),
        ({"model.safetensors": "as written", "\0.safetensors": "1"}, "is no file of the directory"),
        ({"model.safetensors": "as written", "\ud800": "1"}, "is no file of the directory"),
        ({"model.safetensors": "as written", "x" * 5000 + ".safetensors": "1"}, "is no file of the directory"),
        ({"..": "1:2"}, "has no digest of model.safetensors"),
        ({"model.safetensors": 3}, "'model.safetensors' is no file of the directory with its digest"),
        ({}, "has no digest of model.safetensors"),
        ({"model.safetensors": "as written", "zero": "1:2"}, "zero: not a regular file"),
        ({"model.safetensors": "as written", "": "1:2"}, "'' is no file of the directory"),
        ({"model.safetensors": "1:2", "gone": "1:2"}, "model.safetensors: is not as it was written"),
        ([], "a JSON object was expected"),
    ],
)
def test_digests_are_of_the_files_of_a_directory_and_of_all_its_weights(
    workshop: Path, tmp_path: Path, digests: Any, named: str
) -> None:
    shutil.copytree(workshop / "run" / "model", model := tmp_path / "model")
    (model / "zero").symlink_to("/dev/zero")
    as_written = json.loads((model / "digests.json").read_text())["model.safetensors"]
    (model / "digests.json").write_text(json.dumps(digests).replace("as written", as_written))
    assert named in refusal("inspect", model)


@pytest.mark.parametrize(
    "replace",
    [os.mkfifo, Path.mkdir, lambda file: file.symlink_to(file.with_name("gone"))],
    ids=("a pipe", "a directory", "a link to nothing"),
)
def test_digests_that_are_no_file_are_refused_and_not_taken_for_none(workshop: Path, tmp_path: Path, replace) -> None:
    shutil.copytree(workshop / "run" / "model", model := tmp_path / "model")
    (model / "digests.json").unlink()
    replace(model / "digests.json")
    assert "digests.json: is no file with digests" in refusal("inspect", model)


def test_the_metrics_that_can_decide_are_those_that_are_measured(workshop: Path) -> None:
    records = metrics(workshop / "run")
    measured = {key for record in records if record["kind"] == "heldout" for key in record}
    decisive = {key for key in decisive_metrics() if METRICS[key].kind == "heldout"}
    of_drafts = {"heldout_draft_loss", "heldout_draft_accuracy", "heldout_accepted_length"}
    assert of_drafts < decisive and measured == {*decisive - of_drafts, "step", "kind", "heldout_levels"}
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


def test_a_run_goes_on_when_nobody_reads_what_it_prints(workshop: Path, tmp_path: Path, monkeypatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        monkeypatch.setattr("sys.stderr", pipe)
        run = blockdiff.train(workshop / "recipe.yaml", output=tmp_path / "run")
    assert reproducible(run.records) == reproducible(metrics(workshop / "run")) and run.report


class AtStep2(blockdiff.Callback):
    """Calls a function with the run's directory after optimiser step 2."""

    def __init__(self, call: Callable[[Path], object]) -> None:
        self.call = call

    def on_step(self, trainer: blockdiff.Trainer) -> None:
        if trainer.step == 2:
            self.call(trainer.directory)


def test_records_that_are_removed_while_a_run_goes_on_are_written_again(workshop: Path, tmp_path: Path, capsys) -> None:
    callback = AtStep2(lambda run: (run / "metrics.jsonl").unlink())
    run = blockdiff.train(workshop / "recipe.yaml", output=tmp_path / "run", callbacks=[callback])
    assert reproducible(run.records) == reproducible(metrics(workshop / "run"))
    assert capsys.readouterr().out.count("metrics.jsonl was removed; its records are written again") == 1


def test_a_run_whose_directory_was_replaced_ends_and_writes_nothing_there(workshop: Path, tmp_path: Path) -> None:
    def replace(run: Path) -> None:
        run.rename(tmp_path / "moved")
        run.mkdir()

    with pytest.raises(RunError, match=r"run: was removed or replaced .*--resume"):
        blockdiff.train(workshop / "recipe.yaml", output=tmp_path / "run", callbacks=[AtStep2(replace)])
    assert not [*(tmp_path / "run").glob("*")] and (tmp_path / "moved" / "metrics.jsonl").exists()


def test_a_disk_that_is_full_or_read_only_in_a_run_is_one_line_with_the_file_and_resume(
    workshop: Path, tmp_path: Path, monkeypatch
) -> None:
    run = tmp_path / "run"
    for number, remedy in ((errno.ENOSPC, "make room"), (errno.EROFS, "see to the permissions")):

        def fail(directory: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(directory / "metrics.jsonl"))

        with pytest.raises(RunError, match=rf"run/metrics\.jsonl: .*; {remedy}.*--resume.* saved at step 0"):
            blockdiff.train(workshop / "recipe.yaml", output=run, callbacks=[AtStep2(fail)], overwrite=True)


def test_a_model_that_is_older_than_the_checkpoints_of_its_run_is_told(workshop: Path, tmp_path: Path, prompt) -> None:
    shutil.copytree(workshop / "run", run := tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(run, device="cpu")
    report = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps(report | {"steps": 2}))
    with pytest.warns(UserWarning, match="run: model/ is of step 2, and the run has gone on to step 3 since; .*last"):
        works("sample", run, "--prompt", prompt)


def test_training_says_what_trains_and_what_the_data_are(workshop: Path, tmp_path: Path) -> None:
    row = json.loads((workshop / "puzzles" / "train.jsonl").read_text().splitlines()[0])
    long = {"prompt": row["prompt"] * 3, "response": row["response"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (row, row, long)))
    text = works(
        "train", workshop / "recipe.yaml", "--set", f"data.train={tmp_path / 'rows.jsonl'}",
        "--set", "train.steps=1",
        "--set", "data.max_length=30", "--set", "model.router=frozen", "--output", tmp_path / "run",
    )  # fmt: skip
    assert "3 rows (1 dropped, 2 truncated: 16 tokens cut)" in text
    assert "dropped: 1 row has no room for a canvas within the 30 tokens of data.max_length, rows.jsonl:3 the" in text
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
    assert "started with another tokenizer (model.tokenizer);" in refusal(*moved, "--set", tokenizer)
    other = json.loads(json.dumps(LITTLE))
    other["text_config"]["sliding_window"] = 4
    try:
        save_preset(workshop / "little.json", other)
        assert "with a model of another shape (model);" in refusal(*again)
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


@pytest.mark.quick
def test_checkpoints_of_a_run_are_sampled_and_a_run_without_a_model_names_them(workshop: Path, tmp_path: Path) -> None:
    run, asked = tmp_path / "run", ("--prompt", "4.2332.423..1..2=", "--steps", 2)
    shutil.copytree(workshop / "run", run)
    shutil.rmtree(run / "model")
    for words in (("sample", run, *asked), ("export", run, "--output", tmp_path / "no")):
        assert "a run that has no model yet; its checkpoints are step-2, step-3 (" in refusal(*words)
    works("export", run, "--checkpoint", "2", "--output", tmp_path / "two")
    assert works("sample", run, *asked, "--checkpoint", "2") == works("sample", tmp_path / "two", *asked)
    assert "no checkpoint 7; name last, best or a step of 2, 3" in refusal("sample", run, *asked, "--checkpoint", "7")
    assert "evaluation.best" in refusal("sample", run, *asked, "--checkpoint", "best")
    assert Run(run).checkpoint("last") == run / "checkpoints" / "step-3"


def test_init_from_a_causal_model_adds_what_denoising_needs(tmp_path: Path) -> None:
    from tests.support.families import small_model

    checkpoint.save(small_model("qwen3", dtype=torch.float32), tmp_path / "causal")
    text = works("init", "--from", tmp_path / "causal", tmp_path / "m", "--canvas-length", "8")
    assert "canvases of 8 tokens" in text and "no tokenizer in it" in text
    model = checkpoint.load(tmp_path / "m", dtype="auto")
    assert model.denoises and model.canvas_length == 8
    asked = ("init", "--from", tmp_path / "causal", tmp_path / "blocks", "--canvas-length", "8", "--prefix")
    assert "prefix" in refusal(*asked, "block")
    assert "a prefix of blocks" in works(*asked, "blocks")
    assert checkpoint.read_config(tmp_path / "blocks").block == 8
    assert "give PRESET DIR, --from MODEL DIR, or" in refusal("init", "--from", tmp_path / "causal", code=2)
    assert "with canvases already" in refusal("init", "--from", tmp_path / "m", tmp_path / "n")
    for name, said in (("causal", "causal"), ("m", "canvas 8")):
        text = works("inspect", tmp_path / name)
        assert said in text and "routers" not in text


def test_init_writes_a_model_that_loads(workshop: Path, tmp_path: Path) -> None:
    text = works("init", workshop / "little.json", tmp_path / "m", "--seed", "3", "--tokenizer",
                 workshop / "puzzles" / "tokenizer")  # fmt: skip
    model = checkpoint.load(tmp_path / "m", dtype="auto")
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert model.config.vocab_size == len(load_tokenizer(tmp_path / "m"))
    assert len(works("sample", tmp_path / "m", "--prompt", "1=", "--steps", "1")) > 0


@pytest.mark.quick
def test_inspect_counts_every_tensor_of_a_model(workshop: Path) -> None:
    model = checkpoint.load(workshop / "run" / "model", dtype="auto")
    stored = stored_tensors(workshop / "run" / "model")
    text = works("inspect", workshop / "run" / "model")
    images = [math.prod(place.shape) for name, place in stored.items() if "vision" in name]
    assert f"{len(stored)} tensors as F32" in text
    assert f"{len(images)} of them, {sum(images):,} numbers, see images" in text and "are copied" not in text
    routers = sum(parameter.numel() for parameter in model.parameters_of("router"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert re.search(rf"router +\d+ +- +{routers:,}\n", text)
    assert re.search(rf"total +\d+ +{count - routers:,} +{routers:,}\n", text)
    assert f"of {count:,} parameters" in text


@pytest.mark.quick
def test_inspect_draws_the_batch_that_training_sees(workshop: Path) -> None:
    assert "999 is past the end: the run has 3 steps" in refusal(
        "inspect", workshop / "recipe.yaml", "--step", "999", code=2
    )
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
@pytest.mark.parametrize("setting", ["optim.freeze=['layers.*.mlp.*']", "model.router=frozen", "lora.rank=2"])
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


class Hub:
    """The uploading part of huggingface_hub's HfApi, without a network."""

    calls: ClassVar[list[tuple[str, Any]]] = []

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> str:
        assert private and exist_ok
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, repo_id: str, folder_path: Path) -> None:
        if repo_id == "we/refused":
            raise ConnectionError("no route to host")
        self.calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_an_export_is_uploaded_whole_and_kept_where_the_hub_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    blockdiff.save(blockdiff.init("tiny", device="cpu"), tmp_path / "model")
    words = "export", tmp_path / "model", "--output"
    assert "no hub id; give OWNER/NAME" in refusal(*words, tmp_path / "a", "--push", "./somewhere")
    assert not (tmp_path / "a").exists()
    assert works(*words, tmp_path / "a", "--push", "we/model").endswith("https://huggingface.co/we/model\n")
    files = ["config.json", "digests.json", "generation_config.json", "model.safetensors"]
    assert Hub.calls == [("we/model", files)]
    said = refusal(*words, tmp_path / "b", "--push", "we/refused")
    assert "not uploaded to we/refused (no route to host); the directory is whole, try again: `hf upload" in said
    assert (tmp_path / "b" / "config.json").is_file()
