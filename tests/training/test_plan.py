"""The memory of a plan against that of a traced step, and the answers of the command."""

from __future__ import annotations

import gc
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import blockdiff
from blockdiff import checkpoint, with_image_side
from blockdiff.canvas import Batch
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.adapters import draw_adapters
from blockdiff.models.stored import stored_layers
from blockdiff.objective import Objective
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.training.optimiser import matrix_count, trainable
from blockdiff.training.plan import fitting
from blockdiff.training.plan import training as plans
from blockdiff.training.plan.live_bytes import LiveBytes
from blockdiff.training.plan.sampling import plan_sampling
from blockdiff.training.plan.step_bytes import Step, keep_one_of_each
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.step import autocast
from tests.support.commands import run
from tests.support.little_model import LITTLE, save_preset
from tests.support.peaks import peak_memories
from tests.support.recipes import largest_batch, read_data, start, without_weights
from tests.support.seeing import AROUND, png

CPU = torch.device("cpu")
LORA = "lora={parts: {attention: 4, mlp: 4, experts: 4, self_conditioning: 4}}"
FROM_BASE = "model={path: base}"
ADAPTED = (FROM_BASE, LORA, "train.batch_size=1", "data.pack=12", "data.canvases=1", "model.dtype=bfloat16")
ADAPTED += ("optim.name=adamw_8bit",)
IMAGE = 9  # tokens of an image that nothing cuts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    tokenizer = character_tokenizer(alphabet(4))
    tokenizer.add_tokens(list(AROUND), special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    wide = {**LITTLE, "text_config": {**LITTLE["text_config"], **sizes}}
    names = ("boi_token_id", "image_token_id", "eoi_token_id")
    wide |= dict(zip(names, tokenizer.convert_tokens_to_ids(list(AROUND)), strict=True))
    wide["vision_config"] = {**LITTLE["vision_config"], "position_embedding_size": 64}
    cuts = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70}
    (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(cuts))
    save_preset(folder / "little.json", wide)
    model = checkpoint.init(str(folder / "little.json"), seed=3)
    checkpoint.save(model, folder / "base", tokenizer=load_tokenizer(folder / "tokenizer"))
    shutil.copy(folder / "tokenizer" / "preprocessor_config.json", folder / "base")
    return folder


def stored_matrices(model: Any) -> dict[tuple[str, str], Any]:
    """The weights in fewer bits, by layer and name."""
    return {
        (layer, weight): module.held(weight)
        for layer, module in stored_layers(model).items()
        for weight in module.WEIGHTS
    }


def recipe_of(folder: Any, *overrides: str, rows: Any = None) -> Recipe:
    rows = rows or make_splits(4, {"train": 4}, seed=0)["train"]
    tree = {
        "model": {"preset": str(folder / "little.json"), "tokenizer": str(folder / "tokenizer")},
        "data": {"train": rows, "max_length": 64, "canvases": "all"},
        "train": {"steps": 4, "batch_size": 6},
    }
    return read_recipe(tree, [text.replace("path: base", f"path: {folder / 'base'}") for text in overrides])


def held(recipe: Recipe, kernels: str = "auto", steps: int = 1, batch: Batch | None = None) -> int:
    """The peak of live bytes, gradients among them, of a step that really runs: the largest of some."""
    base = start(recipe)
    objective = without_weights(recipe, base, kernels)
    model = objective.model
    if recipe.train.activation_checkpointing:
        plans.checkpoint_activations(model)
    dtype = "float32" if recipe.model.dtype == "auto" else recipe.model.dtype
    frozen = {place: type(held).nearest(torch.ones(held.shape)) for place, held in stored_matrices(model).items()}
    checkpoint.draw_weights(model, seed=0, dtype=dtype, device=CPU)
    for (layer, weight), matrix in frozen.items():
        stored_layers(model)[layer].hold(weight, matrix)
    draw_adapters(model, 0, CPU, model.kept_dtype)
    model.train()
    share = recipe.train.batch_size
    rows = recipe.train.micro_batch_size or share
    images = [] if model.image_side is None else [IMAGE]
    batch = batch or largest_batch(recipe, model, recipe.data.pack or 64, rows, images)

    def work() -> None:
        for _ in range(min(2, share // rows)):
            with autocast(CPU, recipe.train.autocast):
                losses = objective(batch)
            (losses["canvas"] + losses["ar"]).backward()

    return max(peak_memories(work, CPU, lambda: model.zero_grad(set_to_none=True), steps))


def step_of(made: plans.TrainingPlan) -> int:
    """The bytes of a plan that a step needs, gradients among them."""
    return made.total - made.parts["weights"] - made.parts["optimiser"] - made.parts.get("adapters", 0)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.activation_checkpointing=true",),
        ("data.canvases=1",),
        ("data.canvases=3", "data.pack=96", "train.micro_batch_size=2"),
        (FROM_BASE, LORA),
        (FROM_BASE, LORA, "train.activation_checkpointing=true"),
        (FROM_BASE, LORA, "model.quantize=nvfp4"),
        ("model.images=trained",),
        (FROM_BASE, LORA, "model.images=frozen"),
        ("objective.prediction=leave_one_out", "objective.stop_gradient=true"),
    ],
)
def test_a_plan_holds_what_a_traced_step_holds(folder, overrides):
    recipe = recipe_of(folder, *overrides)
    made = plans.plan_training(recipe, device="cpu", image_tokens=IMAGE)
    assert step_of(made) == pytest.approx(held(recipe), rel=0.02)


