"""Runs of reinforcement learning: rewards, rounds of rollouts, resuming, and what a recipe may not ask for."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import blockdiff
from blockdiff import checkpoint
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.sources import Source
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import DataError, RecipeError, RunError
from blockdiff.metrics import reproducible
from blockdiff.parallel.ranks import Ranks
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.rl import reward as rewards_module
from blockdiff.rl.batches import Answer, canvas_batch, examples
from blockdiff.rl.prompts import read_prompts
from blockdiff.rl.reward import advantages, make_rewards, weighted
from blockdiff.sampling import Generation, Result
from blockdiff.sampling import sampler as sampler_module
from blockdiff.training.export import consolidate
from blockdiff.training.kinds import rollouts as rollouts_module
from blockdiff.training.kinds.rollouts import Rollouts
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_checks import refuse
from blockdiff.training.step import sample_ids
from tests.support.commands import run as command
from tests.support.commands import works
from tests.support.little_model import LITTLE, save_preset
from tests.training.test_refuse import recipe

ALONE = Ranks(torch.device("cpu"))
ROWS = [{**row, "digit": "1"} for row in make_splits(4, {"train": 12}, seed=0)["train"]]


def ones(row: dict[str, Any], result: Result) -> float:
    """The digits of an answer that the row names."""
    return float(result.text.count(row["digit"]))


def nothing(row: dict[str, Any], result: Result) -> float:
    """The same reward for every answer."""
    return 0.5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe that reinforces a little model with random weights, of rows that bring no response."""
    folder = tmp_path_factory.mktemp("inputs")
    save_preset(folder / "base.json", LITTLE)
    model = checkpoint.init(str(folder / "base.json"), seed=3)
    generation = Generation(max_steps=3, entropy_bound=1.0, confidence=0.9, stability=0, max_new_tokens=18)
    checkpoint.save(model, folder / "base", tokenizer=character_tokenizer(alphabet(4)), generation=generation)
    rows = [{"prompt": row["prompt"], "digit": row["digit"]} for row in ROWS]
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": "none",
        "data": {"train": rows},
        "objective": {"kind": "policy", "over": "next_token", "prompts_per_round": 2, "answers": 3},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": 4, "batch_size": 6, "log_every": 1, "save_every": 4},
    }


def weights(run: blockdiff.Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "checkpoints" / f"step-{step}" / "model.safetensors")


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("policy", ["next_token", "canvas"])
def test_a_resumed_run_has_the_same_rollouts_and_weights(inputs, tmp_path, policy):
    """Two optimiser steps, each twice, to a round, with every part of the loss."""
    changes = [
        f"objective.over={policy}",
        "objective.passes=2",
        "train.batch_size=3",
        "objective.sft=0.5",
        "objective.kl=0.1",
        "lora={rank: 2}",
    ]
    changes += ["train.steps=8", "objective.advantage=standardised"]
    whole = blockdiff.train(inputs, changes, tmp_path / "whole", reward=ones)
    blockdiff.train(inputs, [*changes, "train.steps=4"], tmp_path / "run", reward=ones)
    again = blockdiff.train(inputs, changes, tmp_path / "run", resume=True, reward=ones)
    assert is_equal(weights(whole, 8), weights(again, 8))
    assert not is_equal(weights(whole, 4), weights(whole, 8))
    records, others = reproducible(whole.records), reproducible(again.records)
    assert records == others and len(records) == 8
    for record in records:
        assert {"ratio_clipped", "entropy", "kl"} <= record.keys()
        assert ("reward" in record) == ("answer_tokens" in record) == (record["step"] in (1, 5))
        assert ("rollout_steps_per_canvas" in record) == (policy == "canvas" and "reward" in record)
    assert records[0]["ratio_clipped"] == 0 and records[0]["ar_loss"] > 0 and records[0]["canvas_loss"] > 0


