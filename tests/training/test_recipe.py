"""Recipes: what is read, what derives from what, and what a wrong one says."""

from __future__ import annotations

import os
import re
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockdiff import evals
from blockdiff.data.canvas_choice import AllCanvases, RandomCanvases
from blockdiff.errors import RecipeError
from blockdiff.evals.questions import Task
from blockdiff.time_limit import time_limit
from blockdiff.training.kinds import kinds
from blockdiff.training.recipe import Recipe, keys
from blockdiff.training.recipe_choices import ArLoss
from blockdiff.training.recipe_errors import paths
from blockdiff.training.recipe_files import FILE_KEYS, read_recipe
from blockdiff.training.schedule import CosineDecay
from tests.support.recipes import MINIMAL, MINIMAL_TREE, refusal, write

pytestmark = pytest.mark.quick


def test_none_is_null_wherever_a_key_can_be_left_out(recipes: Path) -> None:
    recipe = read_recipe(recipes / "base.yaml", ["data.heldout=none", "evaluation.best=none", "data.pack=none"])
    assert (recipe.data.heldout, recipe.evaluation.best, recipe.data.pack) == (None, None, None)
    assert "data.train" in refusal(recipes / "base.yaml", "data.train=none")


def test_defaults_are_those_of_the_reference_recipe(recipes: Path) -> None:
    recipe = read_recipe(recipes / "base.yaml")
    assert (recipe.optim.lr, recipe.optim.betas, recipe.optim.eps) == (1.5e-4, (0.95, 0.99), 1e-8)
    assert (recipe.optim.weight_decay, recipe.optim.clip, recipe.optim.schedule) == (1e-4, 1.0, CosineDecay(0.1))
    assert (recipe.objective.coin, recipe.objective.ar_loss) == (0.5, ArLoss(1.0, "all"))
    assert recipe.data.canvases == RandomCanvases(1)
    assert recipe.model.router == "auto"


def test_overrides_are_yaml_values_applied_in_order(recipes: Path) -> None:
    recipe = read_recipe(
        recipes / "base.yaml",
        ["optim.lr=3e-4", "optim.betas=[0.9, 0.95]", "data.canvases=all", "train.steps=5", "train.steps=7",
         "train.autocast=bfloat16", "data.max_length=null", "seed=3"],
    )  # fmt: skip
    assert recipe.optim.lr == 3e-4 and recipe.optim.betas == (0.9, 0.95)
    assert recipe.data.canvases == AllCanvases() and recipe.train.steps == 7 and recipe.seed == 3
    assert recipe.train.autocast == "bfloat16" and recipe.data.max_length is None


def test_three_lines_derive_a_recipe(recipes: Path) -> None:
    (recipes / "weights").mkdir()
    path = write(recipes, "extends: base.yaml\nmodel: {path: weights}\ntrain: {steps: 20}\n")
    recipe = read_recipe(path)
    assert recipe.train.steps == 20 and recipe.train.batch_size == 4
    # Naming a checkpoint replaces the preset it inherits, otherwise both would stand.
    assert recipe.model.path == str(recipes / "weights") and recipe.model.preset is None


def test_data_is_found_in_the_current_directory_first_then_beside_the_recipe(recipes: Path) -> None:
    assert read_recipe(recipes / "base.yaml").data.train[0].path == str(recipes / "train.jsonl")
    Path("train.jsonl").write_text("")
    assert read_recipe(recipes / "base.yaml").data.train[0].path == str(Path.cwd() / "train.jsonl")


def test_a_task_is_a_name_or_one_from_python() -> None:
    own = Task("own", is_solved=lambda question, text: True)
    tree = {**MINIMAL_TREE, "evaluation": {"task": own}}
    recipe = Recipe.model_validate(tree)
    assert recipe.evaluation.task is own and evals.task(own) is own
    with pytest.raises(RecipeError, match=r"^.*evaluation\.task: .*Python"):
        Recipe(**yaml.safe_load(recipe.resolved()))


def test_a_template_is_looked_up_as_data_is_and_a_name_stays_a_name(recipes: Path) -> None:
    (recipes / "own.jinja").write_text("")
    (recipes / "verbatim").mkdir()
    own = str(recipes / "own.jinja")
    for source, found in (("own.jinja", own), ("verbatim", "verbatim"), ("tool_use", "tool_use")):
        path = write(recipes, f"extends: base.yaml\ndata: {{template: {source}}}\n")
        assert read_recipe(path).data.template == found
    assert "data.template: no file 'none.jinja'" in refusal(path, "data.template=none.jinja")


