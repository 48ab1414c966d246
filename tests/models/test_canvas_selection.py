"""Selection of blocks of their prefix by canvases of a MiniMax M3: per query or per canvas, in every step or once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.errors import CheckpointError
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.sampling import Engine, Generation, Request, Result, graphs
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from tests.oracles.lockstep import generate_in_lockstep
from tests.support.families import CONFIGS, m3_config, small_model

pytestmark = pytest.mark.quick
L = 8


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def selecting(selection: str = "query", is_kept: bool = False, topk: int = 2) -> BlockDiffusionModel:
    """The small denoiser of the family's tests, whose canvases select so."""

    def config() -> Any:
        made = m3_config(topk=topk, canvas_length=L)
        made.canvas_selection, made.canvas_selection_kept = selection, is_kept
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "selecting", config)
        return small_model("selecting")


def watched(model: BlockDiffusionModel) -> list[Tensor]:
    """The selections of its canvases from now on, in the order of calls; encoding is left out."""
    found: list[Tensor] = []
    select = model.kernels.select_blocks

    def noted(q: Tensor, k: Tensor, visible: Tensor, *rest: Any, **budget: Any) -> Tensor:
        ids = select(q, k, visible, *rest, **budget)
        if not model.training:
            found.append(ids)
        return ids

    for layer in model.layers:
        layer.attention.kernels = model.kernels.replaced(select_blocks=noted)
    return found


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def test_queries_of_a_canvas_share_the_selection_of_their_mean_index_query():
    model = selecting("canvas")
    prefix, canvas = model.encode(tokens(2, 36)), tokens(2, L, seed=1)
    found = watched(model)
    queries: list[Tensor] = []
    for layer in model.layers[1:]:
        layer.attention.indexer.register_forward_hook(lambda module, args, out: queries.append(out[0]))
    model.denoise(canvas, prefix)
    assert [ids.shape for ids in found] == [(2, 1, 2, 2)] * 2, "a choice for each canvas and index head"
    for ids, idx_q, layer in zip(found, queries, model.layers[1:], strict=True):
        mean, visible = idx_q.mean(1, keepdim=True), torch.full((2, 1), 36)
        selection, keys = layer.attention.selection, prefix.layers()[list(model.layers).index(layer)][2].squeeze(2)
        assert torch.equal(ids, selection.blocks(model.kernels, mean, keys, visible, None))


def test_canvases_side_by_side_have_selections_of_their_own_and_padding_counts_for_nothing():
    model, document = selecting("canvas"), tokens(1, 40)
    noisy = [tokens(L, seed=n) for n in range(3)]
    starts = torch.tensor([[36, 12, 0]])
    lengths = torch.tensor([[L, L, 0]])
    _, kv = run(model, document)
    spans = {n: kind.denoise_spans(starts, 0 * starts, lengths, L) for n, kind in model.kinds.items()}
    positions = (starts[..., None] + torch.arange(L)).flatten(1)
    hidden, _ = model(torch.cat(noisy)[None], positions, spans, kv, True)
    for n, start in enumerate((36, 12)):
        alone = model.denoise(noisy[n][None], model.encode(document[:, :start]))
        torch.testing.assert_close(hidden[:, n * L : n * L + L], alone, rtol=1e-6, atol=1e-6)
    assert bool(hidden.isfinite().all())
    short = torch.tensor([[5]])
    spans = {n: kind.denoise_spans(starts[:, :1], 0 * short, short, L) for n, kind in model.kinds.items()}
    found = [
        model(torch.cat([noisy[0][:5], fill])[None], positions[:, :L], spans, kv, True)[0][:, :5]
        for fill in (tokens(3, seed=8), tokens(3, seed=9))
    ]
    assert torch.equal(*found)


def run(model: BlockDiffusionModel, document: Tensor) -> Any:
    spans = {name: kind.encode_spans(torch.zeros_like(document)) for name, kind in model.kinds.items()}
    return model(document, torch.arange(document.shape[1])[None], spans)


