"""Step distillation: states of the sampler's own way are denoised, and scored by where it settled."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import blockdiff
from blockdiff import checkpoint
from blockdiff.canvas import Batch, joined
from blockdiff.data.canvas_choice import FirstCanvases
from blockdiff.data.example import Example
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import DataError, RecipeError, RunError
from blockdiff.metrics import reproducible
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import Generation, Recorder, Request, Sampler
from blockdiff.sampling.trace import Trace
from blockdiff.seeding import Stream, words
from blockdiff.training import step
from blockdiff.training.kinds.distil import Settled
from blockdiff.training.recipe_checks import refuse
from blockdiff.training.step import UnscoredSteps
from tests.support.closeness import relative_error
from tests.support.distil_ranks import COLLATOR, EXAMPLES, GENERATION, SEED, L, everything, no_rows, sampler
from tests.support.families import small_model
from tests.support.forked import run_ranks
from tests.support.little_model import LITTLE, save_preset
from tests.training.test_refuse import recipe

ALONE = Ranks(torch.device("cpu"))


def traced(sampler: Sampler, batch: Batch, place: tuple[int, int]) -> Trace:
    """The trace of a sampler's answer to what stands before a canvas, with the draws of its rollout."""
    high, low = words(SEED, Stream.ROLLOUT, tuple(batch.address_BC3[place].tolist()), 2).tolist()
    prompt = batch.tokens_BS[place[0], : batch.start_BC[place]].tolist()
    recorder = Recorder()
    request = Request(0, tokens=prompt, seed=(high << 32) | low, max_new_tokens=1)
    sampler.generate([request], on_step=recorder.step, on_canvas=recorder.canvas)
    return recorder.traces[0]


def test_states_are_those_that_the_sampler_visits_and_targets_those_on_which_the_teacher_settles():
    student, teacher = sampler(), sampler(seed=4)
    batch = COLLATOR(EXAMPLES, epoch=1, step=1, slots=range(9), total_slots=9)
    [made] = Settled(no_rows, student, teacher, SEED).distilled([batch])
    model, settled, steps, loss = student.model, 0, set(), torch.zeros((), dtype=torch.float64)
    for place in map(tuple, (batch.length_BC > 0).nonzero().tolist()):
        of_student, of_teacher = traced(student, batch, place), traced(teacher, batch, place)
        is_settled = of_teacher.canvases[0].steps < GENERATION.max_steps
        assert made.is_scored_BCL[place].tolist() == [is_settled] * L
        if not is_settled:
            continue
        assert made.canvas_BCL[place].tolist() == of_teacher.canvases[0].tokens
        [step] = [step for step in of_student.steps if step.tokens == made.visited.tokens_BCL[place].tolist()]
        signal_LD = made.visited.signal_BCLD[place]
        assert bool(signal_LD.any()) == (step.step > 0)
        prefix = model.encode(batch.tokens_BS[place[0] : place[0] + 1, : batch.start_BC[place]])
        logits_LV = model.unembed(model.denoise(torch.tensor([step.tokens]), prefix, signal_LD[None]))[0].detach()
        entropy_L = torch.distributions.Categorical(logits=logits_LV / step.temperature).entropy()
        torch.testing.assert_close(entropy_L, torch.tensor(step.entropy), rtol=1e-5, atol=1e-5, check_dtype=False)
        loss += F.cross_entropy(logits_LV.double(), made.canvas_BCL[place], reduction="sum")
        settled += 1
        steps.add(step.step)
    assert 0 < settled < (batch.length_BC > 0).sum() and len(steps) > 1
    for sweep in (False, True):
        objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), sweep=sweep)
        torch.testing.assert_close(objective(made)["canvas"].double(), loss, rtol=1e-6, atol=0)


