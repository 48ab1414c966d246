"""The plan of ranks that share weights against the memory of a traced rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockdiff import checkpoint
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.layers.experts import Experts
from blockdiff.models.stored import stored_layers
from blockdiff.recipes.sudoku import alphabet
from blockdiff.training.plan import training as plans
from blockdiff.training.plan.fitting import what_fits
from blockdiff.training.recipe_files import read_recipe
from tests.support.forked import run_ranks
from tests.support.little_model import LITTLE, save_preset
from tests.support.plan_ranks import traced
from tests.support.recipes import start, without_weights

SHARDED, TOKENS = "parallel={shard: full}", 40
LORA = "lora={parts: {attention: 4, mlp: 4, experts: 4}}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh-plan")
    character_tokenizer(alphabet(4)).save_pretrained(folder / "tokenizer")
    text = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}  # weights that count
    save_preset(folder / "little.json", {**LITTLE, "text_config": {**LITTLE["text_config"], **text}})
    model = checkpoint.init(str(folder / "little.json"), seed=3)
    checkpoint.save(model, folder / "base", tokenizer=load_tokenizer(folder / "tokenizer"))
    return {
        "model": {"path": str(folder / "base")},
        "lora": "none",
        "data": {"train": [{"prompt": "1", "response": "2"}], "max_length": TOKENS, "canvases": "all"},
        "train": {"steps": 4, "batch_size": 2},
    }


def test_a_rank_of_a_mesh_holds_what_is_planned(tree: dict[str, Any], tmp_path):
    cases = [
        [SHARDED, "train.autocast=bfloat16"],
        [SHARDED, LORA],
        ["parallel={shard: full, experts: 2}"],
        [],  # all weights on both
        ["parallel={tensor: 2}", LORA],
    ]
    run_ranks(2, traced, tmp_path, tree, cases, TOKENS)
    found = json.loads((tmp_path / "held.json").read_text())
    for case, bytes_ in zip(cases, found, strict=True):
        plan = plans.plan_training(read_recipe(tree, case), ranks=2, device="cpu")
        apart = ("weights", "masters", "adapters", "optimiser", "given back late")  # of the last, see `plan_ranks`
        kept = sum(n for name, n in plan.parts.items() if name in apart)
        # ranks that have all tokens are planned as if all of a token's experts lay on one
        within = 0.15 if any("tensor" in each for each in case) else 0.1
        assert plan.total - kept == pytest.approx(bytes_, rel=within), (case, (plan.total - kept) / bytes_)
        assert ("gathered layer" in plan.parts) == any("full" in each for each in case)


def test_a_rank_holds_its_part_of_the_weights_in_fp8_and_of_their_scales(tree: dict[str, Any]):
    in_fp8 = "model={path: " + tree["model"]["path"] + ", quantize: fp8, dtype: bfloat16}"

    def weights(parallel: str) -> int:
        recipe = read_recipe(tree, [LORA, in_fp8, f"parallel={parallel}", "data.canvases=1"])
        return plans.plan_training(recipe, ranks=2, device="cpu").parts["weights"]

    recipe = read_recipe(tree, [LORA, in_fp8, "train.activation_checkpointing=true", "data.canvases=1"])
    model = without_weights(recipe, start(recipe), "torch").model
    experts = [x for held in stored_layers(model).values() if isinstance(held, Experts) for x in held.buffers()]
    of_experts = weights("{experts: 2}")
    assert experts and weights("{}") - of_experts == sum(x.nbytes for x in experts) // 2
    assert weights("{tensor: 2}") < of_experts
    split = plans.plan_training(read_recipe(recipe, ["parallel={experts: 2}"]), ranks=2, device="cpu").total
    found = what_fits(recipe, split * 8 // 7 + 8, start(recipe), ranks=2, device="cpu", tokens=None)
    assert found is not None and not [change for change in found[0] if change.startswith("parallel.shard")]


def test_what_does_not_fit_on_a_rank_is_sharded_where_that_helps(tree: dict[str, Any]):
    recipe = read_recipe(tree)
    whole = plans.plan_training(recipe, ranks=2, device="cpu")
    sharded = plans.plan_training(read_recipe(tree, [SHARDED]), ranks=2, device="cpu")
    limit = (whole.total + sharded.total) // 2
    assert plans.breaking(whole, limit) in ("activations", "optimiser", "vocabulary chunk")
    base = start(recipe)
    found = what_fits(recipe, limit, base, ranks=2, device="cpu", tokens=None)
    assert found is not None and found[1].total <= limit
    kept = sum(n for name, n in whole.parts.items() if name in ("weights", "gradients", "optimiser"))
    found = what_fits(recipe, kept * 3 // 4, base, ranks=2, device="cpu", tokens=None)
    assert found is not None and "parallel.shard=full" in found[0] and found[1].total <= kept * 3 // 4


def test_what_is_offloaded_lies_on_the_host(tree: dict[str, Any]):
    sharded = plans.plan_training(read_recipe(tree, [SHARDED]), ranks=2, device="cpu")
    offloaded = plans.plan_training(read_recipe(tree, ["parallel={shard: full, offload: true}"]), ranks=2, device="cpu")
    kept = ("weights", "gradients", "optimiser")
    assert offloaded.host == {name: sharded.parts[name] for name in kept}
    assert not set(kept) & set(offloaded.parts) and offloaded.total == sharded.total - sum(offloaded.host.values())
