"""Prompts sampled during training: figures, texts, and a training state that stays as it was."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from blockdiff.checkpoint import init
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import Order
from blockdiff.data.rows import Row
from blockdiff.data.step_batches import heldout_batches, micro_batches
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, UniformTime
from blockdiff.errors import DataError
from blockdiff.evals import task
from blockdiff.metrics import METRICS, SAMPLES, MetricsLog, read
from blockdiff.objective import Objective, evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted
from blockdiff.sampling import Generation, Sampler
from blockdiff.training.kinds.canvas_heldout import heldout
from blockdiff.training.samples import sample_prompts
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.scripted_sampler import ScriptedSampler
from tests.support.toy_trainer import Options, train

pytestmark = pytest.mark.quick

ALONE = Ranks(torch.device("cpu"))
EXACT = task("exact")
LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
ROWS = [Row(f"f:{place}", prompt="abc"[: 1 + place % 3], response="defgh"[place:]) for place in range(5)]
ANSWERS = [("defgh", [4]), ("no", [2, 6]), ("fgh", [2]), (None, []), ("h", [1])]


def test_the_record_has_accuracy_and_steps_and_the_texts_are_the_first_few():
    sampled = sample_prompts(ScriptedSampler(LETTERS, ANSWERS), ROWS, EXACT, ALONE)
    assert all(METRICS[key].kind == "sample" for key in sampled.record)
    seconds = sampled.record.pop("sample_seconds")
    assert sampled.record == {
        "sample_accuracy": 3 / 5,
        "sample_steps_per_canvas": (4 + 2 + 6 + 2 + 1) / 5,
        "sample_max_steps": 48,
        "sample_tokens_per_forward": (6 + 3 + 4 + 2) / 15,
        "sample_count": 5,
        "sample_errors": 1,
    }
    assert seconds >= 0
    assert [(text["text"], text["is_solved"]) for text in sampled.texts[:2]] == [("defgh", True), ("no", False)]


def test_rows_are_dealt_to_the_ranks_and_every_rank_has_all_answers_in_order():
    together, answers = threading.Barrier(3), [None] * 3

    class Rank(Ranks):
        """One of three ranks, each in a thread of its own."""

        def gather(self, value):
            answers[self.rank] = value
            together.wait(timeout=600)
            return list(answers)

        def at_own_pace(self, doing):
            return ALONE.at_own_pace(doing)

    samplers = [ScriptedSampler(LETTERS, ANSWERS) for _ in range(3)]

    def of_rank(rank):
        return sample_prompts(samplers[rank], ROWS, EXACT, Rank(ALONE.device, rank, 3))

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(of_rank, range(3)))
    alone = sample_prompts(ScriptedSampler(LETTERS, ANSWERS), ROWS, EXACT, ALONE)
    for rank in ranks:
        assert rank.texts == alone.texts
        assert {**rank.record, "sample_seconds": 0} == {**alone.record, "sample_seconds": 0}
    assert [[request.id for request in sampler.requests] for sampler in samplers] == [[0, 3], [1, 4], [2]]
    # Of all rows, not of a rank's own.
    assert {sampler.asked["max_new_tokens"] for sampler in samplers} == {6}


@pytest.fixture(scope="module")
def sampler():
    config = tiny_config(canvas_length=8, **TWO_LAYERS)
    model = init(config, seed=3, dtype="float64", device="cpu", kernels="torch")
    return Sampler(model, LETTERS, Generation(max_steps=4, eos_ids=(1,)))


def test_training_goes_on_as_if_nothing_had_been_sampled(sampler):
    model = sampler.model
    model.train()
    model.layers[1].eval()  # a part that its owner keeps in eval mode
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    modes = [part.training for part in model.modules()]
    generator = torch.get_rng_state()
    sample_prompts(sampler, ROWS, EXACT, ALONE, batch_size=2)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [p.grad is not None for p in model.parameters()] == [True] + [False] * (len(before) - 1)
    assert all(p.requires_grad or "router" in name for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    model.zero_grad()


def test_a_run_that_evaluates_and_samples_ends_with_the_same_weights_to_the_bit():
    def trained(looks: bool):
        config = tiny_config(canvas_length=8, num_hidden_layers=1, layer_types=["full_attention"])
        model = init(config, seed=3, dtype="float32", device="cpu", kernels="torch")
        objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=1)
        optimiser = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-2)
        examples = [Example(n, [2, *range(3 + n, 14 + n)], [(3, 12)]) for n in range(4)]
        collator = Collator(8, pad_id=0, fill_id=1, seed=0, time=UniformTime(1e-4))
        order = Order(4, 4, 0)
        sampler = Sampler(model, LETTERS, Generation(max_steps=2, eos_ids=(1,)))
        records: list = []
        train(
            objective,
            optimiser,
            lambda _: 1e-2,
            lambda step: micro_batches(examples, order, collator, step),
            Options(3, log_every=1, eval_every=1, sample_every=1),
            ALONE,
            log=records.append,
            evaluate=(lambda _: heldout(objective, heldout_batches(examples, collator, 2), ALONE)) if looks else None,
            sample=(lambda _: sample_prompts(sampler, ROWS[:2], EXACT, ALONE).record) if looks else None,
        )
        return model.state_dict(), [record["loss"] for record in records if "loss" in record]

    (watched, losses), (alone, expected) = trained(True), trained(False)
    assert losses == expected and len(losses) == 3
    assert all(torch.equal(watched[name], alone[name]) for name in alone)


def test_the_model_is_in_eval_mode_while_it_samples_and_back_after_a_failure():
    scripted = ScriptedSampler(LETTERS, ANSWERS)
    sample_prompts(scripted, ROWS, EXACT, ALONE)
    assert scripted.was_training is False and scripted.model.training
    with pytest.raises(IndexError):
        sample_prompts(ScriptedSampler(LETTERS, []), ROWS, EXACT, ALONE)
    with pytest.raises(ZeroDivisionError), evaluating(scripted.model):
        assert not torch.is_grad_enabled()
        1 / 0  # noqa: B018
    assert scripted.model.training and torch.is_grad_enabled()


def test_texts_do_not_depend_on_the_batch_and_change_with_the_seed(sampler):
    together = sample_prompts(sampler, ROWS, EXACT, ALONE, seed=1)
    apart = sample_prompts(sampler, ROWS, EXACT, ALONE, seed=1, batch_size=2)
    assert apart.texts == together.texts
    other = sample_prompts(sampler, ROWS, EXACT, ALONE, seed=2)
    assert [text["text"] for text in other.texts] != [text["text"] for text in together.texts]


def test_rows_of_another_task_are_refused_before_anything_is_sampled():
    scripted = ScriptedSampler(LETTERS, ANSWERS)
    with pytest.raises(DataError, match=r"f:0: .*sudoku"):
        sample_prompts(scripted, ROWS, task("sudoku"), ALONE)
    assert not scripted.requests


def test_texts_are_kept_by_step_and_cut_back_on_resume(tmp_path):
    log = MetricsLog(tmp_path / SAMPLES)
    for step in (10, 20):
        for text in sample_prompts(ScriptedSampler(LETTERS, ANSWERS), ROWS, EXACT, ALONE).texts[:3]:
            log.append({"step": step, **text})
    assert [record["step"] for record in read(log.path)] == [10] * 3 + [20] * 3
    log.cut(10)
    kept = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(record["step"], record["text"]) for record in kept] == [(10, "defgh"), (10, "no"), (10, "fgh")]


def test_a_signal_is_looked_for_after_every_canvas(sampler):
    asked = []

    def is_stopping():
        asked.append(1)
        return 15 * (len(asked) == 3)

    with pytest.raises(Interrupted):
        sample_prompts(sampler, ROWS, EXACT, replace(ALONE, is_stopping=is_stopping), batch_size=1)
    assert len(asked) == 3
