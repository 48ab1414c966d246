"""Recipes: what is read, what derives from what, and what a wrong one says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from blockdiff.data.collate import AllCanvases, FirstCanvases, LastCanvases, RandomCanvases
from blockdiff.data.sources import Source
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, LogitNormalTime, Polynomial, StratifiedTime, UniformTime
from blockdiff.diffusion.weight import ElboWeight, NoWeight
from blockdiff.errors import RecipeError
from blockdiff.training.mistakes import KEYS, OLD, PATHS
from blockdiff.training.objects import ArLoss, Drop, MaskToken, Refuse, Streaming, Truncate, described
from blockdiff.training.recipe import FILE_KEYS, Recipe, read_recipe
from blockdiff.training.run import settled
from blockdiff.training.schedule import Constant, CosineDecay, LinearDecay, StableDecay

pytestmark = pytest.mark.quick

MINIMAL_TREE = {"model": {"preset": "a"}, "data": {"train": "b"}, "train": {"steps": 1, "batch_size": 1}}
MINIMAL = """\
model: {preset: tiny}
data: {train: train.jsonl}
train: {steps: 10, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe `base.yaml` beside its data, and a current directory elsewhere."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "recipes" / "base.yaml").write_text(MINIMAL)
    (tmp_path / "recipes" / "train.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "recipes"


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder: Path, text: str) -> Path:
    path = folder / "other.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_reference_recipe(folder: Path) -> None:
    recipe = read_recipe(folder / "base.yaml")
    assert (recipe.optim.lr, recipe.optim.betas, recipe.optim.eps) == (1.5e-4, (0.95, 0.99), 1e-8)
    assert (recipe.optim.weight_decay, recipe.optim.clip, recipe.optim.schedule) == (1e-4, 1.0, CosineDecay(0.1))
    assert (recipe.objective.coin, recipe.objective.ar_loss) == (0.5, ArLoss(1.0, "all"))
    assert recipe.data.canvases == RandomCanvases(1)
    assert recipe.objective.router == "auto"


def test_overrides_are_yaml_values_applied_in_order(folder: Path) -> None:
    recipe = read_recipe(
        folder / "base.yaml",
        ["optim.lr=3e-4", "optim.betas=[0.9, 0.95]", "data.canvases=all", "train.steps=5", "train.steps=7",
         "train.autocast=bfloat16", "data.max_length=null", "seed=3"],
    )  # fmt: skip
    assert recipe.optim.lr == 3e-4 and recipe.optim.betas == (0.9, 0.95)
    assert recipe.data.canvases == AllCanvases() and recipe.train.steps == 7 and recipe.seed == 3
    assert recipe.train.autocast == "bfloat16" and recipe.data.max_length is None


def test_three_lines_derive_a_recipe(folder: Path) -> None:
    (folder / "weights").mkdir()
    path = write(folder, "extends: base.yaml\nmodel: {path: weights}\ntrain: {steps: 20}\n")
    recipe = read_recipe(path)
    assert recipe.train.steps == 20 and recipe.train.batch_size == 4
    # Naming a checkpoint replaces the preset it inherits, otherwise both would stand.
    assert recipe.model.path == str(folder / "weights") and recipe.model.preset is None


def test_data_is_found_in_the_current_directory_first_then_beside_the_recipe(folder: Path) -> None:
    assert read_recipe(folder / "base.yaml").data.train[0].path == str(folder / "train.jsonl")
    Path("train.jsonl").write_text("")
    assert read_recipe(folder / "base.yaml").data.train[0].path == str(Path.cwd() / "train.jsonl")


def test_a_resolved_recipe_reads_back_equal_from_anywhere(folder: Path, tmp_path: Path) -> None:
    recipe = read_recipe(folder / "base.yaml", ["optim.lr=1e-5", "model.path=org/name"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.resolved())
    assert read_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    assert recipe.model.path == "org/name"  # a hub id is left alone
    assert list(yaml.safe_load(recipe.resolved())) == KEYS[()]


def test_sources_columns_patterns_and_hub_ids_are_understood(folder: Path) -> None:
    (folder / "more-1.jsonl").write_text("")
    path = write(
        folder,
        "extends: base.yaml\n"
        "data:\n"
        "  train: [train.jsonl, {path: 'more-*.jsonl', weight: 3}, {path: openai/gsm8k, subset: main}]\n"
        "  columns: {prompt: question}\n",
    )
    recipe = read_recipe(path, ["data.columns.response=answer"])
    assert [source.path for source in recipe.data.train] == [
        str(folder / "train.jsonl"), str(folder / "more-*.jsonl"), "openai/gsm8k"
    ]  # fmt: skip
    assert [source.weight for source in recipe.data.train] == [1, 3, 1]
    assert (recipe.data.columns.prompt, recipe.data.columns.response) == ("question", "answer")
    again = folder / "resolved.yaml"
    again.write_text(recipe.resolved())
    assert read_recipe(again) == recipe


def test_a_bare_off_is_a_word(folder: Path) -> None:
    assert read_recipe(folder / "base.yaml", ["data.cache=off"]).data.cache == "off"


def test_a_wrong_source_or_column_is_named(folder: Path) -> None:
    base = folder / "base.yaml"
    bad = write(folder, "extends: base.yaml\ndata: {train: [{path: train.jsonl, weight: -1}]}\n")
    assert "data.train: source 1: train.jsonl: weight is -1.0; give a number above 0" in refusal(bad)
    assert "unknown key data.columns.question; data.columns has prompt, response" in refusal(
        base, "data.columns={question: prompt}"
    )
    assert "columns: a mapping with the keys prompt, response" in refusal(base, "data.columns=question")
    assert "no file 'missing.jsonl'" in refusal(base, "data.train=[missing.jsonl]")
    assert "data.train: name at least one source" in refusal(base, "data.train=[]")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("optim: {lrr: 1}", "unknown key optim.lrr; did you mean optim.lr?"),
        ("optim: {weight_decy: 1}", "unknown key optim.weight_decy; did you mean optim.weight_decay?"),
        ("lr: 1", "unknown key lr; did you mean optim.lr?"),
        ("data: {batch_size: 1}", "unknown key data.batch_size; did you mean train.batch_size?"),
        ("trian: {steps: 1}", "unknown key trian; did you mean train?"),
        ("heldot: x", "unknown key heldot; did you mean data.heldout?"),
        ("train: {qqq: 1}", "unknown key train.qqq; train has steps, epochs, batch_size"),
        ("model: {lora: 1}", "unknown key model.lora; did you mean lora?"),
        ("train: {num_train_epochs: 1}", "unknown key train.num_train_epochs; did you mean train.epochs?"),
        ("learning_rate: 1", "unknown key learning_rate; did you mean optim.lr?"),
        ("train: {per_device_train_batch_size: 1}", "did you mean train.batch_size (the rows of an optimiser step"),
        ("train: {gradient_accumulation_steps: 4}", "did you mean train.micro_batch_size (the rows of one forward;"),
        ("optim: {lora_r: 8}", "unknown key optim.lora_r; did you mean lora.rank?"),
        ("resume_from_checkpoint: true", "it is no key of a recipe; give --resume (from Python resume=True)"),
        ("train: {steps: 1, epochs: 1}", "train: give exactly one of train.steps and train.epochs"),
        ("train: {epochs: 0}", "train.epochs: input should be greater than 0"),
        ("train: 3", "train: a mapping with the keys steps, epochs, batch_size"),
        ("train: {steps: {a: 1}}", "train.steps: input should be a valid integer (got {'a': 1})"),
        ("train: {steps: 0}", "train.steps: input should be greater than 0 (got 0)"),
        ("train: {steps: many}", "train.steps: input should be a valid integer"),
        ("train: {save_every: true}", "train.save_every: input should be a number, not a switch (got True)"),
        ("optim: {ema: yes}", "optim.ema: input should be a number, not a switch (got True)"),
        ("objective: {coin: off}", "objective.coin: input should be a number, not a switch (got False)"),
        ("seed: true", "seed: input should be a number, not a switch (got True)"),
        ("train: {steps: 1, steps: 2}", "not valid YAML: the key 'steps' appears twice"),
        ("data: {canvases: some}", "data.canvases: "),
        (
            "objective: {time: {uniform: {eps: 0.5}}}",
            "objective.time.uniform: eps must be at least 0 and less than 0.5",
        ),
        ("objective: {schedule: {cubic: 1}}", "objective.schedule: input should be 'linear', 'cosine' or 'polynomial'"),
        ("objective: {schedule: {linear: 1}}", "objective.schedule: linear takes no keys"),
        ("objective: {schedule: {polynomial: 3}}", "objective.schedule: polynomial takes {power: 2.0}"),
        ("optim: {schedule: {wsd: 3}}", "optim.schedule: wsd takes {final_ratio: 0.1, decay_steps: null}"),
        ("objective: {schedule: {polynomial: {power: 0}}}", "objective.schedule.polynomial: power must be more than 0"),
        ("objective: {schedule: {polynomial: {pwr: 3}}}", "schedule.polynomial.pwr; did you mean power?"),
        (
            "objective: {schedule: {linear: {power: 3}}}",
            "objective.schedule.linear.power; objective.schedule.linear has no keys",
        ),
        ("objective: {schedule: {linear: {}, cosine: {}}}", "objective.schedule: input should be 'linear', 'cosine'"),
        ("objective: {schedule: null}", "objective.schedule: input should be 'linear', 'cosine' or 'polynomial'"),
        ("objective: {ar_loss: 0}", "objective.ar_loss: the weight must be more than 0, got 0.0; none leaves this"),
        (
            "objective: {ar_loss: some}",
            "ar_loss: input should be 'none', a number or {weight: 1.0, scope: all} (got 'some')",
        ),
        ("data: {canvases: last}", "data.canvases: last takes a value, {last: COUNT} (got 'last')"),
        ("data: {streaming: 5}", "data.streaming: input should be false, true or {shuffle_buffer: 10000} (got 5)"),
        (
            "data: {max_length: {cut: 5}}",
            "data.max_length: input should be null, 'truncate', 'drop', 'refuse' or a number",
        ),
        ("optim: {schedule: {constant: {final_ratio: 1}}}", "optim.schedule.constant has no keys"),
        ("optim: {schedule: {wsd: {decay_steps: -1}}}", "optim.schedule.wsd: decay_steps must not be negative, got -1"),
        (
            "objective: {schedule: sine}",
            "objective.schedule: input should be 'linear', 'cosine' or 'polynomial' (got 'sine')",
        ),
        ("model: {path: a, preset: b}", "model: give exactly one of model.path"),
        ("data: {train: none.jsonl}", "data.train: no file 'none.jsonl' (looked for "),
        ("extends: nowhere.yaml", "no such recipe (named by extends in "),
        ("extends: [a]", "extends: expected the path of one recipe, got ['a']"),
        ("extends: other.yaml", "extends: the recipes extend one another in a circle"),
        ("train: [", "not valid YAML: "),
    ],
)
def test_a_wrong_recipe_says_where_and_what(folder: Path, line: str, expected: str) -> None:
    text = line if line.startswith("extends") else f"extends: base.yaml\n{line}\n"
    message = refusal(write(folder, text))
    assert expected in message
    assert "other.yaml" in message or "nowhere.yaml" in message