@pytest.mark.portable
@pytest.mark.parametrize("policy", ["next_token", "canvas"])
def test_micro_batches_change_nothing_and_a_reward_is_learnt(inputs, tmp_path, policy, monkeypatch):
    """Plain gradient descent on the number of ones; the last rounds have more than the first ones.

    All rounds but the first have one engine: before the first optimiser step nobody knows what memory that takes.
    """
    engines = list[sampler_module.Engine]()
    make = sampler_module.Engine
    monkeypatch.setattr(sampler_module, "Engine", lambda *a, **k: engines.append(make(*a, **k)) or engines[-1])
    changes = [
        f"objective.over={policy}",
        "objective.prompts_per_round=4",
        "objective.answers=8",
        "train.batch_size=32",
        "optim.lr=0.03",
    ]
    changes += ["train.save_every=2", "train.keep=9"]
    runs = [
        blockdiff.train(inputs, [*changes, *more], tmp_path / str(n), reward=ones)
        for n, more in enumerate((["train.steps=8"], ["train.steps=2", "train.micro_batch_size=5"]))
    ]
    assert len(engines) == 4  # two of each run
    one, other = (weights(run, 2) for run in runs)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
    found = [record["reward"] for record in runs[0].records]
    assert min(found[-2:]) > max(found[:2]) + 0.5


def test_equal_rewards_leave_the_weights_unchanged_to_the_bit_and_are_said(inputs, tmp_path, capsys):
    run = blockdiff.train(inputs, ["train.steps=2", "train.save_every=2"], tmp_path / "run", reward=nothing)
    base = checkpoint.load(inputs["model"]["path"], dtype="float32").state_dict()
    assert is_equal({name.removeprefix("model."): x for name, x in weights(run, 2).items()}, dict(base))
    assert [record["groups_without_spread"] for record in run.records] == [1.0, 1.0]
    said = capsys.readouterr().out
    assert said.count("equal rewards, which teach nothing") == 1  # of two rounds
    assert "2 optimiser steps of 6 answers, saved every 2" in said


def test_a_round_shares_no_prefix_with_the_one_before_though_no_weight_has_changed(inputs, tmp_path):
    """So a resumed run encodes what a whole one does."""
    shared = []

    def reward(row: dict[str, Any], result: Result) -> float:
        shared.append(result.cached_tokens)
        return 0.5

    changes = ["objective.prompts_per_round=1", "objective.answers=2", "train.batch_size=2", "train.steps=3"]
    blockdiff.train({**inputs, "data": {"train": [{"prompt": "1" * 150}]}}, changes, tmp_path / "run", reward=reward)
    assert [sorted(shared[first : first + 2]) for first in (0, 2, 4)] == [[0, 128]] * 3


class Watch(blockdiff.Callback):
    """Ends the run in the middle of a step, or takes long between two steps."""

    def __init__(self, lost_in: int = 0, takes: float = 0.0) -> None:
        self.lost_in, self.takes = lost_in, takes

    def on_step(self, trainer: Any) -> None:
        if trainer.step == self.lost_in:
            raise KeyboardInterrupt

    def on_record(self, trainer: Any, record: dict[str, Any]) -> None:
        if record["kind"] == "sample":
            time.sleep(self.takes)


@pytest.mark.parametrize("policy", ["next_token", "canvas"])
def test_a_record_of_a_resumed_run_covers_the_rounds_before_its_checkpoint(inputs, tmp_path, policy):
    """The only record is that of step 4, and the run is lost after the checkpoint of step 2."""
    changes = ["train.log_every=4", "train.save_every=2", "train.keep=9", f"objective.over={policy}"]
    whole = blockdiff.train(inputs, changes, tmp_path / "whole", reward=ones)
    with pytest.raises(KeyboardInterrupt):
        blockdiff.train(inputs, changes, tmp_path / "run", reward=ones, callbacks=[Watch(lost_in=3)])
    again = blockdiff.train(inputs, changes, tmp_path / "run", resume=True, reward=ones)
    [record] = reproducible(whole.records)
    assert reproducible(again.records) == [record] and record["step"] == 4
    exported = consolidate(again.directory / "checkpoints" / "step-4", tmp_path / "exported")
    assert (exported / "model.safetensors").exists()  # though rows and reward were given from Python
    at_end, made = (folder / "blockdiff.json" for folder in (again.directory / "model", exported))
    assert made.read_text() == at_end.read_text() and json.loads(made.read_text())["prompts"] == "raw"


def test_the_time_of_updates_is_without_that_of_evaluations(inputs, tmp_path):
    changes = ["train.log_every=2", "train.steps=2", "train.save_every=0", "evaluation.prompts_every=1"]
    asked = inputs | {"evaluation": {"prompts": inputs["data"]["train"][:1]}}
    run = blockdiff.train(asked, changes, tmp_path / "run", reward=ones, callbacks=[Watch(takes=0.3)])
    [record] = [record for record in run.records if record["kind"] == "train"]
    assert 0 < record["update_seconds"] + record["rollout_seconds"] < record["seconds"] + 1e-2


