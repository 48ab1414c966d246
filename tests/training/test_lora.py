"""Adapting a checkpoint with LoRA: what trains, what a run holds, resuming, merging, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import blockdiff
from blockdiff import checkpoint
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.stream import StreamedExamples
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import CheckpointError, RecipeError, RunError
from blockdiff.metrics import reproducible
from blockdiff.models.adapters import adapter_tensors, is_adapted
from blockdiff.models.stored import forms_of
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import Sampler
from blockdiff.training import same_run
from blockdiff.training.plan.sampling import plan_sampling
from blockdiff.training.recipe_choices import ArLoss
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import decided, stored_below
from tests.support.commands import refusal, works
from tests.support.little_model import LITTLE, save_preset
from tests.support.recipes import Square

NO_RANKS = "{attention: 0, mlp: 0, experts: 0, self_conditioning: 0}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A recipe that adapts a little checkpoint with random weights, as a mapping with its rows in memory."""
    folder = tmp_path_factory.mktemp("inputs")
    character_tokenizer(alphabet(4)).save_pretrained(folder / "tokenizer")
    save_preset(folder / "little.json", LITTLE)
    tokenizer = load_tokenizer(folder / "tokenizer")
    checkpoint.save(checkpoint.init(str(folder / "little.json"), seed=3), folder / "base", tokenizer=tokenizer)
    rows = make_splits(4, {"train": 24, "test": 6}, seed=0)
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": {"parts": {"attention": 4, "mlp": 2, "experts": 2, "self_conditioning": 2}, "tokens": ["1"]},
        "data": {"train": rows["train"], "heldout": rows["test"], "cache": str(folder / "cache")},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": 4, "batch_size": 6, "log_every": 1, "eval_every": 2, "save_every": 2},
    }


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    return blockdiff.train(inputs, output=tmp_path_factory.mktemp("lora") / "run")


def test_the_base_and_streamed_rows_are_read_with_a_line_where_that_takes_long(inputs, tmp_path, monkeypatch, capsys):
    def slow(function):
        def wait(of):
            time.sleep(0.2)
            return function(of)

        return wait

    monkeypatch.setattr("blockdiff.terminal.FIRST_SECONDS", 0.02)
    monkeypatch.setattr(same_run, "weights_digest", slow(same_run.weights_digest))
    monkeypatch.setattr(StreamedExamples, "content", slow(StreamedExamples.content))
    recipe = inputs | {"data": {"train": inputs["data"]["train"], "streaming": True}}
    blockdiff.train(recipe, ["train.steps=1", "train.eval_every=0", "train.save_every=0"], tmp_path / "run")
    said = capsys.readouterr().out
    assert f"model     reading {inputs['model']['path']}, to recognise it when the run is resumed, 0 s so far" in said
    assert "data      reading the streamed rows, to recognise them when the run is resumed, 0 s so far" in said


def hidden(model) -> Tensor:
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        return model.denoise(tokens[:, :9], model.encode(tokens))


def test_a_run_writes_the_adapter_alone_and_checkpoints_hold_no_weights_of_the_base(inputs, trained):
    assert (trained.directory / "adapter" / "adapter_model.safetensors").is_file()
    assert not (trained.directory / "model").exists()
    saved = load_file(trained.directory / "checkpoints" / "step-4" / "model.safetensors")
    assert saved and all("lora" in name or name == "vocabulary.token_rows" for name in saved)
    model = trained.model()
    assert is_adapted(model)
    base = checkpoint.load(inputs["model"]["path"], dtype="auto")
    assert (hidden(model) - hidden(base)).abs().max() > 1e-3  # it has learnt something


def test_the_config_of_an_adapter_is_that_of_the_model_it_names(trained, inputs):
    with pytest.raises(CheckpointError, match=f"{inputs['model']['path']}"):
        checkpoint.read_config(trained.directory)