def test_the_layer_that_holds_the_mistake_is_named(folder: Path) -> None:
    (folder / "base.yaml").write_text(MINIMAL.replace("steps: 10", "steps: -1"))
    path = write(folder, "extends: base.yaml\nseed: 1\n")
    assert refusal(path).startswith(f"{folder / 'base.yaml'}: train.steps: ")
    assert refusal(folder / "base.yaml", "train.stepz=3").startswith("--set train.stepz=3: unknown key")
    assert refusal(folder / "base.yaml", "optim.clip=-1").startswith("--set optim.clip=-1: optim.clip: ")


@pytest.mark.parametrize("text", ["optim.lr", "=3", "optim.lr.x=3", "optim=3", "optim.lr=["])
def test_an_override_that_is_none_is_refused(folder: Path, text: str) -> None:
    assert refusal(folder / "base.yaml", text).startswith(f"--set {text}: ")


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"just text\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_recipe_is_refused(folder: Path, content: bytes) -> None:
    path = folder / "other.yaml"
    path.write_bytes(content)
    assert "other.yaml: " in refusal(path)


def test_a_missing_key_is_named(folder: Path) -> None:
    assert "train.batch_size: missing" in refusal(write(folder, MINIMAL.replace(", batch_size: 4", "")))
    assert "no such recipe" in refusal(folder / "absent.yaml")
    assert "data: missing" in refusal(write(folder, MINIMAL.replace("data: {train: train.jsonl}", "")))