@pytest.mark.parametrize("count", [1, 2], ids=["an image", "two images"])
@pytest.mark.parametrize(
    "overrides",
    [("model.images=trained",), (FROM_BASE, "lora={parts: {images: 4}}", "model.images=frozen")],
    ids=["trained", "lora"],
)
def test_a_plan_takes_images_to_be_as_large_as_they_are_cut(folder, overrides, count):
    """The rows' images have several forms, and become up to 70 tokens, more than a canvas of 9."""
    sizes = [(96, 96), (40, 100), (200, 100)]
    images = [png(f"rgb({n}, 0, 0)", *sizes[n % 3]) for n in range(12)]
    rows = [{"prompt": "1", "response": "2" * 40, "images": images[n::6][:count]} for n in range(6)]
    recipe = recipe_of(folder, *overrides, "data.max_length=200", "data.cache=off", rows=rows)
    data = read_data(recipe, start(recipe))
    longest = int(max(data.train.lengths))
    made = plans.plan_training(recipe, device="cpu", tokens=longest, image_tokens=None if count == 1 else 140)
    assert 0.9 < step_of(made) / held(recipe, batch=data.batches(1)[0]) < 1.3


@pytest.mark.parametrize(
    "overrides", [(), ("train.activation_checkpointing=true",), (FROM_BASE, LORA)], ids=["full", "again", "lora"]
)
def test_a_plan_counts_what_autocast_makes_of_a_model_that_is_not_sharded(folder, overrides):
    recipe = recipe_of(folder, "train.autocast=bfloat16", *overrides)
    made = plans.plan_training(recipe, device="cpu")
    assert step_of(made) == pytest.approx(held(recipe), rel=0.05)


def test_gradients_have_the_dtype_of_their_weights_and_those_that_wait_for_other_passes_are_told_apart(folder):
    text = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}  # weights that count
    text |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    save_preset(folder / "wide.json", {**LITTLE, "text_config": {**LITTLE["text_config"], **text}})
    few = ("train.micro_batch_size=1", "data.pack=12", "data.canvases=1", f"model.preset={folder}/wide.json")
    few += ("train.activation_checkpointing=true",)
    recipe = recipe_of(folder, *few, "model.dtype=bfloat16")
    made = plans.plan_training(recipe, device="cpu")
    assert step_of(made) == pytest.approx(held(recipe), rel=0.05)
    assert made.parts["gradients"] == 2 * made.trained
    assert 0.5 < made.parts["waiting gradients"] / made.parts["gradients"] <= 1
    once = plans.plan_training(recipe_of(folder, *few, "objective.sweep=true"), device="cpu")
    assert "waiting gradients" not in once.parts


def test_a_plan_for_triton_holds_what_its_kernels_hold(folder):
    """Run in the interpreter, on the CPU: the same code allocates the same tensors."""
    recipe = recipe_of(folder, FROM_BASE, LORA, "data.canvases=1", "train.batch_size=1", "data.pack=20")
    objective = without_weights(recipe, start(recipe), plans.kernels_for("cuda"), torch.float32)
    batch = largest_batch(recipe, objective.model.train(), 20, 1)
    counted = Step(objective, keep_one_of_each(objective.model), {}, has_gradients=False).run(batch, None)
    thresholds = gc.get_threshold()
    gc.set_threshold(50)  # the interpreter leaves copies of tensors in cycles, which go when garbage is looked for
    try:  # the profiler can lose events of the first trace after others: the larger of two is the whole one
        peak = held(recipe, "triton", steps=2)
    finally:
        gc.set_threshold(*thresholds)
    assert counted.peak == pytest.approx(peak, rel=0.05)