def rollouts_that_saw(**measured: float) -> Rollouts:
    """Rollouts between two rounds, whose objective has measured this."""
    rollouts = Rollouts.__new__(Rollouts)
    rollouts.ranks, rollouts.shape, rollouts._counted = ALONE, SimpleNamespace(has_kl=True), defaultdict(float)
    rollouts.objective = SimpleNamespace(measured=defaultdict(float, measured))
    return rollouts


def test_what_was_not_measured_is_not_recorded():
    """Means over no action, figures of no round, and sums of a step that was skipped because it was not finite."""
    assert rollouts_that_saw().read(ALONE, 2.0) == {"update_seconds": 2.0}
    seen = rollouts_that_saw(actions=4, surprise=float("nan"), kl=2.0).read(ALONE, 2.0)
    assert seen == {"ratio_clipped": 0, "kl": 0.5, "update_seconds": 2.0}


def test_every_update_has_noise_levels_of_its_own_and_all_ranks_refuse_together(inputs, tmp_path, monkeypatch):
    steps: list[int] = []
    made = Rollouts._batches

    def batches(self: Rollouts, answers: Any, number: int, step: int) -> Any:
        steps.append(step)
        return made(self, answers, number, step)

    monkeypatch.setattr(Rollouts, "_batches", batches)
    changes = ["train.batch_size=3", "train.save_every=0", "objective.sft=1"]
    blockdiff.train(inputs, changes, tmp_path / "run", reward=ones)
    assert steps == [1, 2, 3, 4]
    monkeypatch.setattr(Ranks, "gather_rows", lambda self, mine: [mine, ("rows:9: the prompt cannot be answered", [])])
    with pytest.raises(DataError, match=r"rows:9: .*prompt"):
        blockdiff.train(inputs, changes, tmp_path / "other", reward=ones)


@pytest.mark.parametrize("is_cut", [False, True])
def test_answers_that_were_cut_off_do_not_teach_to_end_there(is_cut):
    collator = Collator(4, 0, 2, 3, StratifiedTime(), AllCanvases())
    own = {"is_cut": is_cut, "advantage": 1}
    rows = [Answer(n, [5, 6], [7] * length, 1, {}, {}, [], **own) for n, length in enumerate((6, 3))]
    batch = examples(rows, collator, 1, 1, 2)
    fills = batch.length_BC - batch.content_BC
    assert fills[batch.length_BC > 0].tolist() == ([0] if is_cut else [0, 2, 1])
    assert int((batch.tokens_BS == 7).sum()) == (4 if is_cut else 9)


def test_samples_of_a_batch_of_canvases_are_its_answers():
    trajectory = [[1, 2]], [[1, 2]], [1, 2]
    rows = [Answer(place, [5, 6], [1, 2], 1, {}, {}, [], [trajectory], advantage=1) for place in (3, 7)]
    assert sample_ids(canvas_batch(rows, Collator(2, 0, 2, 3, StratifiedTime()), 1)) == [3, 7]


def test_prompts_that_a_run_found_good_are_not_tried_by_the_next_unless_it_differs(inputs, tmp_path, monkeypatch):
    tried: list[Any] = []
    prepare = rollouts_module.prepare_sequences
    monkeypatch.setattr(
        rollouts_module, "prepare_sequences", lambda asked, settings: tried.append(asked) or prepare(asked, settings)
    )
    counts = []
    for number, more in enumerate(([], [], ["generation.max_new_tokens=9"], ["data.control_tokens=allow"], [])):
        changes = ["train.steps=1", "train.save_every=0", f"data.cache={tmp_path / 'cache'}", *more]
        before = len(tried)
        blockdiff.train(inputs, changes, tmp_path / f"run{number}", reward=nothing)
        counts.append(len(tried) - before)
    assert counts == [len(ROWS), 0, len(ROWS), len(ROWS), 0]


