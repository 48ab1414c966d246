"""`--strategy` of sample and eval, and `evaluation.strategy` of a recipe."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RecipeError, RequestError
from blockdiff.sampling import Generation, Sampler
from blockdiff.sampling.strategies import Composed, Quota, parse_strategy, strategies_table
from blockdiff.training import trainer
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.samples import Sampled
from tests.support.commands import refusal, run, works
from tests.support.families import SMALL
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

TEXT = "quota:confidence=0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    folder = tmp_path_factory.mktemp("strategy") / "model"
    settings = Generation(max_steps=5, max_new_tokens=8, confidence=9e9, stability=0)
    checkpoint.save(made, folder, tokenizer=character_tokenizer("0123456789+="), generation=settings)
    return str(folder)


def test_sample_and_eval_denoise_by_the_strategy_that_is_named(model, tmp_path):
    prompts, rows, lines = tmp_path / "p.jsonl", tmp_path / "rows.jsonl", tmp_path / "a.jsonl"
    prompts.write_text(json.dumps({"id": 1, "prompt": "1+2="}))
    rows.write_text(json.dumps({"prompt": "1+2=", "response": "3"}))
    for strategy, steps in (((), 1), (("--strategy", TEXT), 5)):
        result = run("sample", model, "--prompts", str(prompts), "-o", str(lines), "--overwrite", *strategy)
        assert result.exit_code == 0, result.output
        assert json.loads(lines.read_text())["steps"] == [steps]
    numbers = tmp_path / "numbers.json"
    result = run("eval", model, "--task", "exact", "--data", str(rows), "--strategy", TEXT, "-o", str(numbers))
    assert result.exit_code == 0, result.output
    assert json.loads(numbers.read_text())["steps_per_canvas"] == 5.0
    assert "acceptance=Quota(pace='linear')" in numbers.read_text()


def test_help_lists_the_strategies_and_a_mistake_is_one_line_before_the_weights_are_read(model, monkeypatch):
    for command in ("sample", "eval"):
        result = run(command, "--strategy", "help")
        assert (result.exit_code, result.stdout.strip()) == (0, strategies_table())
    monkeypatch.setattr("blockdiff.sampling.sampler.load", None)
    result = run("sample", model, "--prompt", "1+2=", "--strategy", "quotas")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "strategy 'quotas' is not known; did you mean quota?" in result.stderr


def test_a_sampler_takes_the_text_with_the_settings_of_the_model(model):
    sampler = Sampler.from_pretrained(model, dtype="float32", strategy=TEXT)
    assert sampler.strategy == Composed(Quota(), stability=0, confidence=0)
    assert Sampler.from_pretrained(model, over=sampler.model).model is sampler.model


def test_a_draft_model_drafts_for_a_causal_one(model, tmp_path):
    causal, lines, rows = tmp_path / "causal", tmp_path / "a.jsonl", tmp_path / "rows.jsonl"
    made = init(LlamaConfig(**SMALL | {"vocab_size": 384}), seed=3, device="cpu", kernels="torch")
    settings = Generation(max_new_tokens=16)
    checkpoint.save(made, causal, tokenizer=character_tokenizer("0123456789+="), generation=settings)
    rows.write_text(json.dumps({"id": 1, "prompt": "1+2=", "response": "3"}))
    drafted, exact = ("--draft-model", model), ("--dtype", "float64")
    for options in ((), ("--temperature", "0.9")):
        answers = []
        for how in (("--strategy", "next_token"), drafted):
            works("sample", causal, "--prompts", rows, "-o", lines, "--overwrite", *how, *exact, *options)
            answers.append(json.loads(lines.read_text()))
        assert answers[0]["tokens"] == answers[1]["tokens"] and answers[1]["forwards"]["verify"] > 0
    told = json.loads(works("eval", causal, "--task", "exact", "--data", rows, *drafted, "--json"))
    assert told["forwards_per_row"]["verify"] > 0

    said = run("sample", causal, "--prompt", "1+2=", "--steps", "3").stderr
    assert said.count("--steps has no effect") == 1
    words = ("sample", causal, "--prompt", "1+2=", *drafted)
    assert "for --strategy verified alone" in refusal(*words, "--strategy", "next_token", code=2)
    checkpoint.save(made, causal, tokenizer=character_tokenizer("0123456789-="), overwrite=True)
    assert "its tokenizer has other tokens than that of" in refusal(*words)
    with pytest.raises(RequestError, match="tensor parallelism"):
        Sampler.from_pretrained(model, mesh=SimpleNamespace(is_split=True), draft_model=model)


def test_a_recipe_names_the_strategy_of_the_prompts_that_it_samples(tmp_path):
    recipe = {"model": {"path": "a/b"}, "data": {"train": [{"prompt": "1", "response": "2"}]}}
    recipe |= {"train": {"steps": 1, "batch_size": 1}, "evaluation": {"strategy": TEXT}}
    assert read_recipe(recipe).evaluation.strategy == TEXT
    recipe["evaluation"]["strategy"] = "quota:pase=linear"
    with pytest.raises(RecipeError, match=r"evaluation\.strategy: .*'pase'.*pace"):
        read_recipe(recipe)


def test_a_run_samples_its_prompts_by_the_strategy_of_its_recipe(model, monkeypatch):
    given = Sampler.from_pretrained(model, dtype="float32")
    base = SimpleNamespace(tokenizer=given.tokenizer, generation=given.generation)
    data = SimpleNamespace(prompts=[], encoder=SimpleNamespace(reader=None))
    built = SimpleNamespace(model=given.model, diffusion=given.diffusion, base=base, data=data, precision=None, step=0)
    built.averaged = nullcontext
    recipe = SimpleNamespace(seed=0, train=SimpleNamespace(autocast=None))
    recipe.evaluation = SimpleNamespace(strategy=TEXT, task="exact")
    alone = SimpleNamespace(is_main=False)
    run = SimpleNamespace(built=built, recipe=recipe, ranks=alone, sampler=None, step=1, show=None)
    seen = []
    sampled = Sampled({}, [])
    kind = SimpleNamespace(sample=lambda recipe, built, sampler, *rest: seen.append(sampler) or sampled)
    monkeypatch.setattr(trainer, "kind_of", lambda recipe: kind)
    trainer.Trainer.sample(run, 0)
    assert seen[0].strategy == parse_strategy(TEXT, given.generation)