def test_a_plan_counts_what_does_not_change_with_the_step(folder):
    recipe = recipe_of(folder, "optim.ema=0.99", "optim.name=adamw_8bit")
    made = plans.plan_training(recipe, device="cpu")
    numbers = made.trained
    assert made.parts["weights"] == 4 * made.numbers and made.parts["gradients"] == 4 * numbers
    assert made.parts["average"] == 4 * numbers and made.parts["optimiser"] == 2 * numbers
    muon = plans.plan_training(recipe_of(folder, "optim.name=muon"), device="cpu")
    weights = trainable(without_weights(recipe, start(recipe), plans.kernels_for("cpu"), torch.float32))
    vectors = sum(x.numel() for name, x in weights.items() if not matrix_count(name, x))
    assert muon.parts["optimiser"] == 4 * numbers + 4 * vectors  # a moment of matrices, two of the rest
    lora = plans.plan_training(recipe_of(folder, FROM_BASE, LORA, "model.dtype=bfloat16"), device="cpu")
    assert lora.parts["adapters"] == 4 * lora.trained
    assert lora.parts["weights"] == 2 * (lora.numbers - lora.trained)


def test_half_a_share_of_rows_needs_half_the_activations(folder):
    one = plans.plan_training(recipe_of(folder), device="cpu")
    two = plans.plan_training(recipe_of(folder), device="cpu", ranks=2)
    assert two.rows == 3
    assert two.parts["activations"] < 0.6 * one.parts["activations"]


def fitting_changes(recipe: Recipe, limit: int) -> list[str] | None:
    found = fitting.what_fits(recipe, limit, start(recipe), ranks=1, device="cpu", tokens=None)
    assert found is None or found[1].fits(limit)
    return None if found is None else found[0]


def test_a_base_that_does_not_fit_goes_into_fp8_and_layers_run_again(folder):
    changes = ["train.activation_checkpointing=true", "model.quantize=fp8"]
    in_fp8 = plans.plan_training(recipe_of(folder, *ADAPTED, *changes), device="cpu").total
    assert fitting_changes(recipe_of(folder, *ADAPTED), in_fp8 * 8 // 7 + 8) == changes


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"micro_batch_size": 500}, ["train.micro_batch_size=1"]),
        ({"micro_batch_size": 8, "activation_checkpointing": 500}, ["train.activation_checkpointing=true"]),
        ({"micro_batch_size": 100, "activation_checkpointing": 500}, ["train.activation_checkpointing=true"]),
        (
            {"micro_batch_size": 200, "activation_checkpointing": 280},
            ["train.micro_batch_size=1", "train.activation_checkpointing=true"],
        ),
        ({"offload": 500, "tokens": 16}, ["parallel.shard=full", "parallel.offload=true"]),
        ({"tokens": 16}, ["data.max_length=32"]),
        ({"tokens": 10}, ["data.max_length=16"]),
        ({"tokens": 1}, None),
    ],
)
def test_changes_that_hardly_help_or_are_not_needed_are_not_named_and_no_key_twice(folder, monkeypatch, saved, named):
    """Of 1,000 bytes 525 fit into 600, beside what others take; some are saved with a change, or by each token less."""
    made = plans.plan_training(recipe_of(folder), device="cpu")

    def plan(tried: Recipe, tokens: int | None = None, **_: Any) -> plans.TrainingPlan:
        less = saved.get("micro_batch_size", 0) * (tried.train.micro_batch_size == 1)
        less += saved.get("activation_checkpointing", 0) * tried.train.activation_checkpointing
        less += saved.get("offload", 0) * tried.parallel.offload
        less += saved.get("tokens", 0) * (64 - (tokens or 64))
        return replace(made, parts={"activations": 1000 - less}, host={})

    monkeypatch.setattr(fitting, "plan_training", plan)
    assert fitting_changes(recipe_of(folder), 600) == named


def test_sampling_is_planned_from_the_config_alone(folder):
    made = plan_sampling(checkpoint.read_config(folder / "base"), torch.float32, device="cpu")
    with torch.autocast("cpu"):  # of a caller, which says nothing about the plan
        assert plan_sampling(checkpoint.read_config(folder / "base"), torch.float32, device="cpu") == made
    model = checkpoint.load(folder / "base", dtype="float32")
    assert made.weights == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    prefix = model.encode(torch.zeros(1, 1000, dtype=torch.int64))
    full = sum(x.nbytes for kind, kv in zip(prefix.kinds, prefix.layers(), strict=True) for x in kv if not kind.window)
    assert full <= made.cache  # sliding layers hold less than the plan counts
    limit = made.weights + made.step[0] + 3 * made.step[1] + 4 * made.cache
    assert made.rows(limit + made.images, 1000) >= 3
    side = with_image_side(model).image_side
    assert made.images == sum(x.nbytes for x in (*side.parameters(), *side.buffers())) > 0


def test_what_comes_after_a_new_start_is_counted_also_where_something_lay_before():
    counted = LiveBytes()
    with counted:
        for _ in range(20):
            before = torch.ones(1000)
            counted.start_again()
            del before
            after = torch.ones(1000)
            assert counted.live == after.nbytes == counted.peak