def test_another_template_of_prompts_is_another_run(inputs, tmp_path):
    rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "digit": "1"} for row in ROWS[:4]]
    asked = inputs | {"data": {"train": rows}}
    for name, text in {"one": "{{ messages[-1]['content'] }}", "other": "{{ messages[-1]['content'] }}1"}.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    changes = ["train.steps=1", "train.save_every=1", f"data.template={tmp_path / 'one.jinja'}"]
    run = blockdiff.train(asked, changes, tmp_path / "run", reward=ones)
    assert (run.directory / "model" / "chat_template.jinja").read_text() == "{{ messages[-1]['content'] }}"
    changes = ["train.steps=2", "train.save_every=1", f"data.template={tmp_path / 'other.jinja'}"]
    with pytest.raises(RunError, match=r"\(data\.train\)"):
        blockdiff.train(asked, changes, tmp_path / "run", resume=True, reward=ones)
    with pytest.raises(DataError, match=r"data\.template: "):
        blockdiff.train(inputs, changes, tmp_path / "other", reward=ones)


def test_prompts_are_known_by_what_they_ask_and_how_they_are_mixed():
    rows = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    sources = [
        [Source(rows=rows, columns={"prompt": "a"})],
        [Source(rows=rows, columns={"prompt": "b"})],
        [Source(rows=rows[:1], columns={"prompt": "a"}), Source(rows=rows[1:], columns={"prompt": "a"})],
        [Source(rows=rows[:1], columns={"prompt": "a"}, weight=2), Source(rows=rows[1:], columns={"prompt": "a"})],
    ]
    assert len({read_prompts(each, is_chat=False, system=None).fingerprint for each in sources}) == 4


def failing(kind: str) -> Callable[..., Any]:
    """A reward that fails for every other answer, in some way."""
    count = itertools.count()

    def reward(row: dict[str, Any], result: Result) -> Any:
        if next(count) % 2:
            return 1.0
        if kind == "late":
            time.sleep(5)
        ways = {"raises": lambda: 1 / 0, "nan": lambda: float("nan"), "late": lambda: 1.0, "exits": sys.exit}
        return (ways | {"huge": lambda: 1e200})[kind]()

    return reward


