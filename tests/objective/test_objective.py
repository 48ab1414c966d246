"""The objective against autograd through transformers' model, canvas by canvas; what runs, what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.diffusion_gemma.names import NAMES
from blockdiff.objective import Losses, Objective
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config

L, V = 8, 384
SEED = 5
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def pair() -> tuple[DiffusionGemmaForBlockDiffusion, DiffusionGemma]:
    model = oracle(tiny_config(canvas_length=L, **TWO_LAYERS))
    return model, ours(model)


def objective_of(model: DiffusionGemma, seed: int = SEED) -> Objective:
    return Objective(model, Linear(), UniformCorruption(V), seed)


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(coin: Callable[[int], bool] = lambda n: n % 2 == 0) -> list[CleanRow]:
    """Unequal prompts longer and shorter than the window (16), several canvases, two documents in one row."""
    numbers = iter(range(100))

    def canvas(sample: int, row: list[int], start: int, doc: int = 0, length: int | None = None) -> Canvas:
        n = next(numbers)
        filled = [*row[start : start + L], *[1] * L][:L]
        return Canvas(filled, start, doc, length, 0.15 + 0.1 * n, coin(n), address=(0, sample, start))

    a, b, c, d = tokens(41, 1), tokens(2, 2), tokens(40, 3), tokens(27, 4)
    return [
        CleanRow(a, [canvas(0, a, 20), canvas(0, a, 28), canvas(0, a, 36)], 0),
        CleanRow(b, [canvas(1, b, 1)], 1),
        CleanRow(c, [canvas(2, c, 9), canvas(2, c, 19, 18), canvas(2, c, 32, 18)], 2, doc_starts=(0, 18)),
        CleanRow(d, [canvas(3, d, 19, length=5)], 3),
    ]


def batch_of(chosen: Sequence[CleanRow]) -> Batch:
    return lay_out(chosen, L, pad_id=0)


def noisy_canvases(batch: Batch) -> Tensor:
    alpha_BC = Linear().alpha(batch.t_BC)
    return UniformCorruption(V).corrupt(batch.canvas_BCL, alpha_BC, batch.address_BC3, SEED)[0]


# -- the same in transformers --------------------------------------------------------------------------------


def one_by_one(model: DiffusionGemmaForBlockDiffusion, batch: Batch) -> Losses:
    """Every document encoded alone, every canvas after an encode of only the tokens before it."""
    canvas_sum, ar_sum = torch.zeros(()), torch.zeros(())
    noisy_BCL = noisy_canvases(batch)
    cap = model.final_logit_softcapping
    for b in range(len(batch.tokens_BS)):
        for doc in sorted(set(batch.doc_start_BS[b].tolist()) - {-1}):
            row = batch.tokens_BS[b, batch.doc_start_BS[b] == doc]
            hidden = model.model.encoder(input_ids=row[None]).last_hidden_state[0]
            logits = cap * torch.tanh(model.lm_head(hidden).float() / cap)
            ar_sum = ar_sum + F.cross_entropy(logits[:-1], row[1:], reduction="sum")
        for c in range(batch.start_BC.shape[1]):
            length = int(batch.length_BC[b, c])
            if not length:
                continue
            before = batch.tokens_BS[b, int(batch.doc_start_BC[b, c]) : int(batch.start_BC[b, c])][None]
            noisy, signal = noisy_BCL[b, c, :length][None], {}
            if batch.coin_BC[b, c]:
                with torch.no_grad():
                    first = model(input_ids=before, decoder_input_ids=noisy).logits
                signal = {"self_conditioning_logits": first}
            logits = model(input_ids=before, decoder_input_ids=noisy, **signal).logits[0]
            is_scored = batch.is_scored_BCL[b, c, :length]
            target = batch.canvas_BCL[b, c, :length][is_scored]
            canvas_sum = canvas_sum + F.cross_entropy(logits[is_scored], target, reduction="sum")
    return {"canvas": canvas_sum, "ar": ar_sum}


def gradients(module: torch.nn.Module, loss: Tensor) -> Gradients:
    module.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    named = module.named_parameters(remove_duplicate=False)  # transformers' are tied under several names
    return {name: p.grad for name, p in named if p.grad is not None}


def compare(mine: Gradients, theirs: Gradients, names: Sequence[str], tolerance: float) -> None:
    for name in names:
        got, truth = mine[name], theirs.get(NAMES.to_hub(name))
        if truth is None or not truth.any():
            assert not got.any(), name
            continue
        error = float((got.double() - truth.double()).norm() / truth.double().norm())
        assert error < tolerance, f"{name}: {error:.1e}"


COINS = {"mixed": lambda n: n % 2 == 0, "off": lambda n: False, "on": lambda n: True}


@pytest.mark.quick
@pytest.mark.parametrize("coin", COINS)
def test_both_losses_and_their_gradients_match_transformers_run_canvas_by_canvas(pair, coin):
    """The signal's logits are given; E embeds them."""
    model, mine = pair
    batch = batch_of(rows(COINS[coin]))
    assert batch.coin_BC.any() == (coin != "off")
    truth, losses = one_by_one(model, batch), objective_of(mine)(batch)
    names = [name for name, _ in mine.named_parameters()]
    assert losses.keys() == truth.keys()
    for name, expected in truth.items():
        got = losses[name]
        assert got.dtype == torch.float64 and got.dim() == 0
        assert got.item() == pytest.approx(expected.item(), rel=1e-6)
        got_gradients = gradients(mine, got)
        compare(got_gradients, gradients(model, expected), list(got_gradients), 1e-5)
        signal = [n for n in names if n.startswith("self_conditioning") and got_gradients.get(n) is not None]
        has_signal = any(got_gradients[n].any() for n in signal)
        assert has_signal == (coin != "off" and name == "canvas")
    assert set(gradients(mine, losses["canvas"] + losses["ar"])) == set(names)