def test_every_known_path_is_a_field() -> None:
    assert len(PATHS) == len(set(PATHS))
    assert {".".join(key) for key in FILE_KEYS} <= set(PATHS)
    assert not {".".join(key) for key in OLD} & set(PATHS)


@pytest.mark.parametrize(
    ("key", "spelt", "meant", "written"),
    [
        ("objective.schedule", "linear", Linear(), "linear"),
        ("objective.schedule", "{linear: {}}", Linear(), "linear"),
        ("objective.schedule", "polynomial", Polynomial(2.0), "polynomial"),
        ("objective.schedule", "{polynomial: {power: 3}}", Polynomial(3.0), "{polynomial: {power: 3.0}}"),
        ("objective.time", "{uniform: {eps: 0.01}}", UniformTime(0.01), "{uniform: {eps: 0.01}}"),
        (
            "objective.time",
            "{logit_normal: {mean: -1}}",
            LogitNormalTime(mean=-1.0),
            "{logit_normal: {eps: 0.0001, mean: -1.0, std: 1.0}}",
        ),
        ("objective.corruption", "mask", MaskToken(), "mask"),
        ("objective.corruption", "{mask: {token: <mask>}}", MaskToken("<mask>"), "{mask: {token: <mask>}}"),
        ("objective.weight", "none", NoWeight(), "none"),
        ("objective.weight", "elbo", ElboWeight(), "elbo"),
        ("objective.weight", "{elbo: {limit: 5}}", ElboWeight(5.0), "{elbo: {limit: 5.0}}"),
        ("objective.ar_loss", "none", None, "none"),
        ("objective.ar_loss", "0.5", ArLoss(0.5), "0.5"),
        ("objective.ar_loss", "{weight: 0.5}", ArLoss(0.5), "0.5"),
        ("objective.ar_loss", "{scope: response}", ArLoss(1.0, "response"), "{weight: 1.0, scope: response}"),
        ("optim.schedule", "{cosine: {final_ratio: 0.1}}", CosineDecay(), "cosine"),
        ("optim.schedule", "{linear: {final_ratio: 0}}", LinearDecay(0.0), "{linear: {final_ratio: 0.0}}"),
        ("optim.schedule", "constant", Constant(), "constant"),
        (
            "optim.schedule",
            "{wsd: {decay_steps: 9}}",
            StableDecay(decay_steps=9),
            "{wsd: {final_ratio: 0.1, decay_steps: 9}}",
        ),
        ("data.canvases", "all", AllCanvases(), "all"),
        ("data.canvases", "3", RandomCanvases(3), "3"),
        ("data.canvases", "{random: 3}", RandomCanvases(3), "3"),
        ("data.canvases", "{first: 2}", FirstCanvases(2), "{first: 2}"),
        ("data.canvases", "{last: 2}", LastCanvases(2), "{last: 2}"),
        ("data.streaming", "false", None, "false"),
        ("data.streaming", "true", Streaming(), "true"),
        ("data.streaming", "{shuffle_buffer: 5}", Streaming(5), "{shuffle_buffer: 5}"),
        ("data.max_length", "null", None, "null"),
        ("data.max_length", "64", Truncate(64), "64"),
        ("data.max_length", "{truncate: 64}", Truncate(64), "64"),
        ("data.max_length", "{drop: 64}", Drop(64), "{drop: 64}"),
        ("data.max_length", "{refuse: 64}", Refuse(64), "{refuse: 64}"),
    ],
)
def test_a_choice_is_the_object_and_is_written_as_short_as_can_be(
    folder: Path, key: str, spelt: str, meant: object, written: str
) -> None:
    section, _, name = key.partition(".")
    recipe = read_recipe(folder / "base.yaml", [f"{key}={spelt}"])
    chosen = getattr(getattr(recipe, section), name)
    assert chosen == meant and type(chosen) is type(meant)
    assert yaml.safe_load(recipe.resolved())[section][name] == yaml.safe_load(written)
    (folder / "again.yaml").write_text(recipe.resolved())
    assert read_recipe(folder / "again.yaml") == recipe