@pytest.mark.parametrize("kind", ["raises", "nan", "huge", "late", "exits"])
def test_a_reward_that_fails_is_0_and_counted(inputs, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(rewards_module, "TEMPLATE_SECONDS", 0.05)
    run = blockdiff.train(inputs, ["train.steps=1", "train.save_every=1"], tmp_path / "run", reward=failing(kind))
    [record] = run.records
    assert record["reward_failures"] == 3 and record["reward"] == 0.5
    told = {"raises": "ZeroDivisionError", "nan": "no finite number", "late": "TimeoutError", "exits": "SystemExit"}
    told["huge"] = "it gave 1e+200, which is no finite number of at most 1e+12"
    assert "3 of 6 rewards failed and count 0: reward: " in (said := capsys.readouterr().out) and told[kind] in said


def test_a_reward_that_fails_for_all_answers_of_a_round_ends_the_run_with_its_weights_saved(inputs, tmp_path):
    calls = itertools.count()

    def reward(row: dict[str, Any], result: Result) -> float:
        if next(calls) >= 6:
            raise KeyError("answer")
        return 1.0

    changes = ["train.save_every=0"]
    with pytest.raises(DataError, match=r"step 2: the reward reward has failed for all 6 .*KeyError.*saved at step 1"):
        blockdiff.train(inputs, changes, tmp_path / "run", reward=reward)
    assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir()
    resumed = blockdiff.train(inputs, changes, tmp_path / "run", resume=True, reward=mended(reward))
    assert resumed.records[-1]["step"] == 4


def mended(reward: Callable[..., float]) -> Callable[..., float]:
    """A reward that works, recorded as the one that did not."""

    def works(row: dict[str, Any], result: Result) -> float:
        return 1.0

    works.__name__, works.__qualname__ = reward.__name__, reward.__qualname__
    return works


def test_rewards_compute_in_their_own_precision_and_without_gradients(inputs, tmp_path):
    """Of rollouts and of held-out prompts that are drawn under autocast."""
    found = []

    def product(row: dict[str, Any], result: Result) -> torch.Tensor:
        x = torch.full((2, 2), 1 / 3, requires_grad=True) @ torch.full((2, 2), 1.0)
        found.append((x.dtype, x.requires_grad))
        return x[0, 0]

    changes = ["train.autocast=bfloat16", "train.steps=1", "train.save_every=0", "evaluation.prompts_every=1"]
    recipe = inputs | {"evaluation": {"prompts": inputs["data"]["train"][:1]}}
    run = blockdiff.train(recipe, changes, tmp_path / "run", reward=product)
    assert set(found) == {(torch.float32, False)} and len(found) > 6
    assert [record["reward_failures"] for record in run.records if record["kind"] == "train"] == [0]


def test_rewards_are_weighted_tasks_and_functions_of_rows_as_their_files_have_them(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompts = read_prompts([Source(str(tmp_path / "rows.jsonl"))], is_chat=False, system=None)
    made = make_rewards({"sudoku": 2.0, "blockdiff.rl.reward:steps_per_canvas": -0.5}, weighted(ones), prompts.rows)
    row = prompts.rows[3]
    found = made(row, Result(0, ROWS[3]["response"], [], "eos", [2, 4]))
    assert found.values == {"sudoku": 1.0, "blockdiff.rl.reward:steps_per_canvas": 3.0, "ones": 4.0}
    assert found.total == 2.0 - 1.5 + 4.0 and not found.failures
    without = read_prompts([Source(rows=[{"prompt": "1+1="}])], is_chat=False, system=None)
    with pytest.raises(DataError, match=r"^.*exact .*response"):
        make_rewards("exact", (), without.rows)
    for name, said in {"sudokus": "neither a task", "os:nowhere": "cannot be imported", "os:sep": "is a str"}.items():
        with pytest.raises(RecipeError, match=said):
            make_rewards(name, (), prompts.rows)


def test_several_functions_from_python_have_their_weights(inputs, tmp_path):
    def short(row: dict[str, Any], result: Result) -> float:
        return float(len(result.text))

    changes = ["objective.prompts_per_round=1", "objective.answers=2", "train.batch_size=2"]
    given, few = {ones: 1.0, short: -0.25}, [*changes, "train.steps=1", "train.save_every=1"]
    run = blockdiff.train(inputs, few, tmp_path / "run", reward=given)
    [record] = [record for record in run.records if record["kind"] == "train"]
    assert record["reward"] == pytest.approx(record["rewards"]["ones"] - 0.25 * record["rewards"]["short"])
    again = [*changes, "train.steps=2", "train.save_every=1"]
    with pytest.raises(RunError, match="given"):
        blockdiff.train(inputs, again, tmp_path / "run", resume=True, reward={ones: 1.0, short: -0.5})
    assert blockdiff.train(inputs, again, tmp_path / "run", resume=True, reward=given).records[-1]["step"] == 2
    for wrong, said in (
        ({ones: True}, "the weight of ones is True"),
        ({ones: 1e13}, "finite"),
        ({"ones": 1}, "'ones'"),
    ):
        with pytest.raises(RecipeError, match=said):
            blockdiff.train(inputs, changes, tmp_path / "other", reward=wrong)


async def awaited(row: dict[str, Any], result: Result) -> float:
    return 1.0


def changes_its_row(row: dict[str, Any], result: Result) -> float:
    row["digit"] = row["digit"] + "."
    return float(len(row["digit"]))


def test_what_cannot_be_called_as_a_reward_is_refused_before_the_run_and_rows_stay_as_they_are(monkeypatch):
    prompts = read_prompts([Source(rows=ROWS)], is_chat=False, system=None).rows
    refused = {
        "is async": awaited,
        "is not a function of a row and a result: missing a required argument: 'more'": lambda row, result, more: 1.0,
        "too many positional arguments": lambda row: 1.0,
    }
    for said, function in refused.items():
        with pytest.raises(RecipeError, match=said):
            make_rewards(None, weighted(function), prompts)
    monkeypatch.setattr(rewards_module, "ones", ones, raising=False)
    named = f"{rewards_module.__name__}:ones"
    ones.__name__, kept = named, ones.__name__
    try:
        with pytest.raises(RecipeError, match="Python, too"):
            make_rewards(named, weighted(ones), prompts)
    finally:
        ones.__name__ = kept
    made = make_rewards(None, weighted(changes_its_row), prompts)
    assert [made(prompts[0], Result(0, "", [], "eos", [])).total for _ in range(2)] == [2.0, 2.0]


def test_prompts_without_responses_are_evaluated_by_the_reward(inputs, tmp_path, capsys):
    """No response is needed; a task judges where all rows have one, and failures are named."""
    rows = [{"prompt": row["prompt"], "digit": row["digit"]} for row in ROWS[:4]]
    changes = ["train.steps=2", "train.save_every=1", "evaluation.prompts_every=1", "evaluation.best=sample_reward"]
    recipe = inputs | {"evaluation": {"prompts": rows, "prompts_count": 3}}
    run = blockdiff.train(recipe, [*changes, "objective.over=canvas"], tmp_path / "run", reward=ones)
    measured = [record for record in run.records if record["kind"] == "sample"]
    assert [record["step"] for record in measured] == [0, 1, 2]
    texts = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    for record in measured:
        rewards = [text["text"].count("1") for text in texts if text["step"] == record["step"]]
        assert record["sample_reward"] == sum(rewards) / 3 and len(rewards) == record["sample_count"] == 3
        assert "sample_accuracy" not in record
    assert run.report["sample_reward"] == measured[-1]["sample_reward"]
    judged = [row | {"response": "1"} for row in rows[:3]] + [{"prompt": rows[3]["prompt"], "response": "1"}]
    recipe = inputs | {"evaluation": {"prompts": judged, "prompts_count": 4}}
    capsys.readouterr()
    run = blockdiff.train(recipe, ["train.steps=1", "train.save_every=0"], tmp_path / "judged", reward=ones)
    assert run.records[-1]["sample_accuracy"] == 0
    assert "1 of 4 rewards failed and count 0: ones: KeyError: 'digit'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([], [], "rows: no prompts"),
        ([*ROWS[:2], {"prompt": "1x"}], [], "rows:3: .*'x'"),
        (ROWS, ["data.system=Hello"], r"data\.system: "),
        (ROWS, ["generation.max_new_tokens=131060"], "rows:1: .* positions"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_before_the_run(inputs, tmp_path, rows, changes, said):
    with pytest.raises(DataError, match=said):
        blockdiff.train(inputs | {"data": {"train": {"rows": rows}}}, changes, tmp_path / "run", reward=ones)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_sources_are_mixed_by_their_weights(inputs, tmp_path):
    """Of two sources with weights 3 and 1 a round of 8 prompts has about 6 of the first, which has fewer rows."""
    sources = [{"rows": ROWS[:2], "weight": 3.0}, {"rows": ROWS[2:], "weight": 1.0}]
    seen: list[str] = []

    def reward(row: dict[str, Any], result: Result) -> float:
        seen.append(row["prompt"])
        return 0.0

    changes = [
        "objective.prompts_per_round=8",
        "objective.answers=2",
        "train.batch_size=16",
        "train.steps=3",
        "train.save_every=0",
    ]
    blockdiff.train(inputs | {"data": {"train": sources}}, changes, tmp_path / "run", reward=reward)
    first = {row["prompt"] for row in ROWS[:2]}
    assert len(seen) == 48 and 28 <= sum(prompt in first for prompt in seen) <= 44


def test_conversations_are_asked_without_their_last_answer():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    watched = []
    watch = lambda rows: (watched.append(row) or row for row in rows)  # noqa: E731
    [found] = read_prompts([Source(rows=[{"messages": turns}])], is_chat=False, system="c", watch=watch).rows
    assert len(watched) == 1
    assert found.question.prompt == ({"role": "system", "content": "c"}, turns[0])
    assert found.question.reference == "b" and found.value == {"messages": turns}


def test_advantages_sum_to_zero_and_have_the_mean_of_the_others_as_their_baseline():
    rewards = [1.0, 0.25, 0.0, 0.5]
    centred = advantages(rewards, "centred")
    others = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert centred == pytest.approx(others) and sum(centred) == pytest.approx(0)
    standardised = torch.tensor(advantages(rewards, "standardised"))
    assert float(standardised.std()) == pytest.approx(1, abs=1e-3)
    assert advantages([0.1] * 3, "standardised") == [0.0] * 3


POLICY = {"kind": "policy", "over": "canvas", "reward": "sudoku"}
RL = {"objective": POLICY, "model": {"path": "a", "preset": None}, "lora": {}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {}}, "random weights"),
        ({"train": {"steps": 4, "batch_size": 7}}, r"train\.batch_size: 7 .*128"),
        ({"train": {"steps": None, "epochs": 1, "batch_size": 128}}, r"train\.epochs: "),
        ({"objective": {"kind": "policy", "over": "next_token"}}, r"objective\.reward: missing"),
        (
            {"objective": POLICY | {"reward": {"sudoku": float("nan")}}},
            r"objective\.reward\.sudoku: .*finite",
        ),
        ({"objective": POLICY | {"reward": {"sudoku": 1e308, "exact": 1e308}}}, r"objective\.reward\.sudoku: "),
        ({"objective": POLICY | {"corruption": "mask"}}, r"objective\.corruption: uniform"),
        (
            {"objective": POLICY | {"prediction": "leave_one_out"}},
            r"objective\.prediction: posterior",
        ),
        ({"model": {"path": "a", "preset": None, "images": "frozen"}}, r"model\.images: "),
        ({"lora": {"rank": 4, "dropout": 0.1}}, r"lora\.dropout: "),
        ({"objective": POLICY | {"kl": 0.1}}, "without its adapters"),
        (
            {"objective": POLICY | {"signal": "through"}, "parallel": {"shard": "full"}},
            "one device",
        ),
        (
            {"objective": POLICY | {"passes": 2}, "train": {"steps": 3, "batch_size": 128}},
            r"train\.steps: 3 ",
        ),
        ({"data": {"train": "a", "max_length": 8}}, r"data\.max_length: "),
        ({"data": {"train": "a", "on_bad_row": "skip"}}, r"data\.on_bad_row: "),
    ],
)
def test_a_recipe_that_cannot_be_reinforced_is_refused(sections, said):
    with pytest.raises(RecipeError, match=said):
        refuse(recipe(**{"train": {"steps": 4, "batch_size": 128}} | RL | sections))