def test_canvases_of_a_packed_row_are_rolled_out_after_their_own_document():
    rows = COLLATOR.rows(EXAMPLES[:3], epoch=1, step=1, slots=range(3), total_slots=3)
    distil = Settled(no_rows, sampler(), sampler(seed=4), SEED)
    [alone, packed] = distil.distilled([COLLATOR.lay_out(rows), COLLATOR.lay_out([joined(rows)])])
    is_there = alone.length_BC > 0
    assert torch.equal(alone.canvas_BCL[is_there], packed.canvas_BCL[0])
    assert torch.equal(alone.visited.tokens_BCL[is_there], packed.visited.tokens_BCL[0])


def test_a_prompts_tail_stands_in_the_canvas_that_is_rolled_out():
    model = small_model("qwen3 sliding, blocks", dtype=torch.float32)
    student = Sampler(model, None, Generation(max_steps=6, max_new_tokens=4, stability=0, confidence=9.0))
    examples = [Example(n, [*range(3, 12 + n)], [(5 + n, 12 + n)]) for n in range(4)]
    collate = replace(COLLATOR, canvas_length=4, aligned=True, canvases=FirstCanvases(1))
    batch = collate(examples, epoch=1, step=1, slots=range(4), total_slots=4)
    [made] = Settled(no_rows, student, student, SEED).distilled([batch])
    assert batch.is_pinned_BCL.sum(-1)[:, 0].tolist() == [1, 2, 3, 0]
    for row in range(4):
        high, low = words(SEED, Stream.ROLLOUT, tuple(batch.address_BC3[row, 0].tolist()), 2).tolist()
        prompt, tail = examples[row].tokens[: 5 + row], [1, 2, 3, 0][row]
        request = Request(0, tokens=prompt, seed=(high << 32) | low, max_new_tokens=4 - tail)
        expected = prompt[len(prompt) - tail :] + student.generate([request])[0].tokens
        assert made.canvas_BCL[row, 0].tolist() == expected
        assert made.visited.tokens_BCL[row, 0, :tail].tolist() == expected[:tail]
        assert made.is_scored_BCL[row, 0].tolist() == [False] * tail + [True] * (4 - tail)
    assert not Objective(model, Linear(), UniformCorruption(96))._corrupted(made)[1][batch.is_pinned_BCL].any()
    elsewhere = replace(batch, is_pinned_BCL=batch.is_pinned_BCL.flip(-1))
    with pytest.raises(DataError, match="pinned"):
        Settled(no_rows, student, student, SEED).distilled([elsewhere])


def test_two_processes_train_as_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    everything(ALONE, one)
    run_ranks(2, everything, two)
    expected = load_file(one / "0.safetensors")
    for rank in range(2):
        found = load_file(two / f"{rank}.safetensors")
        assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-10


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A recipe that distils a little checkpoint with random weights, which is asked to be sure of little."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = character_tokenizer(alphabet(4))
    blocks = {"moe_intermediate_size": 16}  # of weights in four bits
    save_preset(folder / "base.json", {**LITTLE, "text_config": {**LITTLE["text_config"], **blocks}})
    generation = Generation(stability=0, confidence=0.9, t_max=0.04, t_min=0.02, entropy_bound=1.0, max_steps=4)
    model = checkpoint.init(str(folder / "base.json"), seed=3)
    checkpoint.save(model, folder / "base", tokenizer=tokenizer, generation=generation)
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": "none",
        "data": {"train": make_splits(4, {"train": 24}, seed=0)["train"], "cache": str(folder / "cache")},
        "objective": {"kind": "distil"},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": 4, "batch_size": 6, "micro_batch_size": 4, "log_every": 1, "save_every": 2},
    }


class Lost(blockdiff.Callback):
    """Ends a run in its third step."""

    def on_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            raise KeyboardInterrupt


class Keeping(blockdiff.Callback):
    """Keeps the weights of the end of a run."""

    def on_end(self, trainer: Any) -> None:
        self.weights = {name: x.clone() for name, x in trainer.built.model.state_dict().items()}