def test_overrides_reach_into_choices(folder: Path) -> None:
    path = write(folder, "extends: base.yaml\nobjective: {time: {logit_normal: {mean: 1}}, ar_loss: 0.5}\n")
    recipe = read_recipe(
        path,
        [
            "objective.schedule.polynomial.power=3",
            "objective.time.logit_normal.std=2",
            "objective.ar_loss.scope=response",
        ],
    )
    assert recipe.objective.schedule == Polynomial(3.0)
    assert recipe.objective.time == LogitNormalTime(mean=1.0, std=2.0)
    assert recipe.objective.ar_loss == ArLoss(0.5, "response")


def test_another_choice_in_a_derived_recipe_replaces_the_whole_one(folder: Path) -> None:
    path = write(folder, "extends: base.yaml\noptim: {schedule: {cosine: {final_ratio: 0.5}}}\ndata: {max_length: 9}\n")
    recipe = read_recipe(path, ["optim.schedule.wsd.decay_steps=3", "data.max_length.drop=7"])
    assert recipe.optim.schedule == StableDecay(0.1, 3) and recipe.data.max_length == Drop(7)
    assert read_recipe(path, ["optim.schedule=cosine"]).optim.schedule == CosineDecay(0.1)


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            "objective: {power: 3.0}",
            "objective.power: is a key of older recipes; write objective.schedule: {polynomial: {power: 3.0}}; "
            "leave out what had no effect",
        ),
        ("objective: {time_mean: 1, time_std: 2}", "time_mean, objective.time_std: are keys of older recipes"),
        ("data: {which: last}", "write data.canvases: {last: N}; "),
        ("data: {which: last}\nobjective: {ar_weight: 0.5}", "data.canvases: {last: N}, objective.ar_loss: 0.5; "),
    ],
)
def test_a_key_of_an_older_recipe_says_what_to_write_now(folder: Path, text: str, new: str) -> None:
    message = refusal(write(folder, f"extends: base.yaml\n{text}\n"))
    assert message.startswith(f"{folder / 'other.yaml'}: ") and new in message


