"""Training a drafter from the command line: for a target that stands still, spread or in fp8, resumed and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import blockdiff
from blockdiff.checkpoint import init, save
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer
from blockdiff.errors import RecipeError, RunError
from blockdiff.recipes.addition import ALPHABET, make_splits
from blockdiff.training.export import consolidate
from blockdiff.training.plan.training import plan_training
from blockdiff.training.recipe_files import read_recipe
from tests.support.commands import run
from tests.support.little_model import save_preset
from tests.training.test_causal import LITTLE

TARGET = LITTLE | {"num_hidden_layers": 3, "vocab_size": 40}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target of random weights, a drafter for it, and rows."""
    folder = tmp_path_factory.mktemp("drafts")
    write_tokenizer(character_tokenizer(ALPHABET + "_"), folder / "tokenizer")
    save_preset(folder / "target.json", TARGET)
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = init(str(folder / "target.json"), seed=3, tokenizer=tokenizer)
    save(model, folder / "target", tokenizer=tokenizer)
    for name, rows in make_splits({"train": 24, "test": 5}, seed=0).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--drafter-for", folder / "target", "--layers", 1, "--block", 4)
    assert run("init", *asked, "--output", folder / "draft").exit_code == 1  # the tokenizer has no mask token
    made = run("init", *asked, "--mask-token", "_", "--output", folder / "draft")
    assert made.exit_code == 0, made.output
    return folder


def recipe(here: Path, **train: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "model": {"path": str(here / "draft"), "kernels": "torch"},
        "data": {"train": str(here / "train.jsonl"), "heldout": str(here / "test.jsonl"), "cache": "off", "pack": 160},
        "objective": {"kind": "drafter", "target": str(here / "target"), "anchors": 20},
        "optim": {"name": "muon", "lr": 1e-2, "warmup_steps": 1, "ema": 0.9, "schedule": "constant"},
        "train": {"steps": 4, "batch_size": 6, "micro_batch_size": 1, "log_every": 1, "eval_every": 2, **train},
        "evaluation": {"best": "heldout_accepted_length"},
    }


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def test_the_mask_token_is_asked_for_by_name_and_must_be_free(here):
    asked = ("init", "--drafter-for", here / "target", "--output", here / "other")
    for more, said in (
        ((), "the tokenizer has no mask token; name one of its tokens that no text contains, --mask-token"),
        (("--mask-token", "<eos>"), "is the bos, eos or pad token"),
        (("--mask-token", "nothing"), "'nothing' is no token of the tokenizer"),
    ):
        found = run(*asked, *more)
        assert found.exit_code == 1 and said in found.output, found.output


@pytest.mark.portable
def test_a_drafter_learns_and_its_run_is_resumed_to_the_bit(here, tmp_path, capsys):
    whole = blockdiff.train(recipe(here), output=tmp_path / "whole")
    heldout = [record for record in whole.records if record["kind"] == "heldout"]
    trained = [record for record in whole.records if record["kind"] == "train"]
    assert all(record["draft_loss"] == record["loss"] and "canvas_loss" not in record for record in trained)
    assert "draft loss" in capsys.readouterr().out
    assert [record["step"] for record in heldout] == [0, 2, 4]
    assert heldout[-1]["heldout_draft_loss"] < heldout[0]["heldout_draft_loss"]
    assert all(len(record["heldout_places"]) == 3 and 1 <= record["heldout_accepted_length"] <= 4 for record in heldout)
    blockdiff.train(recipe(here), ["train.steps=2"], tmp_path / "run")
    again = blockdiff.train(recipe(here), output=tmp_path / "run", resume=True)
    one, other = weights(whole.directory / "model"), weights(again.directory / "model")
    assert one.keys() == other.keys() == weights(here / "draft").keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(not torch.equal(one[name], x) for name, x in weights(here / "draft").items())
    saved = load_file(whole.directory / "checkpoints" / "step-4" / "model.safetensors")
    assert len(saved) == len(one)  # and nothing of the target
    consolidate(whole.directory / "checkpoints" / "step-4", tmp_path / "made")
    assert weights(tmp_path / "made").keys() == one.keys()
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["dflash_config"]["mask_token_id"] == 28


@pytest.mark.parametrize("change", ["model.quantize=fp8", "objective.labels=distribution", "objective.loss=decay"])
def test_each_choice_of_the_objective_trains(here, tmp_path, change):
    found = blockdiff.train(recipe(here), ["train.steps=1", change], tmp_path / "run")
    assert found.records[-1]["step"] == 1


def test_a_target_may_be_the_run_of_an_adapter(here, tmp_path):
    little = {name: section for name, section in recipe(here).items() if name not in ("objective", "evaluation")}
    little |= {"model": {"path": str(here / "target"), "kernels": "torch"}, "lora": {"rank": 2}}
    tuned = blockdiff.train(little, ["train.steps=2", "optim.ema=none"], tmp_path / "tuned").directory
    adapted = ["train.steps=1", f"objective.target={tuned}"]
    drafter = blockdiff.train(recipe(here), adapted, tmp_path / "run").directory
    blockdiff.train(recipe(here), [*adapted, "train.steps=2"], drafter, resume=True)
    with pytest.raises(RunError, match=r"objective\.target"):
        blockdiff.train(recipe(here), ["train.steps=3"], drafter, resume=True)
    asked = ("sample", tuned, "--prompts", here / "test.jsonl", "--max-new-tokens", 6, "--device", "cpu", "--output")
    assert run(*asked, tmp_path / "alone").exit_code == 0
    assert run(*asked, tmp_path / "both", "--draft-model", drafter).exit_code == 0
    one, other = ([json.loads(line) for line in (tmp_path / name).open()] for name in ("alone", "both"))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in other]
    assert all(row["forwards"]["draft"] for row in other)