@pytest.mark.parametrize(("lora", "quantize"), [("none", None), ({"rank": 2}, "nvfp4")])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(inputs, tmp_path, lora, quantize):
    asked = inputs | {"lora": lora, "model": inputs["model"] | {"quantize": quantize}}
    keeping = Keeping()
    whole = blockdiff.train(asked, ["train.log_every=4"], tmp_path / "whole", callbacks=[keeping])
    with pytest.raises(KeyboardInterrupt):
        blockdiff.train(asked, ["train.log_every=4"], tmp_path / "run", callbacks=[Lost()])
    again = blockdiff.train(asked, ["train.log_every=4"], tmp_path / "run", resume=True)
    one, other = (load_file(run.directory / "checkpoints" / "step-4" / "model.safetensors") for run in (whole, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    [record] = reproducible(whole.records)  # of all four steps, two of which were before the checkpoint
    assert reproducible(again.records) == [record] and 0 < record["rollout_settled"] < 1
    base = checkpoint.load(inputs["model"]["path"], quantize=quantize).state_dict()
    changed = {name for name in base if not torch.equal(base[name], keeping.weights.get(name, base[name]))}
    assert bool(changed) == (lora == "none")
    assert (lora == "none") or all("lora" in name for name in one)


def test_a_run_whose_teacher_settles_on_nothing_says_so_at_once_and_ends(inputs, tmp_path, capsys, monkeypatch):
    teacher = tmp_path / "teacher"
    shutil.copytree(inputs["model"]["path"], teacher)
    settings = json.loads((teacher / "generation_config.json").read_text())
    (teacher / "generation_config.json").write_text(json.dumps(settings | {"confidence_threshold": 1e-9}))
    asked = inputs | {"objective": {"kind": "distil", "teacher": str(teacher)}}
    monkeypatch.setattr(step, "MAX_UNSCORED", 2)
    with pytest.raises(RunError, match=r"step 2: no canvas .*2 steps.*max_denoising_steps"):
        blockdiff.train(asked, ["train.steps=4"], tmp_path / "run")
    said = [line for line in capsys.readouterr().out.splitlines() if "learns nothing" in line]
    assert len(said) == 1 and said[0].startswith("note      step 1: no canvas is scored")


def test_steps_in_which_nothing_is_scored_end_a_run_of_any_objective_when_there_are_many_in_a_row():
    nothing, something = ("nothing is scored", "look at the rows"), None
    unscored = UnscoredSteps(steps=100)
    said = [unscored.note(number, nothing) for number in range(1, 20)] + [unscored.note(20, something)]
    assert said[0].startswith("step 1: nothing is scored") and said[1:] == [None] * 19
    for number in range(21, 40):
        unscored.note(number, nothing)
    with pytest.raises(RunError, match=r"step 40: .*20 steps"):
        unscored.note(40, nothing)


DISTIL = {"objective": {"kind": "distil"}, "model": {"path": "a", "preset": None}, "lora": {}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {}}, "random weights"),
        ({"parallel": {"shard": "full"}}, "whole model"),
        ({"model": {"path": "a", "preset": None, "images": "frozen"}}, "images"),
        ({"objective": {"kind": "distil", "weight": "elbo"}}, r"unknown key objective\.weight"),
        ({"objective": {"kind": "distil", "prediction": "posterior"}}, r"objective\.kind: canvas or policy"),
    ],
)
def test_a_recipe_that_cannot_be_distilled_is_refused(sections, said):
    with pytest.raises(RecipeError, match=said):
        refuse(recipe(**DISTIL | sections))


def test_a_teacher_must_have_the_same_tokens(inputs, tmp_path):
    other = tmp_path / "other"
    checkpoint.save(
        checkpoint.init(inputs["model"]["path"] + ".json", seed=3), other, tokenizer=character_tokenizer("abc")
    )
    with pytest.raises(RecipeError, match=r"objective\.teacher: .*tokens"):
        blockdiff.train(inputs, [f"objective.teacher={other}"], tmp_path / "run")


def test_a_canvas_with_nothing_before_it_is_refused():
    batch = COLLATOR([replace(EXAMPLES[0], responses=[(0, 13)])], epoch=1, step=1, slots=[0], total_slots=1)
    with pytest.raises(DataError, match=r"data\.train: .*empty"):
        Settled(no_rows, sampler(), sampler(), SEED).distilled([batch])