# A value for each key of an older recipe, and what it means now.
OLD_VALUES = {
    "objective.power": (3.0, Polynomial(3.0)),
    "objective.time_mean": (1.0, LogitNormalTime(mean=1.0)),
    "objective.time_std": (2.0, LogitNormalTime(std=2.0)),
    "objective.eps": (0.01, StratifiedTime(0.01)),
    "objective.mask_token": ("<x>", MaskToken("<x>")),
    "objective.weight_max": (5.0, ElboWeight(5.0)),
    "objective.ar_weight": (0.5, ArLoss(0.5)),
    "objective.ar_scope": ("response", ArLoss(scope="response")),
    "data.which": ("last", LastCanvases(7)),
    "data.shuffle_buffer": (5, Streaming(5)),
    "data.too_long": ("drop", Drop(7)),
    "optim.decay_steps": (5, StableDecay(decay_steps=5)),
    "optim.final_lr_ratio": (0.5, CosineDecay(0.5)),
}


def test_what_is_to_be_written_instead_of_an_old_key_means_the_same(folder: Path) -> None:
    assert [*OLD_VALUES] == [".".join(key) for key in OLD]
    for old, (value, meant) in OLD_VALUES.items():
        message = refusal(folder / "base.yaml", f"{old}={value}")
        key, _, written = message.partition("; write ")[2].partition(";")[0].replace("N}", "7}").partition(": ")
        section, name = key.split(".")
        recipe = read_recipe(folder / "base.yaml", [f"{key}={written}"])
        assert getattr(getattr(recipe, section), name) == meant


@dataclass(frozen=True)
class Square:
    """A schedule of one's own."""

    scale: float = 1.0

    def alpha(self, t: Any) -> Any:
        return 1 - self.scale * t * t

    def noise(self, t: Any) -> Any:
        return self.scale * t * t

    def derivative(self, t: Any) -> Any:
        return -2 * self.scale * t


class Step:
    def __init__(self) -> None:
        self.at, self._hidden = [0.5], 3


@dataclass(frozen=True, slots=True)
class Holder:
    table: Any


def test_an_object_from_python_is_taken_as_it_is_and_recorded_by_class_and_values(folder: Path) -> None:
    made = Recipe.model_validate({**MINIMAL_TREE, "objective": {"schedule": Square(2.0), "weight": ElboWeight(3.0)}})
    assert made.objective.schedule == Square(2.0) and made.objective.weight == ElboWeight(3.0)
    name = f"{__name__}.Square"
    written = yaml.safe_load(made.resolved())["objective"]
    assert written["schedule"] == {name: {"scale": 2.0}} and written["weight"] == {"elbo": {"limit": 3.0}}
    assert described(Square(2.0)) == {name: {"scale": 2.0}} and described(ElboWeight(3.0)) == written["weight"]
    assert described(Step()) == {f"{__name__}.Step": {"at": [0.5]}}
    assert described(partial(Square, scale=3.0)) == {"functools.partial": {"func": name, "args": [], "scale": 3.0}}
    assert described(Square) == name and described(Holder(torch.ones(2))) == {
        f"{__name__}.Holder": {"table": [1.0, 1.0]}
    }
    assert described(UniformTime()) == "uniform" and described(UniformCorruption(7)) == {
        "blockdiff.diffusion.corruption.UniformCorruption": {"vocab_size": 7}
    }
    (folder / "train.jsonl").write_text("")
    (folder / "b").write_text("")
    message = refusal(write(folder, made.resolved().replace("path: b", "path: train.jsonl")))
    assert f"objective.schedule: {name} was given from Python; give it again from Python" in message


