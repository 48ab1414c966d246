"""Kinds of run: which one a recipe has, whose keys they are, and one from Python, recorded and compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import blockdiff
from blockdiff.canvas import Batch
from blockdiff.checkpoint import Generation, init, save
from blockdiff.checkpoint.config import config_from
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RecipeError, RunError
from blockdiff.objective import Losses, Objective
from blockdiff.plots.panels import NamedRun, make_panels
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.training.kinds import kinds
from blockdiff.training.kinds.canvas import Canvas
from blockdiff.training.kinds.kind import Kind
from blockdiff.training.recipe_choices import MaskToken, UniformTokens
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import StartingModel, decided
from blockdiff.training.step import Loss
from tests.support.little_model import LITTLE, save_preset
from tests.support.recipes import MINIMAL_TREE
from tests.training.test_causal import LITTLE as CAUSAL


def read(**objective: Any) -> Any:
    return read_recipe(MINIMAL_TREE | {"objective": objective}, needs_data=False).objective


@pytest.mark.quick
def test_every_file_of_the_folder_with_a_kind_is_one_by_its_name():
    assert {*kinds()} == {"canvas", "next_token", "drafter", "policy", "distil"}
    assert all(issubclass(kind, Kind) and kind.model_fields["kind"].default == name for name, kind in kinds().items())


@pytest.mark.quick
def test_a_kind_that_is_named_has_its_own_keys_alone():
    assert read(kind="drafter", target="a").anchors == 512
    assert read(kind="policy", over="canvas", coin=0.25).coin == 0.25  # those of canvases are included
    for objective, said in (
        ({"kind": "drafter", "target": "a", "coin": 0.5}, r"objective\.coin .*canvas or distil or policy"),
        ({"kind": "canvas", "answers": 4}, r"objective\.answers .*policy"),
        ({"anchors": 4}, r"objective\.anchors .*drafter"),
        ({"kind": "policy"}, r"objective\.over: missing"),
        ({"kind": "sonnet"}, r"objective: .*'canvas', .*'sonnet'"),
    ):
        with pytest.raises(RecipeError, match=said):
            read(**objective)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"rl": {"policy": "head"}}, r"rl; write objective: \{kind: policy"),
        ({"objective": {"draft_for": "a"}}, r"draft_for; write objective: \{kind: drafter, target"),
        ({"objective": {"distil": True}}, r"distil; write objective: \{kind: distil"),
        ({"objective": {"router": "frozen"}}, r"router; write model\.router"),
        ({"objective": {"images": "frozen"}}, r"images; write model\.images"),
        ({"objective": {"kind": "drafter", "target": "a", "targets": "tokens"}}, r"targets; write .*labels"),
        ({"objective": {"kind": "policy", "over": "canvas", "group": 4}}, r"group; write objective\.answers"),
        ({"objective": {"kind": "policy", "over": "canvas", "clip": 0.1}}, r"clip; write objective\.ratio_clip"),
    ],
)
def test_the_spelling_of_earlier_recipes_is_refused_with_the_present_one(tree, said):
    with pytest.raises(RecipeError, match=said):
        read_recipe(MINIMAL_TREE | tree, needs_data=False)


@pytest.mark.quick
def test_without_a_name_the_kind_follows_from_the_model_and_its_keys_are_checked_then(tmp_path):
    save_preset(tmp_path / "causal.json", CAUSAL)
    save_preset(tmp_path / "canvases.json", LITTLE)

    def kind_over(name: str, **objective: Any) -> Any:
        tree = MINIMAL_TREE | {"model": {"preset": str(tmp_path / f"{name}.json")}, "objective": objective}
        return decided(read_recipe(tree, needs_data=False))[0].objective

    assert kind_over("canvases", coin=0.1) == Canvas(kind="canvas", coin=0.1)
    assert kind_over("causal", ar_loss=0.5).losses(None)["ar"].weight == 0.5
    assert kind_over("causal").kind == "next_token"
    with pytest.raises(RecipeError, match=r"causal\.json.* next_token: unknown key objective\.coin .*canvas or"):
        kind_over("causal", coin=0.1)


DATA = Path(__file__).parents[1] / "data"
LLADA2 = json.loads((DATA / "families/llada2/mini/config.json").read_text()) | {"mask_token_id": 6}


@pytest.mark.quick
def test_a_model_that_says_nothing_of_its_training_is_trained_as_its_family_is(tmp_path):
    save_preset(tmp_path / "blocks.json", CAUSAL | {"canvas_length": 4, "prefix": "blocks"})
    save_preset(tmp_path / "masks.json", LLADA2)
    save_preset(tmp_path / "config.json", LLADA2)

    def found(where: str, path: Path, **objective: Any) -> tuple[Any, str]:
        recipe, said = decided(
            read_recipe(MINIMAL_TREE | {"model": {where: str(path)}, "objective": objective}, needs_data=False)
        )
        return recipe.objective, said

    (blocks, _), (masks, said) = (found("preset", tmp_path / f"{name}.json") for name in ("blocks", "masks"))
    assert (blocks.ar_loss, blocks.coin, blocks.corruption) == (None, 0.5, UniformTokens())
    assert (masks.coin, masks.corruption) == (0.0, MaskToken())
    assert "masks.json was trained: " in said and "corruption mask (default uniform)" in said
    assert found("path", tmp_path)[0] == masks
    with_coin, said = found("path", tmp_path, coin=0.25)
    assert with_coin.coin == 0.25 and "not as model.path was trained: coin 0.25 (there 0.0)" in said
    DiffusionSettings().save(tmp_path)
    assert found("path", tmp_path)[0] == Canvas()


@pytest.mark.quick
def test_canvases_are_filled_with_the_token_of_the_family_or_else_the_end():
    recipe = read_recipe(MINIMAL_TREE, needs_data=False)
    for token, expected in ((None, 2), (7, 7)):
        config = replace(config_from(LLADA2, "here"), fill=token)
        assert Canvas().collate(recipe, StartingModel(config, None, Generation(), 2, 0)).fill_id == expected


class Halved(Objective):
    """The canvas loss under two names."""

    def forward(self, batch: Batch) -> Losses:
        losses = super().forward(batch)
        return {"canvas": losses["canvas"], "again": losses["canvas"], "ar": losses["ar"]}


class Twice(Canvas):
    """The canvas loss, `share` of it by another name."""

    kind: str = "twice"
    share: float = 0.5

    def make(self, recipe: Any, base: Any, model: Any, dtype: Any) -> Halved:
        return Halved(model, **self.parts(recipe, base))

    def losses(self, objective: Any) -> dict[str, Loss]:
        canvas = super().losses(objective)["canvas"]
        return super().losses(objective) | {
            "canvas": Loss(canvas.count, 1 - self.share),
            "again": Loss(canvas.count, self.share),
        }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kinds")
    save_preset(folder / "little.json", LITTLE)
    tokenizer = character_tokenizer(alphabet(4))
    save(init(str(folder / "little.json"), seed=3), folder / "base", tokenizer=tokenizer)
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": "none",
        "data": {"train": make_splits(4, {"train": 12}, seed=0)["train"], "cache": "off"},
        "objective": {"ar_loss": 0.5},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": 2, "batch_size": 4, "micro_batch_size": 2, "log_every": 1, "save_every": 2},
    }


def test_a_kind_from_python_trains_by_its_losses_and_is_recorded_and_compared(inputs, tmp_path, capsys):
    plain = blockdiff.train(inputs, output=tmp_path / "plain")
    assert "again" not in capsys.readouterr().out
    run = blockdiff.train(inputs, output=tmp_path / "run", kind=Twice(ar_loss=0.5))
    last = run.records[-1]["again_loss"]
    assert f"again loss {last:.4f}" in capsys.readouterr().out and run.report["again_loss"] == last
    panels = [make_panels([NamedRun("a", run.records)]), make_panels([NamedRun(n, run.records) for n in "ab"])]
    assert [each[-1].title for each in panels] == ["again loss"] * 2
    for one, other in zip(plain.records, run.records, strict=True):
        assert other["again_loss"] == other["canvas_loss"]
        assert other["canvas_loss"] == pytest.approx(one["canvas_loss"], rel=1e-6)
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    of_plain, of_run = plain.model().state_dict(), run.model().state_dict()
    assert all(torch.allclose(of_plain[name], of_run[name], atol=1e-5) for name in of_plain)
    assert "kind: tests.training.test_kinds.Twice" in (run.directory / "recipe.yaml").read_text()
    further = ["train.steps=4"]
    with pytest.raises(RunError, match=r"objective\.kind"):
        blockdiff.train(inputs, further, run.directory, resume=True)
    with pytest.raises(RunError, match=r"objective\.share"):
        blockdiff.train(inputs, further, run.directory, resume=True, kind=Twice(ar_loss=0.5, share=0.25))
    with pytest.raises(RecipeError, match="from Python"):
        blockdiff.train(run.directory / "recipe.yaml", further, tmp_path / "again")
    whole = blockdiff.train(inputs, further, tmp_path / "whole", kind=Twice(ar_loss=0.5))
    again = blockdiff.train(inputs, further, run.directory, resume=True, kind=Twice(ar_loss=0.5))
    of_whole, of_again = whole.model().state_dict(), again.model().state_dict()
    assert all(torch.equal(of_whole[name], of_again[name]) for name in of_whole)


def test_losses_that_a_kind_does_not_have_are_refused(inputs, tmp_path):
    with pytest.raises(RunError, match=r"^objective: .*canvas, again, ar.*canvas, ar"):
        blockdiff.train(inputs, output=tmp_path / "run", objective=Halved)