def test_fp32_gradients_are_as_close_to_fp64_as_transformers_fp32_ones(pair):
    """The hand-written fp32 backwards through the whole objective."""
    model, batch = pair[0], batch_of(rows())
    theirs = oracle(tiny_config(canvas_length=L, **TWO_LAYERS), dtype=torch.float32)
    single = ours(theirs)
    exact, rough = (one_by_one(m, batch) for m in (model, theirs))
    losses = objective_of(single)(batch)
    for n in losses:
        truth, other = gradients(model, exact[n]), gradients(theirs, rough[n])
        got = gradients(single, losses[n])
        for name, gradient in got.items():
            hub = NAMES.to_hub(name)
            if hub in truth:
                error, allowed = ((x - truth[hub]).norm() / truth[hub].norm() for x in (gradient, other[hub]))
                assert error <= max(2 * allowed, 2e-5), f"{name}: {error:.1e} against {allowed:.1e}"


def test_positions_that_are_not_scored_do_not_count_but_are_seen(pair):
    model, mine = pair
    batch = batch_of(rows())
    batch = replace(batch, is_scored_BCL=batch.is_scored_BCL & (torch.arange(L) % 3 > 0))
    assert objective_of(mine)(batch)["canvas"].item() == pytest.approx(
        one_by_one(model, batch)["canvas"].item(), rel=1e-6
    )


# -- the router ----------------------------------------------------------------------------------------------


def test_a_frozen_router_gets_no_gradient_and_changes_nobody_elses(pair):
    model, mine = pair
    batch = batch_of(rows())
    routers = {name for name, _ in mine.named_parameters() if ".router." in name}
    assert len(routers) == 3 * 2
    with without_gradient(mine.parameters_of("router")):
        frozen = gradients(mine, sum(objective_of(mine)(batch).values()))
    assert not routers & set(frozen)
    trained = gradients(mine, sum(objective_of(mine)(batch).values()))
    assert all(trained[name].any() for name in routers)
    for name, gradient in frozen.items():
        assert torch.equal(gradient, trained[name]), name
    theirs = gradients(model, sum(one_by_one(model, batch).values()))
    compare(frozen, theirs, list(frozen), 1e-5)
    compare(trained, theirs, sorted(routers), 1e-5)