def test_the_table_of_keys_is_complete_and_its_defaults_true() -> None:
    text = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line[:3]]
    table = {row[0].strip("`"): row[1].strip("`") for row in rows if row[0].strip("`") in [*PATHS, "extends"]}
    assert set(table) == {*PATHS, "extends"}
    recipe = Recipe.model_validate(MINIMAL_TREE)
    written = recipe.model_dump(mode="json")
    for path, said in table.items():
        section, _, key = path.partition(".")
        if path == "extends" or key in ("preset", "train", "steps", "batch_size"):
            continue
        value = written[section][key] if key else written[section]
        if value is None:
            assert said in ("", "none", "all", "the one beside the weights", "the model's")
        elif path == "data.columns":
            assert yaml.safe_load(said) == {} and set(value.values()) == {None}
        else:
            assert type(value)(yaml.safe_load(said)) == value, path


def test_every_recipe_in_the_repository_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "recipes"
    monkeypatch.chdir(tmp_path)
    for path in sorted(folder.glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if (name := line.partition(": ")[2]).endswith(".jsonl"):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_text("")
        assert read_recipe(path).train.steps > 0


# -- recipes from Python -------------------------------------------------------------------------------------

ROWS = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+2=", "response": "3"}]


def from_python(**sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"preset": "tiny"}, "data": {"train": ROWS}}
    tree["train"] = {"steps": 9, "batch_size": 2}
    return tree | {name: tree.get(name, {}) | section for name, section in sections.items()}


def test_a_mapping_is_read_like_a_file(folder: Path) -> None:
    tree = yaml.safe_load(MINIMAL)
    tree["data"]["train"] = folder / "train.jsonl"
    tree["objective"] = {"schedule": Polynomial(3.0), "ar_loss": None}
    recipe = read_recipe(tree, ["objective.schedule.polynomial.power=4", "optim.lr=1"])
    assert recipe == read_recipe(
        folder / "base.yaml", ["objective.schedule.polynomial.power=4", "objective.ar_loss=none", "optim.lr=1"]
    )
    assert set(tree) == {"model", "data", "train", "objective"} and tree["objective"]["schedule"] == Polynomial(3.0)
    assert read_recipe({"extends": folder / "base.yaml", "seed": 3}) == read_recipe(folder / "base.yaml", ["seed=3"])


def test_a_recipe_that_was_read_is_read_again(folder: Path) -> None:
    recipe = read_recipe(
        folder / "base.yaml", ["objective.time.logit_normal.mean=1", "model.path=org/name", "data.columns.prompt=q"]
    )
    assert read_recipe(recipe) == recipe
    again = read_recipe(recipe, ["objective.time.logit_normal.std=2", "model.preset=tiny", "data.columns.response=a"])
    assert again.objective.time == LogitNormalTime(mean=1.0, std=2.0)
    assert (again.model.path, again.model.preset) == (None, "tiny")
    assert (again.data.columns.prompt, again.data.columns.response) == ("q", "a")


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), "dataset"])
def test_rows_in_memory_are_a_source(folder: Path, rows: Any) -> None:
    if rows == "dataset":
        rows = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    recipe = read_recipe(from_python(data={"train": rows, "heldout": rows}, evaluation={"prompts": rows}))
    for sources in (recipe.data.train, recipe.data.heldout, recipe.evaluation.prompts):
        assert sources is not None and len(sources) == 1
        assert sources[0].path is None and sources[0].rows is rows
    again = read_recipe(recipe, ["seed=1"])
    assert again.data.train[0].rows is rows and again.seed == 1