def test_a_step_is_a_round_where_the_recipe_does_not_say_its_batch():
    sections = {"model": {"path": "a"}, "data": {"train": "a"}, "train": {"steps": 4}}
    assert Recipe(**sections, objective=POLICY | {"prompts_per_round": 3}).train.batch_size == 24
    with pytest.raises(RecipeError, match=r"train\.batch_size: missing"):
        Recipe(**sections)


@pytest.mark.parametrize(
    ("policy", "strategy", "said"),
    [
        ("next_token", "next_token:temperature=0", "greedy"),
        ("next_token", "next_token:temperature=1,top_k=3", "top_k, top_p and min_p"),
        ("next_token", "entropy_bound", "head"),
        ("canvas", "confident", "what it draws"),
        ("canvas", "quota", "what it draws"),
        ("canvas", "next_token", "what it draws"),
        ("canvas", "entropy_bound:top_p=0.9", "top_k, top_p and min_p"),
    ],
)
def test_a_strategy_whose_draws_are_not_the_policy_s_is_refused(inputs, tmp_path, policy, strategy, said):
    with pytest.raises(RecipeError, match=said):
        blockdiff.train(
            inputs, [f"objective.over={policy}", f"objective.strategy={strategy}"], tmp_path / "run", reward=ones
        )