def test_a_resolved_recipe_reads_back_equal_from_anywhere(recipes: Path, tmp_path: Path) -> None:
    recipe = read_recipe(recipes / "base.yaml", ["optim.lr=1e-5", "model.path=org/name"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.resolved())
    assert read_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    assert recipe.model.path == "org/name"  # a hub id is left alone
    assert list(yaml.safe_load(recipe.resolved())) == keys()[()]


def test_sources_columns_patterns_and_hub_ids_are_understood(recipes: Path) -> None:
    (recipes / "more-1.jsonl").write_text("")
    path = write(
        recipes,
        "extends: base.yaml\n"
        "data:\n"
        "  train: [train.jsonl, {path: 'more-*.jsonl', weight: 3}, {path: openai/gsm8k, subset: main}]\n"
        "  columns: {prompt: question}\n",
    )
    recipe = read_recipe(path, ["data.columns.response=answer"])
    assert [source.path for source in recipe.data.train] == [
        str(recipes / "train.jsonl"), str(recipes / "more-*.jsonl"), "openai/gsm8k"
    ]  # fmt: skip
    assert [source.weight for source in recipe.data.train] == [1, 3, 1]
    assert (recipe.data.columns.prompt, recipe.data.columns.response) == ("question", "answer")
    again = recipes / "resolved.yaml"
    again.write_text(recipe.resolved())
    assert read_recipe(again) == recipe


def test_a_bare_off_is_a_word(recipes: Path) -> None:
    assert read_recipe(recipes / "base.yaml", ["data.cache=off"]).data.cache == "off"


def test_a_wrong_source_or_column_is_named(recipes: Path) -> None:
    base = recipes / "base.yaml"
    bad = write(recipes, "extends: base.yaml\ndata: {train: [{path: train.jsonl, weight: -1}]}\n")
    assert "data.train: source 1: train.jsonl: weight is -1.0; set a number above 0" in refusal(bad)
    assert "unknown key data.columns.question; data.columns has prompt, response" in refusal(
        base, "data.columns={question: prompt}"
    )
    assert "columns: should be a mapping with the keys prompt, response" in refusal(base, "data.columns=question")
    assert "no file 'missing.jsonl'" in refusal(base, "data.train=[missing.jsonl]")
    assert "data.train: should have at least one source" in refusal(base, "data.train=[]")


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
        ("model: {load_in_4bit: true}", "did you mean model.quantize (nvfp4 under lora)?"),
        ("lora: {r: 8}", "unknown key lora.r; did you mean lora.rank?"),
        ("lora: {target_modules: all-linear}", "unknown key lora.target_modules; did you mean lora.parts"),
        ("val_set_size: 0.1", "unknown key val_set_size; did you mean data.heldout"),
        ("data: {val_set_size: 0.1}", "did you mean data.heldout"),
        ("train_on_inputs: false", "unknown key train_on_inputs; did you mean objective.ar_loss"),
        ("flash_attention: true", "unknown key flash_attention; did you mean model.kernels"),
        ("model: {attn_implementation: sdpa}", "did you mean model.kernels"),
        ("train: {per_device_train_batch_size: 1}", "did you mean train.batch_size (the rows of an optimiser step"),
        ("train: {gradient_accumulation_steps: 4}", "did you mean train.micro_batch_size (the rows of one forward;"),
        ("optim: {lora_r: 8}", "unknown key optim.lora_r; did you mean lora.rank?"),
        ("resume_from_checkpoint: true", "it is no key of a recipe; use --resume (from Python resume=True)"),
        ("train: {steps: 1, epochs: 1}", "train: give exactly one of train.steps and train.epochs"),
        ("lora: {rank: 2, parts: {experts: 2}}", "lora: give one of lora.rank (of attention and mlp) and lora.parts"),
        ("train: {epochs: 0}", "train.epochs: input should be greater than 0"),
        ("train: 3", "train: should be a mapping with the keys steps, epochs, batch_size"),
        ("train: {steps: {a: 1}}", "train.steps: input should be a valid integer (got {'a': 1})"),
        ("train: {steps: 0}", "train.steps: input should be greater than 0 (got 0)"),
        ("train: {steps: many}", "train.steps: input should be a valid integer"),
        ("train: {save_every: true}", "train.save_every: input should be a number, not a switch (got True; YAML"),
        ("optim: {ema: yes}", "optim.ema: input should be a number, not a switch (got True; YAML"),
        ("objective: {coin: off}", "objective.coin: input should be a number, not a switch (got False; YAML"),
        ("seed: true", "seed: input should be a number, not a switch (got True; YAML"),
        ("train: {steps: 1, steps: 2}", "not valid YAML: the key 'steps' appears twice"),
        ("data: {canvases: some}", "data.canvases: "),
        (
            "objective: {time: {uniform: {low: 0.5, high: 0.5}}}",
            "objective.time.uniform: low must be less than high, both from 0 to 1",
        ),
        ("objective: {schedule: {cubic: 1}}", "objective.schedule: input should be 'linear', 'cosine' or 'polynomial'"),
        ("objective: {schedule: {linear: 1}}", "objective.schedule: linear should have no keys"),
        ("objective: {schedule: {polynomial: 3}}", "objective.schedule: polynomial should have {power: 2.0}"),
        ("optim: {schedule: {wsd: 3}}", "optim.schedule: wsd should have {final_ratio: 0.1, decay_steps: null}"),
        ("objective: {schedule: {polynomial: {power: 0}}}", "objective.schedule.polynomial: power must be more than 0"),
        ("objective: {schedule: {polynomial: {pwr: 3}}}", "schedule.polynomial.pwr; did you mean power?"),
        (
            "objective: {schedule: {linear: {power: 3}}}",
            "objective.schedule.linear.power; objective.schedule.linear has no keys",
        ),
        ("objective: {schedule: {linear: {}, cosine: {}}}", "objective.schedule: input should be 'linear', 'cosine'"),
        ("objective: {schedule: null}", "objective.schedule: input should be 'linear', 'cosine' or 'polynomial'"),
        ("objective: {ar_loss: 0}", "objective.ar_loss: the weight should be more than 0 (got 0.0); write none"),
        (
            "objective: {ar_loss: some}",
            "ar_loss: input should be 'none', a number or {weight: 1.0, scope: all} (got 'some')",
        ),
        ("data: {canvases: last}", "data.canvases: last should have a value, {last: COUNT} (got 'last')"),
        ("data: {streaming: 5}", "data.streaming: input should be false, true or {shuffle_buffer: 10000} (got 5)"),
        (
            "data: {max_length: {cut: 5}}",
            "data.max_length: input should be null, 'truncate', 'drop', 'refuse' or a number",
        ),
        ("optim: {schedule: {constant: {final_ratio: 1}}}", "optim.schedule.constant has no keys"),
        ("optim: {schedule: {wsd: {decay_steps: -1}}}", "optim.schedule.wsd: decay_steps should be 0 or more (got -1)"),
        (
            "objective: {schedule: sine}",
            "objective.schedule: input should be 'linear', 'cosine' or 'polynomial' (got 'sine')",
        ),
        ("model: {path: a, preset: b}", "model: give exactly one of model.path"),
        ("data: {train: none.jsonl}", "data.train: no file 'none.jsonl' (looked for "),
        ("extends: nowhere.yaml", "no such recipe (named by extends in "),
        ("extends: [a]", "extends: should be the path of one recipe (got ['a'])"),
        ("extends: other.yaml", "extends: the recipes extend one another in a circle"),
        ("train: [", "not valid YAML: "),
        ("optim: {betas: [0.9]}", "other.yaml: optim.betas: should be a list of two numbers (got [0.9])"),
        ("optim: {betas: [0.9, 0.9, 0.9]}", "optim.betas: should be a list of two numbers (got [0.9, 0.9, 0.9])"),
        ("lora: {alpha: -1}", "lora.alpha: input should be greater than 0 (got -1)"),
        ("lora: {alpha: {mlp: -1}}", "lora.alpha.mlp: input should be greater than 0 (got -1)"),
        ("lora: {tokens: [-1]}", "lora.tokens: input should be greater than or equal to 0 (got -1)"),
        ("optim: {name: on}", "(got True; YAML reads a bare on, off, yes or no as true or false)"),
        ("train: {batch_size: 100000000}", "train.batch_size: input should be less than or equal to 1000000"),
    ],
)
def test_a_wrong_recipe_says_where_and_what(recipes: Path, line: str, expected: str) -> None:
    text = line if line.startswith("extends") else f"extends: base.yaml\n{line}\n"
    message = refusal(write(recipes, text))
    assert expected in message
    assert "other.yaml" in message or "nowhere.yaml" in message