@pytest.mark.parametrize("selection", ["query", "canvas"])
def test_a_prefix_of_no_more_blocks_than_the_budget_is_dense_however_canvases_select(selection):
    prompt, canvas = tokens(2, 8), tokens(2, L, seed=1)
    dense = small_model("minimax_m3 dense, denoising")
    for is_kept in (False, True):
        model = selecting(selection, is_kept)
        found = model.denoise(canvas, model.encode(prompt))
        torch.testing.assert_close(found, dense.denoise(canvas, dense.encode(prompt)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("selection", ["query", "canvas"])
def test_a_kept_selection_is_that_of_the_first_step(selection):
    fresh, kept = selecting(selection), selecting(selection, True)
    prompt, first, later = tokens(2, 36), tokens(2, L, seed=1), tokens(2, L, seed=2)
    prefixes = [model.encode(prompt) for model in (fresh, kept)]
    found = watched(kept)
    pairs = zip((fresh, kept), prefixes, strict=True)
    steps = [[model.denoise(canvas, prefix) for canvas in (first, later)] for model, prefix in pairs]
    assert torch.equal(steps[0][0], steps[1][0]) and not torch.allclose(steps[0][1], steps[1][1])
    assert len(found) == 2, "each sparse layer selects once"
    some = kept.denoise(later[1:], prefixes[1].select(torch.tensor([1])))
    torch.testing.assert_close(some, steps[1][1][1:], rtol=1e-9, atol=1e-9)
    assert len(found) == 2, "and not again where rows leave"
    again = kept.denoise(later, kept.encode(first, prefix=prefixes[1]))
    torch.testing.assert_close(again, fresh.denoise(later, fresh.encode(first, prefix=prefixes[0])))
    assert len(found) > 2, "but for the canvas that follows"


def test_rows_in_pages_keep_their_own_selection_whoever_comes_and_goes():
    fresh, kept = selecting(), selecting("query", True)
    prompts = tokens(3, 36)
    canvases = [tokens(3, L, seed=n) for n in range(3)]
    pages = Pages(kept, page_tokens=8, capacity=400)
    rows = [pages.open() for _ in range(3)]
    pages.encode(rows, prompts, [36, 20, 9])
    alone = []
    for n, length in enumerate((36, 20, 9)):
        prefix = kept.encode(prompts[n : n + 1, :length])
        alone.append([kept.denoise(canvas[n : n + 1], prefix) for canvas in canvases])
    first = pages.denoise(rows[:1], canvases[0][:1])
    both = pages.denoise(rows[:2], torch.stack([canvases[1][0], canvases[0][1]]))  # the second joins
    three = pages.denoise(rows[::-1], torch.stack([canvases[0][2], canvases[1][1], canvases[2][0]]))
    found = [first[0], both[0], both[1], three[2], three[1], three[0]]
    truth = [alone[0][0], alone[0][1], alone[1][0], alone[0][2], alone[1][1], alone[2][0]]
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one[None], other, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(alone[0][1], fresh.denoise(canvases[1][:1], fresh.encode(prompts[:1])))


@pytest.mark.parametrize("selection", ["query", "canvas"])
def test_the_engine_answers_with_kept_selections_as_the_loop_does(selection):
    model, settings = selecting(selection, True), Generation(max_new_tokens=24, max_steps=5, eos_ids=(2,), pad_id=0)
    requests = [Request(n, tokens=tokens(length, seed=n).tolist(), seed=n) for n, length in enumerate((30, 9, 41, 30))]
    found, truth = sampling_settings(model, None, settings), {}
    for request in requests:
        asked = prepare_sequences(request, found)
        generate_in_lockstep(model, found, asked)
        truth[request.id] = asked[0].tokens
    engine = Engine(model, generation=settings, page_tokens=8, max_rows=2)
    for request in requests:
        engine.submit(request)
    while engine.step():
        pass
    found = {event.id: event.tokens for event in engine.events() if isinstance(event, Result)}
    assert found == truth


def test_steps_that_keep_a_selection_are_not_captured(monkeypatch):
    """A captured first step would select again in every step that replays it."""
    models = selecting(), selecting("query", True)
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: "captured")
    monkeypatch.setattr(BlockDiffusionModel, "device", torch.device("cuda"))
    for model in models:
        model.kernels = SimpleNamespace(is_capturable=True)
    assert [graphs.step_capture(model) for model in models] == ["captured", None]


def test_a_config_says_how_canvases_select_and_files_keep_it(tmp_path):
    model = selecting("canvas", True)
    blockdiff.save(model, tmp_path / "m")
    again = blockdiff.load(tmp_path / "m", dtype="float64", device="cpu", kernels="torch")
    assert again.layers[1].attention.selection.canvas_length == L and again.kinds["sparse"].keeps_selection
    values = m3_config(canvas_length=L).to_dict()
    with pytest.raises(CheckpointError, match=r"canvas_selection .*'row'.*query, canvas"):
        config_from(values | {"canvas_selection": "row"}, "here")
    with pytest.raises(CheckpointError, match="canvas_selection_kept"):
        config_from(values | {"canvas_length": None, "canvas_selection_kept": True}, "here")