def test_names_and_rows_make_a_mixture(folder: Path) -> None:
    file = str(folder / "train.jsonl")
    mixture = [file, {"path": file, "weight": 2}, {"rows": ROWS, "name": "sums"}, Source(path=file)]
    train = read_recipe(from_python(data={"train": mixture})).data.train
    assert [source.title for source in train] == ["train.jsonl", "train.jsonl", "sums", "train.jsonl"]
    assert [source.weight for source in train] == [1, 2, 1, 1] and train[2].rows is ROWS
    single = read_recipe(from_python(data={"train": {"path": file, "weight": 2}})).data.train
    assert single == [Source(path=file, weight=2)]


def test_a_recipe_with_rows_of_its_own_says_so_where_it_is_read_without_them(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(read_recipe(from_python()).resolved())
    expected = "data.train: source 1: 2 rows were given from Python; give them again from Python"
    assert expected in refusal(folder / "recipe.yaml")


STREAMED = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
WANTED = "objective.schedule: input should be an object with alpha(), noise(), derivative()"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"steps": 0}}, "recipe: train.steps: input should be greater than 0 (got 0)"),
        ({"train": {"stepz": 0}}, "recipe: unknown key train.stepz; did you mean train.steps?"),
        ({"data": {"train": {"train": ROWS, "test": ROWS}}}, "recipe: data.train: a mapping of train, test; give"),
        ({"data": {"train": iter(ROWS)}}, "recipe: data.train: source 1: rows is a list_iterator; give a sequence"),
        ({"data": {"train": STREAMED}}, "recipe: data.train: source 1: rows is a IterableDataset; give a sequence"),
        ({"given": {"optimiser": "sgd"}}, "recipe: given.optimiser: give a class or a function that makes it"),
        ({"given": {"objective": Step()}}, "recipe: given.objective: give a class or a function that makes it"),
        ({"data": {"train": []}}, "recipe: data.train: name at least one source (got [])"),
        ({"data": {"train": "none.jsonl"}}, "recipe: data.train: no file 'none.jsonl'"),
        ({"objective": {"schedule": Step()}}, f"recipe: {WANTED}"),
        ({"objective": {"schedule": Linear}}, f"recipe: {WANTED}"),
        ({"data": {"max_length": Step()}}, "recipe: data.max_length: input should be null, 'truncate'"),
    ],
)
def test_a_wrong_recipe_from_python_says_where_and_what(folder: Path, sections: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(from_python(**sections))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (None, (), "recipe: a NoneType; give the path"),
        (["a.yaml"], (), "recipe: a list; give the path"),
        ({}, "train.steps=4", "overrides: give a list of texts, such as ['optim.lr=3e-4'] (got 'train.steps=4')"),
        ({}, {"train.steps": 4}, "overrides: give a list of texts"),
        ({}, [4], "overrides: give a list of texts"),
        ({}, ["extends=base.yaml"], "--set extends=base.yaml: extends stands in a recipe file"),
    ],
)
def test_what_is_no_recipe_and_no_override_is_refused(recipe: Any, overrides: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe, overrides)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_a_run_takes_overrides_and_checks_parts_whatever_its_recipe_comes_as(folder: Path) -> None:
    read_before = read_recipe(from_python())
    recipe = settled(read_before, ["seed=7"], folder / "run", objective={"schedule": Square(0.5), "weight": None})
    assert (recipe.seed, recipe.output, recipe.objective.schedule) == (7, str(folder / "run"), Square(0.5))
    assert recipe.objective.weight == read_before.objective.weight
    with pytest.raises(RecipeError, match=f"^from Python: {re.escape(WANTED)}"):
        settled(read_before, output=folder / "run", objective={"schedule": Step()})


@pytest.mark.parametrize(
    ("section", "key", "part"),
    [
        ("objective", "schedule", Square(2.0)),
        ("given", "objective", Square),
        ("given", "optimiser", partial(Square, scale=3.0)),
    ],
)
def test_the_recipe_of_a_run_asks_for_what_python_gave_and_takes_it(
    folder: Path, section: str, key: str, part: Any
) -> None:
    given = {section: {key: part}}
    made = settled(folder / "base.yaml", output=folder / "run", **given)
    (folder / "recipe.yaml").write_text(made.resolved())
    message = refusal(folder / "recipe.yaml")
    assert f"recipe.yaml: {section}.{key}: " in message and "Square" in message
    assert "was given from Python; give it again from Python" in message
    assert settled(folder / "recipe.yaml", output=folder / "run", **given) == made