def test_the_layer_that_holds_the_mistake_is_named(recipes: Path) -> None:
    (recipes / "base.yaml").write_text(MINIMAL.replace("steps: 10", "steps: -1"))
    path = write(recipes, "extends: base.yaml\nseed: 1\n")
    assert refusal(path).startswith(f"{recipes / 'base.yaml'}: train.steps: ")
    assert refusal(recipes / "base.yaml", "train.stepz=3").startswith("--set train.stepz=3: unknown key")
    assert refusal(recipes / "base.yaml", "optim.clip=-1").startswith("--set optim.clip=-1: optim.clip: ")


@pytest.mark.parametrize("text", ["optim.lr", "=3", "optim.lr.x=3", "optim=3", "optim.lr=["])
def test_an_override_that_is_none_is_refused(recipes: Path, text: str) -> None:
    assert refusal(recipes / "base.yaml", text).startswith(f"--set {text}: ")


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"just text\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_recipe_is_refused(recipes: Path, content: bytes) -> None:
    path = recipes / "other.yaml"
    path.write_bytes(content)
    assert "other.yaml: " in refusal(path)


def test_a_missing_key_is_named(recipes: Path) -> None:
    assert "train.batch_size: missing" in refusal(write(recipes, MINIMAL.replace(", batch_size: 4", "")))
    assert "no such recipe" in refusal(recipes / "absent.yaml")
    assert "data: missing" in refusal(write(recipes, MINIMAL.replace("data: {train: train.jsonl}", "")))


