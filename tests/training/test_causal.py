"""Training a causal model by next tokens alone, making it a denoiser, and training that."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import blockdiff
from blockdiff.canvas import CleanRow, joined, lay_out
from blockdiff.checkpoint import convert
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.cli.main import app
from blockdiff.data.tokenizer import byte_level_bpe, write_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import RecipeError
from blockdiff.objective import Objective
from tests.support.families import CONFIGS, small_model
from tests.support.little_model import save_preset

ROOT = Path(__file__).resolve().parents[2]
LITTLE = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
RECIPE = """\
seed: 1
model: {{preset: {here}/causal.json, tokenizer: {here}/puzzles/tokenizer}}
data: {{train: {here}/puzzles/train.jsonl, heldout: {here}/puzzles/test.jsonl, cache: off}}
objective: {{ar_loss: {{scope: response}}}}
optim: {{lr: 1.0e-2, warmup_steps: 2}}
train: {{steps: 30, batch_size: 8, log_every: 10}}
evaluation: {{prompts: {here}/puzzles/test.jsonl, prompts_count: 2, task: sudoku}}
generation: {{max_new_tokens: 17}}
"""


def command(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with puzzles and the run of a causal model trained on them."""
    folder = tmp_path_factory.mktemp("causal")
    command("data", "sudoku", "--split", "train=64", "--split", "test=6", "--output", folder / "puzzles")
    save_preset(folder / "causal.json", LITTLE)
    (folder / "recipe.yaml").write_text(RECIPE.format(here=folder))
    command("train", folder / "recipe.yaml", "--output", folder / "run")
    return folder


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.portable
def test_next_tokens_are_learnt_and_measured(here):
    train, heldout, sampled = (records(here / "run", kind) for kind in ("train", "heldout", "sample"))
    chance = math.log(16)
    assert train[-1]["ar_loss"] == train[-1]["loss"] < 0.6 * chance
    assert heldout[-1]["heldout_ar_loss"] < 0.6 * chance
    assert "heldout_canvas_loss" not in heldout[-1]
    assert sampled[-1]["sample_steps_per_canvas"] == 1.0 and sampled[-1]["sample_errors"] == 0
    assert not (here / "run" / "model" / "blockdiff.safetensors").exists()


def test_a_run_goes_on_as_if_it_had_not_stopped(here, tmp_path):
    recipe = here / "recipe.yaml"
    words = ["--set", "optim.warmup_steps=0", "--set", "optim.schedule=constant"]
    command("train", recipe, "--output", tmp_path / "whole", "--set", "train.steps=6", *words)
    command("train", recipe, "--output", tmp_path / "parts", "--set", "train.steps=3", *words)
    command("train", recipe, "--output", tmp_path / "parts", "--set", "train.steps=6", *words, "--resume")
    models = [blockdiff.load(tmp_path / run / "model", dtype="auto").state_dict() for run in ("whole", "parts")]
    assert all(torch.equal(x, models[1][name]) for name, x in models[0].items())


def test_the_commands_know_causal_models(here):
    model = here / "run" / "model"
    assert "causal" in command("inspect", model)
    assert "0 canvases" in command("inspect", here / "recipe.yaml")
    assert "a denoising step" in command("plan", model)
    assert "in all" in command("plan", here / "recipe.yaml", "--tokens", "64")
    prompt = json.loads((here / "puzzles" / "test.jsonl").read_text().splitlines()[0])["prompt"]
    assert command("sample", model, "--prompt", prompt).strip()
    text = command("eval", model, "--task", "sudoku", "--data", here / "puzzles" / "test.jsonl", "--limit", "2")
    assert "0 of 2" in text and "steps per canvas" not in text  # nothing is denoised


@pytest.mark.portable
def test_a_model_that_learnt_to_chat_ends_its_turn(tmp_path):
    write_tokenizer(byte_level_bpe(["hello"], 300), tmp_path / "tokens")
    save_preset(tmp_path / "causal.json", LITTLE)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "oh"}]
    recipe = {
        "model": {"preset": tmp_path / "causal.json", "tokenizer": tmp_path / "tokens"},
        "data": {"train": [{"messages": talk}]},
        "optim": {"lr": 1e-2},
        "train": {"steps": 40, "batch_size": 1},
    }
    run = blockdiff.train(recipe, output=tmp_path / "run")
    sampler = blockdiff.Sampler.from_pretrained(run.directory / "model", device="cpu")
    [result] = sampler.generate([talk[:1]], max_new_tokens=32)
    assert (result.text, result.finish_reason, len(result.tokens)) == ("oh", "eos", 3)