def test_weights_in_four_bits_are_planned_as_they_are_held(folder):
    recipe = recipe_of(folder, FROM_BASE, LORA, "model.quantize=nvfp4")
    made = plans.plan_training(recipe, device="cpu")
    model = blockdiff.load(str(folder / "base"), dtype="float32", device="cpu", quantize="nvfp4")
    assert made.parts["weights"] == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    plain = blockdiff.load(str(folder / "base"), device="cpu")
    assert made.numbers - made.trained == sum(x.numel() for x in (*plain.parameters(), *plain.buffers()))


def test_weights_in_fp8_are_planned(folder):
    config = checkpoint.read_config(folder / "base")
    in_fp8 = plan_sampling(config, quantize="fp8")
    assert in_fp8.weights < plan_sampling(config).weights
    recipe = recipe_of(folder, FROM_BASE, LORA, "model.dtype=bfloat16", "model.quantize=fp8")
    assert plans.plan_training(recipe).parts["weights"] == in_fp8.weights


def test_the_command_says_what_fits_and_exits_with_1_where_nothing_does(folder, tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "response": "2"}\n')
    path.write_text(
        f"model: {{preset: {folder / 'little.json'}, tokenizer: {folder / 'tokenizer'}}}\n"
        f"data: {{train: {rows}, max_length: 64, canvases: all}}\ntrain: {{steps: 4, batch_size: 6}}\n"
    )
    done = run("plan", path, "--device", "cpu")
    assert done.exit_code == 0 and "activations" in done.stdout and "in all" in done.stdout
    done = run("plan", path, "--device", "cpu", "--gpu-memory", "0.002")
    assert done.exit_code == 1 and "does not fit" in done.stdout
    assert "what fits: --set 'train.micro_batch_size=1'" in done.stdout
    done = run("plan", path, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["fits"] is (torch.cuda.is_available() or None)
    monkeypatch.setattr("blockdiff.memory.total_bytes", lambda device: 2_000_000)
    done = run("plan", path, "--device", "cpu", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["fits"] is False
    done = run("plan", folder / "base", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["fits"] is (torch.cuda.is_available() or None)
    assert "no GPU is here" in run("plan", folder / "base").stdout or torch.cuda.is_available()
    done = run("plan", path, "--set", "data.max_length=null", "--device", "cpu")
    assert done.exit_code == 1 and "the longest row is not known" in done.stderr
    done = run("plan", folder / "base", "--device", "cpu", "--gpu-memory", "1")
    assert done.exit_code == 0 and "rows of 1,000 tokens" in done.stdout


def test_two_plans_at_once_are_each_what_they_are_alone_and_an_error_leaves_nothing_behind(folder):
    recipes = [recipe_of(folder), recipe_of(folder, "train.activation_checkpointing=true", "data.canvases=1")]
    alone = [plans.plan_training(recipe, device="cpu").parts for recipe in recipes]
    with torch.autocast("cpu"):
        assert plans.plan_training(recipes[0], device="cpu").parts == alone[0]
    names = {name: getattr(torch, name) for name in ("autocast", "is_autocast_enabled", "empty")}
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda recipe: plans.plan_training(recipe, device="cpu").parts, recipes))
        assert made == alone

    class Breaks(Objective):
        def forward(self, batch):
            super().forward(batch)
            raise ValueError("of one's own")

    given = recipes[1].given.model_copy(update={"objective": Breaks})
    broken = recipe_of(folder, "train.autocast=bfloat16").model_copy(update={"given": given})
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(plans.plan_training, recipes[0], device="cpu")
        with pytest.raises(ValueError, match="one's own"):
            plans.plan_training(broken, device="cpu")
        assert beside.result().parts == alone[0]
    x = torch.ones(2, 2) @ torch.ones(2, 2)
    assert x.dtype == torch.float32 and x.sum().item() == 8 and type(x) is torch.Tensor
    assert not torch.is_autocast_enabled("cpu") and torch._C._len_torch_dispatch_stack() == 0
    assert all(getattr(torch, name) is was for name, was in names.items())
    assert plans.plan_training(recipes[0], device="cpu").parts == alone[0]


def test_a_batch_of_many_rows_is_planned_from_some_of_them(folder):
    few = plans.plan_training(recipe_of(folder, f"train.batch_size={plans.MOST_ROWS}"), device="cpu")
    many = plans.plan_training(recipe_of(folder, "train.batch_size=100000"), device="cpu")
    assert many.rows == 100000
    assert many.parts["activations"] == pytest.approx(few.parts["activations"] * 100000 / plans.MOST_ROWS, rel=1e-3)