def test_inspect_and_plan_show_a_run_of_adapters_with_the_model_below_them(trained, inputs):
    said = works("inspect", trained.directory)
    model = trained.model()
    count = sum(x.numel() for x in adapter_tensors(model).values())
    assert said.startswith(f"{trained.directory}, an adapter of {inputs['model']['path']}\n")
    assert re.search(rf"total +\d+ +{count:,} +", said) and "training the adapter in fp32" in said
    with_it, without = (
        plan_sampling(checkpoint.read_config(inputs["model"]["path"]), torch.float32, "cpu", adapter=adapter).weights
        for adapter in (trained.directory / "adapter", None)
    )
    assert with_it == sum(x.nbytes for x in (*model.parameters(), *model.buffers())) == without + 4 * count
    assert works("plan", trained.directory, "--device", "cpu").startswith("weights in bf16")


@pytest.mark.portable
def test_the_loss_falls_although_only_adapters_train(inputs, tmp_path):
    run = blockdiff.train(inputs, ["train.steps=40", "train.save_every=0", "train.eval_every=20"], tmp_path / "run")
    losses = [record["heldout_canvas_loss"] for record in run.records if record["kind"] == "heldout"]
    assert losses[-1] < losses[0] - 0.1


def test_a_resumed_run_ends_where_an_undisturbed_one_does(inputs, trained, tmp_path):
    blockdiff.train(inputs, ["train.steps=2"], tmp_path / "run")
    again = blockdiff.train(inputs, output=tmp_path / "run", resume=True)
    one, other = (load_file(run.directory / "adapter" / "adapter_model.safetensors") for run in (trained, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert [r["loss"] for r in again.records if "loss" in r] == [r["loss"] for r in trained.records if "loss" in r]


def test_adapters_of_noisy_tokens_train_resume_and_sample_beside_a_base_whose_next_tokens_stay(inputs, tmp_path):
    lora = inputs["lora"] | {"noisy_only": True, "tokens": []}
    asked = inputs | {"lora": lora, "objective": {"ar_loss": "none"}}
    whole = blockdiff.train(asked, output=tmp_path / "whole")
    blockdiff.train(asked, ["train.steps=2"], tmp_path / "run")
    again = blockdiff.train(asked, output=tmp_path / "run", resume=True)
    one, other = (load_file(run.directory / "adapter" / "adapter_model.safetensors") for run in (whole, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    model, base = again.model(), checkpoint.load(inputs["model"]["path"], dtype="auto")
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.equal(model.encode(tokens).hidden, base.encode(tokens).hidden)
    assert (hidden(model) - hidden(base)).abs().max() > 1e-3
    path = {"lora": {"path": str(whole.directory / "adapter")}, "objective": {"ar_loss": "none"}}
    on = blockdiff.train(inputs | path, ["train.steps=1"], tmp_path / "on")
    assert torch.equal(on.model().encode(tokens).hidden, base.encode(tokens).hidden)
    assert "--peft" in refusal("export", whole.directory, "--output", tmp_path / "merged")


class Lost(blockdiff.Callback):
    """Ends a run in its third step."""

    def on_step(self, trainer):
        if trainer.step == 3:
            raise KeyboardInterrupt


def test_dropout_acts_is_the_same_in_a_resumed_run_and_follows_from_the_seed(inputs, tmp_path):
    dropped = ["lora.dropout=0.4", "train.eval_every=0", "train.keep=9"]
    whole = blockdiff.train(inputs, dropped, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        blockdiff.train(inputs, dropped, tmp_path / "run", callbacks=[Lost()])
    torch.manual_seed(torch.initial_seed() + 1)  # as in another process
    again = blockdiff.train(inputs, dropped, tmp_path / "run", resume=True)
    other = blockdiff.train(inputs, [*dropped, "train.steps=2", "seed=2"], tmp_path / "other")

    def weights(run, step):
        return load_file(run.directory / "checkpoints" / f"step-{step}" / "model.safetensors")

    one, resumed = weights(whole, 4), weights(again, 4)
    assert all(torch.equal(one[name], resumed[name]) for name in one)
    assert reproducible(whole.records) == reproducible(again.records)
    kept = blockdiff.train(inputs, ["train.eval_every=0", "train.steps=2"], tmp_path / "kept")
    assert len({run.records[1]["loss"] for run in (whole, other, kept)}) == 3  # B is 0 in the first step


@pytest.fixture(scope="module")
def without_ar(inputs, tmp_path_factory):
    """A model that was trained without the AR loss, with another coin and a schedule of one's own."""
    first = {key: inputs[key] for key in ("data", "train")} | {"model": inputs["model"], "lora": "none"}
    first["objective"] = {"ar_loss": "none", "coin": 0.25, "schedule": Square()}
    return blockdiff.train(first, ["train.steps=1", "train.eval_every=0"], tmp_path_factory.mktemp("first") / "run")


def test_training_goes_on_with_the_objective_of_its_base_and_says_what_differs(inputs, without_ar, tmp_path, capsys):
    recipe = {key: inputs[key] for key in ("data", "train", "lora")} | {"objective": {"coin": 0.75}}
    recipe["model"] = {"path": str(without_ar.directory / "model")}
    said = without_ar.directory / "model/blockdiff.json"
    said.write_text(json.dumps(json.loads(said.read_text()) | {"strategy": "quota"}))
    capsys.readouterr()
    run = blockdiff.train(recipe, ["train.steps=2"], tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("objective")]
    assert line.startswith("objective as model.path was trained: ar_loss none (default 1.0); not as model.path was ")
    assert "schedule linear (there {'tests.support.recipes.Square'" in line and "coin 0.75 (there 0.25)" in line
    assert not any(record.get("ar_loss") for record in run.records)
    assert json.loads((run.directory / "adapter/blockdiff.json").read_text())["strategy"] == "quota"
    resolved = yaml.safe_load((run.directory / "recipe.yaml").read_text())["objective"]
    assert (resolved["ar_loss"], resolved["coin"], resolved["schedule"]) == ("none", 0.75, "linear")
    resumed = blockdiff.train(recipe, output=run.directory, resume=True)
    assert resumed.records[-1]["step"] == 4 and not any(record.get("ar_loss") for record in resumed.records)
    other, _ = decided(read_recipe(recipe, ["objective.ar_loss=0.5"]))
    assert other.objective.ar_loss == ArLoss(0.5)  # the recipe decides


def test_resuming_with_other_weights_below_the_adapters_is_refused(inputs, tmp_path):
    blockdiff.train(inputs, ["train.steps=2"], tmp_path / "run")
    model = checkpoint.load(inputs["model"]["path"], dtype="auto")
    with torch.no_grad():
        model.layers[0].experts.gate_up_proj[0, 0, 0] += 1  # one number of one expert
    checkpoint.save(model, tmp_path / "other")
    with pytest.raises(RunError, match=r"model\.path"):
        blockdiff.train(inputs, [f"model.path={tmp_path / 'other'}"], tmp_path / "run", resume=True)


def test_a_merged_export_equals_the_adapted_model_and_runs_in_transformers(trained, inputs, tmp_path):
    from transformers import DiffusionGemmaForBlockDiffusion

    checkpoint.export(trained.directory, tmp_path / "merged")
    merged = checkpoint.load(tmp_path / "merged", dtype="float32")
    assert not is_adapted(merged)
    adapted = trained.model()
    assert (hidden(merged) - hidden(adapted)).abs().max() < 1e-5
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        logits = theirs(input_ids=tokens, decoder_input_ids=tokens[:, :9]).logits
    assert (logits - merged.unembed(hidden(merged))).abs().max() < 1e-4
    base, adapter = inputs["model"]["path"], trained.directory / "adapter"
    beside = Sampler.from_pretrained(base, dtype="float32", adapter=adapter).generate(["1..4.."], seed=2)
    texts = [
        [result.tokens for result in Sampler.from_pretrained(where, dtype="float32").generate(["1..4.."], seed=2)]
        for where in (tmp_path / "merged", trained.directory, trained.directory / "adapter")
    ]
    assert texts[0] == texts[1] == texts[2] == [result.tokens for result in beside]


def test_an_adapter_trains_on_from_where_it_is(inputs, trained, tmp_path, capsys):
    """With a learning rate of almost 0 it stays as it is; otherwise it moves, and a run that is resumed ends alike."""
    asked, base = inputs | {"lora": {"path": str(trained.directory / "adapter")}}, inputs["model"]["path"]
    still = blockdiff.train(asked, ["optim.lr=1e-30", "train.steps=1"], tmp_path / "still")
    assert torch.equal(hidden(still.model()), hidden(trained.model()))
    config = json.loads((still.directory / "adapter" / "adapter_config.json").read_text())
    was = json.loads((trained.directory / "adapter" / "adapter_config.json").read_text())
    assert config == was
    capsys.readouterr()
    whole = blockdiff.train(asked, [], tmp_path / "whole")
    assert f"adapter   {trained.directory / 'adapter'}, trains on" in capsys.readouterr().out
    assert (hidden(whole.model()) - hidden(trained.model())).abs().max() > 1e-3
    shutil.copytree(trained.directory / "adapter", tmp_path / "moved")
    blockdiff.train(asked, ["train.steps=2"], tmp_path / "run")
    moved = [f"lora.path={tmp_path / 'moved'}"]
    again = blockdiff.train(asked, moved, tmp_path / "run", resume=True)
    assert torch.equal(hidden(again.model()), hidden(whole.model()))
    for name in ("whole", "again"):
        checkpoint.export(tmp_path / {"whole": "whole", "again": "run"}[name], tmp_path / name / "merged")
    with pytest.raises(RunError, match=r"lora\.path"):
        other = f"lora.path={whole.directory / 'adapter'}"
        blockdiff.train(asked, [other, "train.steps=6"], tmp_path / "run", resume=True)
    assert checkpoint.adapters.adapted_checkpoint(again.directory / "adapter") == base


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 4, "path": "ADAPTER"}, r"lora\.rank"),
        ({"alpha": 4, "path": "ADAPTER"}, r"lora\.alpha"),
        ({"tokens": ["1"], "path": "ADAPTER"}, r"lora\.tokens"),
        ({"path": "BASE"}, "lora.path: .*holds no adapter"),
        ({"path": "no/adapter"}, "lora.path: no/adapter"),
    ],
)
def test_an_adapter_that_cannot_train_on_is_refused(inputs, trained, tmp_path, lora, said):
    places = {"ADAPTER": str(trained.directory / "adapter"), "BASE": inputs["model"]["path"]}
    asked = inputs | {"lora": {**lora, "path": places.get(lora["path"], lora["path"])}}
    with pytest.raises(RecipeError, match=said):
        blockdiff.train(asked, [], tmp_path / "run")


def test_an_exported_adapter_names_the_model_it_is_asked_to(trained, inputs, tmp_path):
    checkpoint.export(trained.directory, tmp_path / "adapter", peft=True, base="org/name")
    assert checkpoint.adapters.adapted_checkpoint(tmp_path / "adapter") == "org/name"
    model = checkpoint.load(inputs["model"]["path"], dtype="auto", adapter=tmp_path / "adapter")
    assert torch.equal(hidden(model), hidden(trained.model()))
    with pytest.raises(CheckpointError, match="no adapters"):
        checkpoint.export(inputs["model"]["path"], tmp_path / "none", peft=True)


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["lora=none", "lora.alpha=3"], "nothing would"),
        (["lora.parts.router=4"], "'router'"),
        (["lora.tokens=[nonsense]"], "'nonsense'"),
        (["lora.tokens=['1','1']"], "twice"),
        (["lora.alpha={norms: 3}"], "norms"),
        (["model.router=trained"], "only adapters train"),
        ([f"lora.parts={NO_RANKS}", "lora.tokens=[]"], "nothing would"),
        (["lora.rnk=3"], "did you mean"),
        (
            ["lora.parts.attention=100000"],
            r"100,000 .*'attention'.*\(\d+\)",
        ),
    ],
)
def test_a_start_that_would_not_do_what_it_says_is_refused(inputs, overrides, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        blockdiff.train(inputs, overrides, tmp_path / "run")


def test_freezing_what_adapters_leave_frozen_is_refused_and_adapters_can_be_frozen(inputs, tmp_path):
    with pytest.raises(RunError, match=r"optim\.freeze: 'layers\.0\.mlp\.\*weight' matches no adapter"):
        blockdiff.train(inputs, ["optim.freeze=['layers.0.mlp.*weight']"], tmp_path / "run")
    run = blockdiff.train(inputs, ["optim.freeze=['layers.0.*']", "train.steps=1"], tmp_path / "run")
    moved = {name for name, x in adapter_tensors(run.model()).items() if name.endswith("lora_B") and x.any()}
    assert moved and not any(name.startswith("layers.0.") for name in moved)


def test_training_all_weights_of_a_checkpoint_has_to_be_asked_for(inputs, tmp_path):
    unasked = {key: value for key, value in inputs.items() if key != "lora"}
    with pytest.raises(RecipeError, match="what trains"):
        blockdiff.train(unasked, ["train.steps=1"], tmp_path / "run")
    run = blockdiff.train({**unasked, "lora": "none"}, ["train.steps=1"], tmp_path / "run")
    assert not is_adapted(run.model()) and (run.directory / "model").is_dir()


def test_adapters_of_a_preset_are_refused(inputs, tmp_path):
    with pytest.raises(RecipeError, match="preset tiny"):
        blockdiff.train(inputs, ["model={preset: tiny, tokenizer: x}"], tmp_path / "run")


@pytest.mark.portable
def test_a_base_in_fp8_stands_still_under_its_adapters(inputs, tmp_path):
    recipe = {**inputs, "model": {**inputs["model"], "quantize": "fp8", "dtype": "auto"}}
    run = blockdiff.train(recipe, output=tmp_path / "run")
    losses = [record["loss"] for record in run.records if record["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1  # batches differ by 0.02
    assert blockdiff.train(recipe, output=tmp_path / "run", resume=True, overrides=("train.steps=5",)).records
    with pytest.raises(RunError, match=r"model\.quantize"):
        blockdiff.train(inputs, output=tmp_path / "run", resume=True, overrides=("train.steps=6", "model.dtype=auto"))


def test_a_base_that_is_stored_in_four_bits_is_trained_over_as_it_is_and_resumed_to_the_bit(inputs, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    save_preset(tmp_path / "wide.json", {**LITTLE, "text_config": {**LITTLE["text_config"], **sizes}})
    tokenizer = load_tokenizer(find(inputs["model"]["path"]))
    checkpoint.save(checkpoint.init(str(tmp_path / "wide.json"), seed=3), tmp_path / "plain", tokenizer=tokenizer)
    stored = checkpoint.export(tmp_path / "plain", tmp_path / "stored", quantize="nvfp4")
    recipe = {**inputs, "model": {"path": str(stored)}}
    whole = blockdiff.train(recipe, output=tmp_path / "whole")
    assert forms_of(whole.model()) == ("fp8", "nvfp4")
    blockdiff.train(recipe, output=tmp_path / "parts", overrides=("train.steps=2",))
    parts = blockdiff.train(recipe, output=tmp_path / "parts", resume=True)
    one, two = (load_file(run.directory / "adapter" / "adapter_model.safetensors") for run in (whole, parts))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    for change in ({"lora": "none"}, {"lora": "none", "optim": {**inputs["optim"], "ema": 0.9}}):
        with pytest.raises(RecipeError, match=r"^model\.path: .*stored stores weights in fp8 and nvfp4"):
            blockdiff.train({**recipe, **change}, output=tmp_path / "no")
    with pytest.raises(RecipeError, match=r"parallel\.shard: full"):
        stored_below(
            checkpoint.empty(checkpoint.read_config(stored)), str(stored), read_recipe(recipe, ["parallel.shard=full"])
        )