def test_verified_canvases_draw_the_head_s_answers(inputs, tmp_path, monkeypatch):
    """The very tokens of next-token sampling; what stood of the drafts is the agreement."""
    drawn: list[list[list[int]]] = []
    answers = Rollouts._answers

    def kept(self: Rollouts, number: int) -> Any:
        found = answers(self, number)
        drawn.append([answer.tokens for answer in found])
        return found

    monkeypatch.setattr(Rollouts, "_answers", kept)
    for strategy in ("next_token:temperature=1", "verified:temperature=1"):
        changes = [f"objective.strategy={json.dumps(strategy)}", "train.steps=1", "train.save_every=1"]
        run = blockdiff.train(inputs, changes, tmp_path / strategy[:4], reward=ones)
    assert drawn[0] == drawn[1] and len(drawn[0]) == 6
    assert 0 <= run.records[0]["agreement"] < 1


def test_train_and_inspect_run_a_policy(inputs, tmp_path):
    rows, run, rl = (tmp_path / name for name in ("rows.jsonl", "run", "rl.yaml"))
    rows.write_text("".join(json.dumps(row) + "\n" for row in inputs["data"]["train"]))
    asked = inputs | {"data": {"train": str(rows)}, "objective": inputs["objective"] | {"reward": "sudoku"}}
    rl.write_text(json.dumps(asked))
    wrong = command("train", rl, "-o", run, "--set", "objective.reward=nope")
    assert "objective.reward: 'nope' is neither a task" in wrong.stderr
    assert "model  " not in wrong.stdout  # no weights are read
    said = works("inspect", rl, "--step", 2)
    assert "round 2: 2 prompts with 3 answers each" in said and said.count("prompt    ") == 2
    one_step = "--set", "train.steps=1", "--set", "train.save_every=1", "--set", "objective.signal=through"
    assert "objective.signal has no effect: it needs objective.over: canvas" in works("train", rl, "-o", run, *one_step)
    assert (run / "model" / "config.json").exists()
