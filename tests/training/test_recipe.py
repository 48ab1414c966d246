"""Recipes: what is read, what derives from what, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from blockdiff.errors import RecipeError
from blockdiff.training.recipe import COLUMNS, FILE_KEYS, KNOWN, PATHS, Recipe, read_recipe

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
    assert (recipe.optim.weight_decay, recipe.optim.clip, recipe.optim.final_lr_ratio) == (1e-4, 1.0, 0.1)
    assert (recipe.objective.coin, recipe.objective.ar_weight, recipe.data.canvases) == (0.5, 1.0, 1)
    assert recipe.objective.router == "auto"


def test_overrides_are_yaml_values_applied_in_order(folder: Path) -> None:
    recipe = read_recipe(
        folder / "base.yaml",
        ["optim.lr=3e-4", "optim.betas=[0.9, 0.95]", "data.canvases=all", "train.steps=5", "train.steps=7",
         "train.autocast=bfloat16", "data.max_length=null", "seed=3"],
    )  # fmt: skip
    assert recipe.optim.lr == 3e-4 and recipe.optim.betas == (0.9, 0.95)
    assert recipe.data.canvases == "all" and recipe.train.steps == 7 and recipe.seed == 3
    assert recipe.train.autocast == "bfloat16" and recipe.data.max_length is None


def test_three_lines_derive_a_recipe(folder: Path) -> None:
    (folder / "weights").mkdir()
    path = write(folder, "extends: base.yaml\nmodel: {path: weights}\ntrain: {steps: 20}\n")
    recipe = read_recipe(path)
    assert recipe.train.steps == 20 and recipe.train.batch_size == 4
    # Naming a checkpoint replaces the preset it inherits, otherwise both would stand.
    assert recipe.model.path == str(folder / "weights") and recipe.model.preset is None


def test_data_is_found_in_the_current_directory_first_then_beside_the_recipe(folder: Path) -> None:
    assert read_recipe(folder / "base.yaml").data.train == str(folder / "train.jsonl")
    Path("train.jsonl").write_text("")
    assert read_recipe(folder / "base.yaml").data.train == str(Path.cwd() / "train.jsonl")


def test_a_resolved_recipe_reads_back_equal_from_anywhere(folder: Path, tmp_path: Path) -> None:
    recipe = read_recipe(folder / "base.yaml", ["optim.lr=1e-5", "model.path=org/name"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.resolved())
    assert read_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    assert recipe.model.path == "org/name"  # a hub id is left alone
    assert set(yaml.safe_load(recipe.resolved())) == set(KNOWN)


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
    assert isinstance(recipe.data.train, list)
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
    assert "data.train: source 1: weight: input should be greater than 0 (got -1)" in refusal(bad)
    assert "columns: unknown key question; it has prompt, response" in refusal(base, "data.columns={question: prompt}")
    assert "columns: a mapping" in refusal(base, "data.columns=question")
    assert "no file 'missing.jsonl'" in refusal(base, "data.train=[missing.jsonl]")
    assert "at least one source" in refusal(base, "data.train=[]")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("optim: {lrr: 1}", "unknown key optim.lrr; did you mean optim.lr?"),
        ("optim: {weight_decy: 1}", "unknown key optim.weight_decy; did you mean optim.weight_decay?"),
        ("lr: 1", "unknown key lr; did you mean optim.lr?"),
        ("data: {batch_size: 1}", "unknown key data.batch_size; did you mean train.batch_size?"),
        ("trian: {steps: 1}", "unknown key trian; did you mean train?"),
        ("heldot: x", "unknown key heldot; did you mean data.heldout?"),
        ("train: {qqq: 1}", "unknown key train.qqq; train has steps, batch_size"),
        ("train: 3", "train: a section with the keys steps, batch_size"),
        ("train: {steps: {a: 1}}", "train.steps: takes one value, not further keys"),
        ("train: {steps: 0}", "train.steps: input should be greater than 0 (got 0)"),
        ("train: {steps: many}", "train.steps: input should be a valid integer"),
        ("train: {steps: 1, steps: 2}", "not valid YAML: the key 'steps' appears twice"),
        ("data: {canvases: some}", "data.canvases: "),
        ("objective: {eps: 0.5}", "objective.eps: input should be less than 0.5 (got 0.5)"),
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
    assert set(FILE_KEYS) <= set(PATHS)
    assert set(KNOWN) == set(Recipe.model_fields)


def test_the_table_of_keys_is_complete_and_its_defaults_true() -> None:
    text = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if "| `" in line[:3]
    ]
    table = {row[0].strip("`"): row[1].strip("`") for row in rows if row[0].strip("`") in [*PATHS, "extends"]}
    assert set(table) == {*PATHS, "extends"}
    minimal = {"model": {"preset": "a"}, "data": {"train": "b"}, "train": {"steps": 1, "batch_size": 1}}
    recipe = Recipe.model_validate(minimal)
    for path, said in table.items():
        section, _, key = path.partition(".")
        if path == "extends" or key in ("preset", "train", "steps", "batch_size"):
            continue
        value = getattr(getattr(recipe, section), key) if key else getattr(recipe, section)
        if value is None:
            assert said in ("", "none", "all", "the one beside the weights", "the model's")
        else:
            told = yaml.safe_load(said)
            assert told == value.model_dump(exclude_none=True) if path == COLUMNS else type(value)(told) == value


def test_every_recipe_in_the_repository_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "recipes"
    monkeypatch.chdir(tmp_path)
    for path in sorted(folder.glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if (name := line.partition(": ")[2]).endswith(".jsonl"):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_text("")
        assert read_recipe(path).train.steps > 0