def test_every_known_path_is_a_field() -> None:
    known = paths(keys())
    assert len(known) == len(set(known))
    assert {".".join(key[:2]) for key in FILE_KEYS} <= set(known)


@pytest.mark.parametrize(
    ("sweep", "mesh", "sweeps"),
    [
        ("auto", {}, False),
        ("auto", {"shard": "full"}, True),
        ("auto", {"experts": 2}, False),
        ("auto", {"tensor": 2}, False),
        ("auto", {"tensor": 2, "shard": "full"}, True),
        (True, {}, True),
        (False, {"shard": "full"}, False),
    ],
)
def test_passes_are_the_recipes_choice_or_one_sweep_where_weights_are_gathered(
    sweep: Any, mesh: Any, sweeps: bool
) -> None:
    recipe = Recipe.model_validate({**MINIMAL_TREE, "objective": {"sweep": sweep}, "parallel": mesh})
    assert recipe.objective.sweeps(recipe) is sweeps


def test_the_table_of_keys_is_complete_and_its_defaults_true() -> None:
    text = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
    known = paths(keys())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line[:3]]
    table = {row[0].strip("`"): row[1].strip("`") for row in rows if row[0].strip("`") in [*known, "extends"]}
    assert set(table) == {*known, "extends"}
    recipe = Recipe.model_validate(MINIMAL_TREE)
    written = recipe.model_dump(mode="json")
    required = {"drafter": {"target": "a"}, "policy": {"over": "canvas"}}
    for name, kind in reversed(kinds().items()):  # the defaults of canvases last
        written["objective"] |= kind.model_validate(required.get(name, {})).model_dump(mode="json")
    written["objective"] |= recipe.objective.model_dump(mode="json")
    for path, said in table.items():
        section, _, key = path.partition(".")
        if path == "extends" or key in ("preset", "train", "steps", "batch_size", "kind", "target", "over", "teacher"):
            continue
        value = written[section][key] if key else written[section]
        if value is None:
            assert said in ("", "none", "all", "the one beside the weights", "the model's", "as stored")
        elif path == "data.columns":
            assert yaml.safe_load(said) == {} and set(value.values()) == {None}
        else:
            assert type(value)(yaml.safe_load(said)) == value, path