def test_a_plan_counts_the_target_and_all_blocks(here):
    asked = read_recipe(recipe(here))
    plan = plan_training(asked, device="cpu")
    target = sum(x.nbytes for x in weights(here / "target").values())
    assert plan.parts["target"] == target and plan.canvases == 20
    more = plan_training(read_recipe(recipe(here), ["objective.anchors=80"]), device="cpu")
    assert more.total > plan.total and more.parts["target"] == target


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"objective": {}, "lora": "none", "evaluation": {}},
            r"model\.path: .*draft .*objective",
        ),
        (
            {"objective": {"kind": "drafter", "target": "TARGET", "coin": 0.1}},
            r"unknown key objective\.coin.*objective\.kind: canvas or",
        ),
        ({"lora": {"rank": 2}}, "^lora: "),
        (
            {"model": {"path": "TARGET"}, "lora": "none"},
            r"objective\.kind: .*--drafter-for",
        ),
        ({"evaluation": {"prompts": "TEST"}}, r"evaluation\.prompts: "),
    ],
)
def test_what_is_nothing_of_a_drafter_is_refused(here, tmp_path, change, said):
    text = json.dumps(recipe(here) | change).replace("TARGET", str(here / "target"))
    text = text.replace("TEST", str(here / "test.jsonl"))
    with pytest.raises(RecipeError, match=said):
        blockdiff.train(json.loads(text), output=tmp_path / "run")


def test_rows_of_answers_are_written_and_gone_on_with(here, tmp_path):
    rows, some = tmp_path / "rows.jsonl", tmp_path / "some.jsonl"
    lines = (here / "test.jsonl").read_text().splitlines(keepends=True)
    some.write_text("".join(lines[:2]))
    asked = ("sample", here / "target", "--as-rows", "--max-new-tokens", 6, "--output", rows, "--device", "cpu")
    assert run(*asked, "--prompts", some).exit_code == 0
    first = rows.read_bytes()
    found = run(*asked, "--prompts", here / "test.jsonl")
    assert found.exit_code == 0, found.output
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert rows.read_bytes().startswith(first) and len(written) == 5
    assert [row["prompt"] for row in written] == [json.loads(line)["prompt"] for line in lines]
    assert all(set(row) == {"id", "prompt", "response", "asked"} for row in written)
    train = ("train.steps=1", f"data.train={rows}")
    assert blockdiff.train(recipe(here), train, tmp_path / "run").records[-1]["step"] == 1
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(here)))
    seen = run("inspect", tmp_path / "recipe.yaml", "--set", f"data.train={rows}")
    assert seen.exit_code == 0 and "blocks; " in seen.output and "5 rows (0 dropped" in seen.output, seen.output
    assert not {"canvas", "signal", "fill", "noise"} & set(re.findall(r"[a-z]+", seen.output)), seen.output


def test_a_drafter_beside_its_target_gives_the_same_texts_in_every_command(here, tmp_path):
    asked = (here / "target", "--max-new-tokens", 11, "--device", "cpu", "--prompts", here / "test.jsonl")
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    assert run("sample", *asked, "--output", plain).exit_code == 0
    page = ("--trace", tmp_path / "trace.html")
    found = run("sample", *asked, "--draft-model", here / "draft", "--output", drafted, *page)
    assert found.exit_code == 0 and "tokens a round" in found.output, found.output
    assert "steps per canvas" not in found.output
    one, other = ([json.loads(line) for line in file.read_text().splitlines()] for file in (plain, drafted))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in other]
    assert all(row["forwards"]["draft"] > 0 and len(row["places"]) == 3 for row in other)
    assert (tmp_path / "trace.html").stat().st_size > 1000
    data = ("--data", here / "test.jsonl", "--task", "exact")
    evaluated = ("eval", here / "target", *data, "--max-new-tokens", 11, "--device", "cpu")
    report = tmp_path / "report.json"
    found = run(*evaluated, "--draft-model", here / "draft", "--output", report)
    assert found.exit_code == 0 and "accepted by place" in found.output, found.output
    report = json.loads(report.read_text())
    per_round = sum(len(row["tokens"]) for row in other) / sum(row["forwards"]["verify"] for row in other)
    assert len(report["accepted_by_place"]) == 3 and report["tokens_per_round"] == pytest.approx(per_round)
    refused = run("sample", *asked, "--draft-model", here / "draft", "--strategy", "entropy_bound")
    assert refused.exit_code == 2 and "a drafter drafts for --strategy speculative alone" in refused.output
    exported = run("export", here / "draft", "-o", tmp_path / "bf16", "--dtype", "bfloat16")
    assert exported.exit_code == 0 and weights(tmp_path / "bf16")["fc.weight"].dtype == torch.bfloat16
    assert "drafts blocks of 4 and reads layers 1 of a target's 3" in run("inspect", here / "draft").output
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(here)))
    assert "20 blocks each" in run("plan", tmp_path / "recipe.yaml").output
    assert run("inspect", tmp_path / "recipe.yaml", "--rows", 1).exit_code == 0
    planned = run("plan", here / "draft")
    assert planned.exit_code == 1 and "is a drafter, which samples nothing alone" in planned.output
    alone = run("sample", here / "draft", "--prompt", "a12=", "--device", "cpu")
    assert alone.exit_code == 1 and "is a drafter; give it with --draft-model" in alone.output, alone.output