@pytest.mark.parametrize("family", ["trained", "llama", "minimax_m3"])
def test_the_recipe_makes_a_denoiser_of_any_causal_model_that_keeps_both_ways_of_sampling(family, here, tmp_path):
    causal = here / "run" / "model"
    if family != "trained":
        tokenizer, causal = load_tokenizer(causal), tmp_path / "causal"
        blockdiff.save(blockdiff.init(CONFIGS[family](), tokenizer=tokenizer, device="cpu"), causal, tokenizer)
    command("init", "--from", causal, tmp_path / "m", "--canvas-length", "17")
    words = {
        "model.path": tmp_path / "m",
        "data": f"{{train: {here}/puzzles/train.jsonl, heldout: {here}/puzzles/test.jsonl, cache: off}}",
        "generation": "{max_new_tokens: 17}",
        "optim": "{lr: 1.0e-2, warmup_steps: 1}",
        "train": "{steps: 2, batch_size: 4, log_every: 1}",
    }
    changes = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    command("train", ROOT / "recipes" / "convert_causal.yaml", "--output", tmp_path / "run", *changes)
    train = records(tmp_path / "run", "train")
    assert train[-1]["canvas_loss"] > 0 and train[-1]["ar_loss"] > 0
    before, after = (blockdiff.load(each, dtype="auto") for each in (tmp_path / "m", tmp_path / "run" / "model"))
    moved = [name for name, x in after.state_dict().items() if not torch.equal(x, before.state_dict()[name])]
    assert {"layers.0.decoder_scalar", "self_conditioning.down_proj.weight", "vocabulary.table"} <= {*moved}
    for strategy in ("next_token", "entropy_bound"):
        text = command("sample", tmp_path / "run" / "model", "--prompt", "1.......=", "--strategy", strategy)
        assert isinstance(text, str)


@pytest.mark.quick
def test_the_recipe_makes_a_model_of_blocks_of_a_causal_one(here, tmp_path):
    command("init", "--from", here / "run" / "model", tmp_path / "m", "--canvas-length", "4", "--prefix", "blocks")
    words = {
        "model.path": tmp_path / "m",
        "data": f"{{train: {here}/puzzles/train.jsonl, heldout: {here}/puzzles/test.jsonl, cache: off, pack: 64}}",
        "objective.ar_loss": "none",
        "generation": "{max_new_tokens: 17}",
        "train": "{steps: 2, batch_size: 4, log_every: 1}",
    }
    changes = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    command("train", ROOT / "recipes" / "convert_causal.yaml", "--output", tmp_path / "run", *changes)
    assert records(tmp_path / "run", "train")[-1]["canvas_loss"] > 0
    assert records(tmp_path / "run", "heldout")[-1]["heldout_canvas_loss"] > 0
    assert blockdiff.load(tmp_path / "run" / "model").config.block == 4
    lines = [command("sample", tmp_path / "run" / "model", "--prompt", "1.2....="[:n]) for n in (5, 6)]
    assert all(isinstance(line, str) for line in lines)


@pytest.mark.quick
def test_the_loss_is_the_mean_over_next_tokens_packed_or_not():
    model = small_model("llama")
    documents = [torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 17, 5)]
    rows = [CleanRow(each, []) for each in documents]
    objective = Objective(model, Linear(), UniformCorruption(96))
    apart, packed = lay_out(rows, 1, 0), lay_out([joined(rows)], 1, 0)
    truth = sum(
        torch.nn.functional.cross_entropy(
            model.unembed(model.encode(torch.tensor([each])).hidden[0, :-1]), torch.tensor(each[1:]), reduction="sum"
        )
        for each in documents
    )
    for batch in (apart, packed):
        losses = objective(batch)
        assert batch.ar_count() == 9 + 17 + 5 - 3 and losses.keys() == {"ar"}
        torch.testing.assert_close(losses["ar"], truth, rtol=1e-6, atol=0)
        found = objective.evaluate(batch)
        torch.testing.assert_close(found.ar_loss_BS.sum(), truth.detach(), rtol=1e-5, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "change", ["objective.ar_loss=none", "objective.coin=0.2", "data.canvases=all", "objective.positions=corrupted"]
)
def test_what_is_of_canvases_is_refused(change: str, tmp_path: Path):
    from blockdiff.training.recipe_checks import refuse
    from blockdiff.training.recipe_files import read_recipe
    from blockdiff.training.starting_model import decided

    save_preset(tmp_path / "causal.json", LITTLE)
    command("data", "sudoku", "--split", "train=8", "--output", tmp_path / "puzzles")
    recipe = RECIPE.replace("objective: {{ar_loss: {{scope: response}}}}\n", "").format(here=tmp_path)
    recipe = recipe.replace("heldout:", "# heldout:").replace(", cache: off}", "")
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{preset: {tmp_path}/causal.json, tokenizer: {tmp_path}/puzzles/tokenizer}}\n"
        f"data: {{train: {tmp_path}/puzzles/train.jsonl}}\ntrain: {{steps: 1, batch_size: 1}}\n"
    )
    with pytest.raises(RecipeError, match=change.partition("=")[0]):
        refuse(decided(read_recipe(tmp_path / "recipe.yaml", [change]))[0])


@pytest.mark.quick
def test_only_a_causal_model_is_converted(tmp_path: Path):
    blockdiff.save(small_model("qwen3", dtype=torch.bfloat16), tmp_path / "m")
    made: Callable[..., Any] = convert
    assert made(tmp_path / "m", 4).dtype == torch.bfloat16