@contextmanager
def without_gradient(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters do not train."""
    for p in parameters:
        p.requires_grad_(False)
    yield
    for p in parameters:
        p.requires_grad_(True)


def test_an_objective_leaves_what_trains_and_what_stands_still_as_it_is(pair):
    chosen = pair[1].parameters_of("router")
    with without_gradient(chosen):
        objective_of(pair[1])
        assert {id(p) for p in pair[1].parameters() if not p.requires_grad} == {id(p) for p in chosen}
    objective_of(pair[1])
    assert all(p.requires_grad for p in pair[1].parameters())


# -- what runs -----------------------------------------------------------------------------------------------


def tokens_run(mine: DiffusionGemma, batch: Batch) -> list[tuple[bool, int]]:
    """For every pass through the layers: whether it records gradients, and its number of tokens."""
    passes: list[tuple[bool, int]] = []
    hook = mine.layers[0].register_forward_pre_hook(
        lambda module, inputs: passes.append((torch.is_grad_enabled(), inputs[0].shape[:2].numel()))
    )
    objective_of(mine)(batch)
    hook.remove()
    return passes


@pytest.mark.quick
def test_pass_one_runs_the_coin_canvases_only_and_without_gradients(pair):
    mine = pair[1]
    chosen = rows(lambda n: n in (1, 4))  # one canvas of the first row, one of the third
    batch = batch_of(chosen)
    clean, canvases = batch.tokens_BS.numel(), batch.canvas_BCL.numel()
    assert tokens_run(mine, batch) == [(True, clean), (False, 2 * L), (True, canvases)]


def test_a_batch_without_coins_has_no_pass_one(pair):
    batch = batch_of(rows(COINS["off"]))
    assert tokens_run(pair[1], batch) == [(True, batch.tokens_BS.numel()), (True, batch.canvas_BCL.numel())]


@pytest.mark.parametrize("with_canvases", [True, False])
def test_among_several_processes_a_batch_without_coins_runs_one_canvas_and_discards_it(
    pair, with_canvases, monkeypatch
):
    batch = batch_of(rows(COINS["off"]) if with_canvases else [CleanRow(tokens(9, 1), [])])
    alone = objective_of(pair[1])(batch)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert [grad for grad, _ in tokens_run(pair[1], batch)] == [True, False, True]
    assert tokens_run(pair[1], batch)[1] == (False, L)
    assert objective_of(pair[1])(batch) == alone


def test_the_coin_decides_whether_a_canvas_gets_a_signal(pair):
    mine = pair[1]
    signals: list[Tensor] = []
    hook = mine.self_conditioning.register_forward_pre_hook(lambda module, inputs: signals.append(inputs[1]))
    batch = batch_of(rows())
    objective_of(mine)(batch)
    hook.remove()
    first, second = signals
    assert first is None or not first.any()
    has_signal_BC = second.unflatten(1, batch.canvas_BCL.shape[1:]).abs().sum((-1, -2)) > 0
    assert torch.equal(has_signal_BC, batch.coin_BC & (batch.length_BC > 0))


# -- batches without canvases --------------------------------------------------------------------------------


def test_rows_without_canvases_train_on_the_ar_loss_alone(pair):
    model, mine = pair
    batch = batch_of([CleanRow(tokens(20, 1), [], 0), CleanRow(tokens(7, 2), [], 1)])
    losses = objective_of(mine)(batch)
    assert losses["canvas"].item() == 0.0
    got = gradients(mine, losses["canvas"] + losses["ar"])
    compare(got, gradients(model, one_by_one(model, batch)["ar"]), list(got), 1e-5)
    assert set(got) == {name for name, _ in mine.named_parameters()}  # or a wrapper would wait for the others


def test_a_batch_with_and_without_canvases_in_its_rows(pair):
    model, mine = pair
    some = rows()
    batch = batch_of([some[0], CleanRow(tokens(20, 9), [], 7), some[1]])
    losses, truth = objective_of(mine)(batch), one_by_one(model, batch)
    assert losses.keys() == truth.keys()
    assert all(losses[name].item() == pytest.approx(truth[name].item(), rel=1e-6) for name in truth)


def test_a_row_of_one_token_has_no_pair_to_score(pair):
    losses = objective_of(pair[1])(batch_of([CleanRow([2], [Canvas(tokens(L, 1), 1, t=0.5)])]))
    assert losses["ar"].item() == 0.0
    assert losses["canvas"].item() > 0.0


# -- composition of the batch --------------------------------------------------------------------------------


def seen_canvases(mine: DiffusionGemma, batch: Batch, seed: int = SEED) -> dict[tuple[int, ...], list[int]]:
    """The noisy tokens that pass two ran, by address."""
    seen: list[Tensor] = []
    hook = mine.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    objective_of(mine, seed=seed)(batch)
    hook.remove()
    noisy = seen[-1].view(batch.canvas_BCL.shape)
    present = (batch.length_BC > 0).nonzero().tolist()
    return {tuple(batch.address_BC3[b, c].tolist()): noisy[b, c].tolist() for b, c in present}


SPLITS = [[[0], [1], [2], [3]], [[3, 1], [2, 0]], [[0, 2, 3], [1]]]


@pytest.mark.parametrize("split", SPLITS)
def test_the_noise_of_a_canvas_does_not_depend_on_its_batch(pair, split):
    mine, everything = pair[1], rows()
    whole = seen_canvases(mine, batch_of(everything))
    assert len(whole) == 8
    parts: dict[tuple[int, ...], list[int]] = {}
    for part in split:
        parts |= seen_canvases(mine, batch_of([everything[i] for i in part]))
    assert parts == whole


def test_the_noise_follows_seed_and_address(pair):
    mine, batch = pair[1], batch_of(rows())
    batch = replace(batch, t_BC=torch.full_like(batch.t_BC, 0.9))
    first = list(seen_canvases(mine, batch).values())
    assert list(seen_canvases(mine, batch, seed=SEED + 1).values()) != first
    next_epoch = replace(batch, address_BC3=batch.address_BC3 + torch.tensor([1, 0, 0]))
    assert all(a != b for a, b in zip(first, seen_canvases(mine, next_epoch).values(), strict=True))


def test_every_token_of_a_canvas_can_be_replaced_and_none_of_the_row(pair):
    mine, batch = pair[1], batch_of(rows())
    keeps = replace(batch, t_BC=torch.zeros_like(batch.t_BC))
    loses = replace(batch, t_BC=torch.ones_like(batch.t_BC))
    clean = {
        tuple(batch.address_BC3[b, c].tolist()): batch.canvas_BCL[b, c].tolist()
        for b, c in (batch.length_BC > 0).nonzero().tolist()
    }
    assert seen_canvases(mine, keeps) == clean
    noisy = seen_canvases(mine, loses)
    same = sum(x == y for key in clean for x, y in zip(clean[key], noisy[key], strict=True))
    assert same <= 3  # 64 tokens of 384
    assert objective_of(mine)(keeps)["ar"] == objective_of(mine)(loses)["ar"]


@pytest.mark.quick
@pytest.mark.parametrize("split", SPLITS)
def test_micro_batches_add_up_whatever_their_composition(pair, split):
    mine, everything = pair[1], rows()
    whole = objective_of(mine)(batch_of(everything))
    parts = [objective_of(mine)(batch_of([everything[i] for i in part])) for part in split]
    for n in whole:
        total = torch.stack([part[n] for part in parts]).sum()
        assert total.item() == pytest.approx(whole[n].item(), rel=1e-6)
        got, truth = gradients(mine, total), gradients(mine, whole[n])
        assert got.keys() == truth.keys()
        for name in truth:
            assert (got[name] - truth[name]).norm() <= 1e-6 * truth[name].norm(), name


@pytest.mark.parametrize("sweep", [False, True])
def test_what_the_host_reads_of_its_own_batch_is_what_it_would_read_of_the_copy(pair, sweep):
    objective, batch = objective_of(pair[1]), batch_of(rows())
    objective.sweep = sweep
    expected, found = objective(batch), objective(replace(batch, host=batch))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    kept, of_rows = replace(batch, host=batch).select(batch.coin_BC)
    assert kept.host is not None and torch.equal(kept.host.start_BC, kept.start_BC) and len(of_rows)


@pytest.mark.parametrize("sweep", [False, True])
def test_the_places_of_factors_are_on_their_way_before_any_pass_is_queued(pair, sweep, monkeypatch):
    """On a GPU the host then waits for them and not for the passes."""
    objective, happened = objective_of(pair[1]), []
    objective.sweep = sweep
    made = objective.weight.weigh
    monkeypatch.setattr(objective, "weight", SimpleNamespace(weigh=lambda *x: happened.append("factors") or made(*x)))
    hook = pair[1].layers[0].register_forward_pre_hook(lambda *_: happened.append("pass"))
    objective(batch_of(rows()))
    hook.remove()
    assert happened[0] == "factors" and happened.count("factors") == 1 and "pass" in happened


def test_canvases_of_one_row_add_up_when_they_are_run_apart(pair):
    mine, batch = pair[1], batch_of(rows())
    whole = objective_of(mine)(batch)["canvas"]
    odd = torch.arange(batch.start_BC.shape[1]) % 2 == 1
    parts = [batch.select(chosen.expand_as(batch.coin_BC))[0] for chosen in (odd, ~odd)]
    total = sum(objective_of(mine)(part)["canvas"].item() for part in parts)
    assert total == pytest.approx(whole.item(), rel=1e-6)
