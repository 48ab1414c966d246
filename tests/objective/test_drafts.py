"""A drafter's objective: loss and gradients against plain fp64, what is scored, and how its figures are counted."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.canvas import Batch, joined
from blockdiff.data.canvas_choice import RandomCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.draft_objective import DraftObjective
from blockdiff.kernels import IN_TORCH
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.drafted import with_features
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.kinds.drafter_heldout import heldout_drafts
from tests.oracles import dflash as plain
from tests.support.closeness import require_close
from tests.support.drafters import drafter_for, drafter_values, hub_weights
from tests.support.families import small_model

ALONE = Ranks(torch.device("cpu"))


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    found = []
    for sample in range(count):
        prompt, length = rng.randint(1, 5), rng.randint(2, 12)
        tokens = [rng.randint(6, 90) for _ in range(prompt + length + 3)]
        found.append(Example(sample, tokens, [(prompt, prompt + length)]))
    return found


def collator(block: int, anchors: int = 4) -> Collator:
    return Collator(block, 0, 2, 3, StratifiedTime(), RandomCanvases(anchors), are_blocks=True)


def batch_of(block: int, anchors: int = 4, packed: bool = False) -> Batch:
    made, some = collator(block, anchors), examples(5)
    rows = made.rows(some, epoch=1, step=1, slots=range(5), total_slots=5)
    return made.lay_out([joined(rows[:3]), joined(rows[3:])] if packed else rows)


def test_blocks_begin_at_random_tokens_of_responses_and_their_masks_alone_are_scored():
    batch, some = batch_of(4), examples(5)
    for row, example in enumerate(some):
        (start, end), present = example.responses[0], batch.length_BC[row] > 0
        anchors = batch.start_BC[row][present].tolist()
        assert len(anchors) == len(set(anchors)) == min(4, end - start - 1)
        assert all(start <= anchor < end - 1 for anchor in anchors)
        for place, anchor in enumerate(anchors):
            block = example.tokens[anchor : min(anchor + 4, end)]
            assert batch.canvas_BCL[row, place, : len(block)].tolist() == block
            scored, rest = [True] * (len(block) - 1), [False] * (4 - len(block))
            assert batch.is_scored_BCL[row, place].tolist() == [False, *scored, *rest]
    assert not batch.is_ar_scored_BS.any()
    other = collator(4).rows(some, epoch=2, step=1, slots=range(5), total_slots=5)
    assert [c.start for row in other for c in row.canvases] != batch.start_BC[batch.length_BC > 0].tolist()
    start, end = some[0].responses[0]
    [row] = collator(4, 99).rows(some[:1], epoch=1, step=1, slots=[0], total_slots=1)
    assert [block.start for block in row.canvases] == list(range(start, end - 1))


def test_examples_count_alike_where_losses_are_means_over_examples():
    made, some = replace(collator(4), normalisation="example"), examples(5)
    batch = made(some, epoch=1, step=1, slots=range(5), total_slots=5)
    counts = (batch.is_scored_BCL.sum(-1) * batch.weight_BC).sum(-1)
    assert counts.tolist() == pytest.approx([1.0] * 5)


def plainly(objective: DraftObjective, batch: Batch, weights: dict[str, Tensor]) -> Tensor:
    """The loss, block by block, with the drafter of the oracle and features of a row that ends before the anchor."""
    target, drafter = objective.target, objective.model
    table, head = target.vocabulary.table, target.vocabulary.output_weights()
    L, total, ids = drafter.canvas_length, torch.zeros((), dtype=torch.float64), drafter.target_layers
    for row, block in (batch.length_BC > 0).nonzero().tolist():
        first, anchor = int(batch.doc_start_BC[row, block]), int(batch.start_BC[row, block])
        clean = batch.tokens_BS[row, first:]
        spans = {name: kind.encode_spans(torch.zeros_like(clean[None])) for name, kind in target.kinds.items()}
        with torch.no_grad():
            shown = target(clean[None], torch.arange(len(clean))[None], spans, shown=ids)[0][0]
        hidden, features = with_features(shown, len(ids))
        tokens = batch.canvas_BCL[row, block]
        noisy = F.embedding(torch.tensor([int(tokens[0]), *[5] * (L - 1)]), table).detach()
        logits = F.linear(plain.block_hidden(weights, drafter.config, features[: anchor - first], noisy), head.detach())
        losses, confidences = [], []
        for k in range(1, L):
            if not batch.is_scored_BCL[row, block, k]:
                break
            if objective.targets == "tokens":
                loss = -logits[k].log_softmax(-1)[tokens[k]]
            else:
                given = F.linear(hidden[anchor - first + k - 1], head).detach().log_softmax(-1)
                loss = (given.exp() * (given - logits[k].log_softmax(-1))).sum()
            losses.append(loss)
            confidences.append(0.5 + 0.5 * torch.exp(-loss.detach()))
        reached = torch.stack(confidences).cumprod(0)
        for k, loss in enumerate(losses):
            decay = math.exp(-k / 4)
            total = total + (reached[k:].sum() if objective.loss == "dpace" else decay) * loss
    return total


@pytest.mark.parametrize("number", range(4))
def test_loss_and_gradients_are_those_of_a_plain_reference(number):
    rng = random.Random(number)
    target = small_model("qwen3" if number % 2 else "llama")
    drafter = drafter_for(target, drafter_values(target.config, rng), seed=number)
    loss, targets = ("dpace", "decay")[number // 2], ("tokens", "distribution")[number % 2]
    objective = DraftObjective(drafter.requires_grad_(True), target, loss, targets)
    batch = batch_of(drafter.canvas_length, packed=number > 1)
    found = objective(batch)
    assert found.keys() == {"draft"}
    found["draft"].backward()
    names = dict(zip(hub_weights(drafter), drafter.state_dict(), strict=True))
    weights = {hub: drafter.get_parameter(name).detach().clone().requires_grad_() for hub, name in names.items()}
    truth = plainly(objective, batch, weights)
    truth.backward()
    require_close(found["draft"], truth, 1e-10)
    for hub, name in names.items():
        require_close(drafter.get_parameter(name).grad, weights[hub].grad, 1e-9)
    assert all(parameter.grad is None for parameter in target.parameters())


def test_divergences_and_their_gradient_with_a_cap_on_logits():
    vocabulary = Vocabulary(50, 8, 3.0, IN_TORCH, scale=1.0).double()
    torch.nn.init.normal_(vocabulary.table)
    vocabulary.requires_grad_(False)
    hidden, given = (torch.randn(7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, own = vocabulary.divergence(hidden, given), hidden.detach().clone().requires_grad_()
    log_q, log_p = (vocabulary.logits(x).log_softmax(-1) for x in (own, given.detach()))
    truth = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    require_close(found, truth, 1e-12)
    weight = torch.rand(7, dtype=torch.float64)
    (found * weight).sum().backward()
    (truth * weight).sum().backward()
    require_close(hidden.grad, own.grad, 1e-12)
    assert given.grad is None and not vocabulary.divergence(hidden, hidden).abs().max() > 1e-12


@pytest.mark.parametrize("size", [50, 50_000])
def test_divergences_reach_a_table_that_trains(size):
    torch.manual_seed(size)
    vocabulary = Vocabulary(size, 8, 3.0, IN_TORCH).double()
    torch.nn.init.normal_(vocabulary.table)
    hidden, given = (torch.randn(201, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight_N = torch.rand(201, dtype=torch.float64)
    log_p = vocabulary.logits(given).log_softmax(-1).detach()
    truth = F.kl_div(vocabulary.logits(hidden).log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1)
    found = vocabulary.divergence(hidden, given)
    require_close(found, truth, 1e-12)
    for mine, its in zip(
        *(torch.autograd.grad((x * weight_N).sum(), (hidden, vocabulary.table)) for x in (found, truth)), strict=True
    ):
        require_close(mine, its, 1e-12)


def test_held_out_figures_count_places_and_what_would_stand():
    target = small_model("qwen3")
    drafter = drafter_for(target, drafter_values(target.config, block_size=4))
    objective = DraftObjective(drafter, target)
    batches = [batch_of(4), batch_of(4, packed=True)]
    record = heldout_drafts(objective, batches, ALONE)
    right, lengths = [[], [], []], []
    for batch in batches:
        found = objective.evaluate(batch)
        for row, block in (batch.length_BC > 0).nonzero().tolist():
            scored, hits = (x[row, block, 1:].tolist() for x in (batch.is_scored_BCL, found.is_correct_BCL))
            for place in range(3):
                right[place] += [hits[place]] * scored[place]
            if all(scored):
                lengths.append(1 + next((n for n, hit in enumerate(hits) if not hit), 3))
    flat = [hit for hits in right for hit in hits]
    assert record["heldout_places"] == pytest.approx([sum(hits) / len(hits) for hits in right])
    assert record["heldout_draft_accuracy"] == pytest.approx(sum(flat) / len(flat))
    assert record["heldout_accepted_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert heldout_drafts(objective, [], ALONE) == {}
    nothing = replace(batches[0], is_scored_BCL=torch.zeros_like(batches[0].is_scored_BCL))
    assert float(objective(nothing)["draft"].detach()) == 0