def test_every_recipe_is_valid_and_says_in_its_head_how_to_run_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    monkeypatch.chdir(tmp_path)
    for path in sorted(recipes.glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if (name := line.partition(": ")[2]).endswith(".jsonl"):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                Path(name).write_text("")
    for path in sorted(recipes.glob("*.yaml")):  # some extend another
        assert read_recipe(path).train.steps > 0
        head = "".join(takewhile(lambda line: line.startswith("#"), path.open(encoding="utf-8")))
        assert re.search(rf"recipes/{path.name}|`make |`python -m ", head), path


# -- recipes from Python -------------------------------------------------------------------------------------


def test_ranks_by_part_replace_an_inherited_rank_and_change_one_by_one():
    adapted = {"model": {"path": "a"}, "data": {"train": [{"response": "a"}]}, "train": {"steps": 1, "batch_size": 1}}
    read = partial(read_recipe, needs_data=False)
    rank, parts = ({**adapted, "lora": lora} for lora in ({"rank": 4}, {"parts": {"attention": 4, "experts": 2}}))
    assert read(rank, ["lora.parts={experts: 8}"]).lora.ranks == {"experts": 8}
    assert read(parts, ["lora.rank=8"]).lora.ranks == {"attention": 8, "mlp": 8}
    assert read(parts, ["lora.parts.experts=8"]).lora.ranks == {"attention": 4, "experts": 8}


def laughs(depth: int, first: str = "[x, x]") -> str:
    """Anchors that each name the one before ten times."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    return "\n".join(lines)


MERGES = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9))
CHAIN = "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 1000))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (laughs(9), "recipe.yaml:.*written out it is longer than 1,048,576"),
        ("data:\n  train: [" + laughs(9).replace("\n", ", ").replace("[x, x]", "{y: 1}") + "]", "not valid YAML"),
        (MERGES, "recipe.yaml:.*written out it is longer than"),
        (f"a: &a {'x' * 200_000}\nb: [{', '.join(['*a'] * 9)}]", "written out it is longer than"),
        ("a: &a [*a]", "recipe.yaml:1: .*holds itself"),
        ("a: &a {b: *a}", "holds itself"),
        (CHAIN, "written out it is longer than"),
        ("[" * 2000, "nested too deeply"),
        ("a: " + "{a: " * 2000, "nested too deeply"),
        ("a: " + "1" * 60_000 + "e", "recipe.yaml"),  # nearly a number
        ("? [a]\n: b", "a key is one word"),
        ("a: " + "9" * 10_000, "not valid YAML"),
        ("a: 2001-99-99", "not valid YAML"),
        ("#" * 300_000, "longer than 262,144 bytes"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML: could not determine a constructor"),
        ("extends: /dev/zero", "/dev/zero: not a regular file .named by extends in .*recipe.yaml"),
        (r'extends: "x\0y"', "recipe.yaml:1: .*code 0"),
        ("extends: zero", "zero: not a regular file .named by extends"),
        ("extends: pipe", "pipe: not a regular file .named by extends"),
    ],
)
def test_a_recipe_of_a_stranger_has_an_end(recipes: Path, text: str, named: str) -> None:
    (recipes / "zero").symlink_to("/dev/zero")
    os.mkfifo(recipes / "pipe")
    path = recipes / "recipe.yaml"
    path.write_text(text)
    with time_limit(10):
        assert re.search(named, refusal(path)), refusal(path)


def test_endless_files_and_recipes_without_end_are_refused(recipes: Path) -> None:
    with time_limit(10):
        assert "longer than 262,144 bytes" in refusal(Path("/dev/zero"))
        assert "--set data.train" in refusal(recipes / "base.yaml", "data.train={a: &a [*a]}")
    for number in range(30):
        (recipes / f"r{number}.yaml").write_text(f"extends: r{number + 1}.yaml\n")
    assert "r21.yaml: extends: more than 20 recipes" in refusal(recipes / "r0.yaml")


def test_anchors_and_merges_of_a_few_keys_are_read(recipes: Path) -> None:
    path = write(recipes, "extends: base.yaml\ntrain: &a {steps: 20}\noptim: {<<: {lr: 1e-3}}\n")
    recipe = read_recipe(path)
    assert (recipe.train.steps, recipe.optim.lr) == (20, 1e-3)


@pytest.mark.parametrize("text", ["1:30", "!!int 1:30", ":".join(["59"] * 3000), "1:30.5"])
def test_a_number_to_another_base_is_no_number_of_a_recipe(recipes: Path, text: str) -> None:
    assert "train.steps" in refusal(write(recipes, f"extends: base.yaml\ntrain: {{steps: {text}}}\n"))


def test_a_kind_that_is_no_word_is_refused_by_its_key(recipes: Path) -> None:
    assert "objective" in refusal(write(recipes, "extends: base.yaml\nobjective: {kind: {a: 1}}\n"))


def test_a_number_with_a_leading_zero_is_a_decimal_one(recipes: Path) -> None:
    assert read_recipe(write(recipes, "extends: base.yaml\ntrain: {steps: 010}\n")).train.steps == 10


def test_a_packaged_recipe_is_read_by_its_name_and_says_how_its_data_are_made(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "make the data: blockdiff data sudoku --output data/sudoku4" in refusal(Path("quickstart"))
    for name in ("countdown3", "chat_cpu", "pixel_sudoku", "word_problems", "rl_sudoku", "decisions_cpu"):
        assert re.search(r"make the data: blockdiff data [\w-]+ .*--output \w+", refusal(Path(name))), name
    assert read_recipe("quickstart", needs_data=False).model.preset == "sudoku4"
    (tmp_path / "quickstart").write_text(MINIMAL)
    assert read_recipe("quickstart", needs_data=False).model.preset == "tiny"
    (tmp_path / "forwards").mkdir()
    assert "forwards: Is a directory" in refusal(Path("forwards"))
    assert "quickstrt: no such recipe" in refusal(Path("quickstrt"))
