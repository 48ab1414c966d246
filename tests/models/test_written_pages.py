"""Layers write keys and values into their pages themselves: kernels against torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockdiff.kernels import launch as launching
from blockdiff.kernels.span_attention.paged import written
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from tests.support.closeness import require_close
from tests.support.families import CONFIGS, small_model
from tests.support.oracle import our_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 8
FAMILIES = ["diffusion_gemma", "qwen3 sliding, denoising", "minimax_m3 denoising"]
COPIES = ("index_copy", "index_select", "index.", "gather", "cat", "clone", "copy_", "_to_copy")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Copies(TorchDispatchMode):
    """The operations of torch that copy, and the most elements that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.found = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).removeprefix("aten.").startswith(COPIES) and isinstance(out, Tensor):
            made = args[3] if "index_copy" in str(func) else out
            self.found.add(str(func))
            self.largest = max(self.largest, made.numel())
        return out


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], BlockDiffusionModel]:
    """Makes a model whose tensors have no values, so that whatever reads one raises, and whose ops are not torch's."""
    monkeypatch.setattr(launching, "torch_must_see_op", lambda: False)

    def make(name: str) -> BlockDiffusionModel:
        config = our_config(CONFIGS[name]())
        with torch.device("meta"):
            return config.model_class(config, kernels="triton").eval()

    return make


def pair(name: str) -> tuple[BlockDiffusionModel, BlockDiffusionModel]:
    """A model in torch, and the same one with kernels that read pages."""
    plain = small_model(name, dtype=torch.float32).to(DEVICE)
    model = type(plain)(plain.config, kernels="triton").to(DEVICE)
    model.load_state_dict(plain.state_dict())
    return plain, model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, truth: Tensor, tolerance: float = 2e-5) -> None:
    require_close(found, truth, tolerance)


def held(pages: Pages, row: PagedRow) -> list[Tensor]:
    """The numbers that the pages of all kinds have of a row's tokens."""
    found = []
    for name, pool in pages.pools.items():
        columns = row.length - row.first[name] * PAGE
        for x in pool.tensors:
            found.append(x[:, row.tables[name]].flatten(1, 2)[:, :columns].clone())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_encoded_into_pages_and_denoised_there_as_by_torch(name):
    """Prompts in two calls, a row that shares another's pages, a copy of a shared page, next tokens, canvases."""
    found: list[list[Tensor]] = []
    for model in pair(name):
        pages = Pages(model, PAGE, capacity=400)
        first, second, third = (pages.open() for _ in range(3))
        prompt, out = tokens(2, 21), list[Tensor]()
        hidden = pages.encode([first, second], prompt[:, :12], [12, 5])
        out += [hidden[0], hidden[1, :5]]
        hidden = pages.encode([first, second], prompt[:, 12:], [9, 3])
        out += [hidden[0], hidden[1, :3]]
        for row in (first, second):
            pages.accept(row)
        shared = pages.reuse(third, prompt[0].tolist())
        out.append(torch.tensor([float(shared)]))
        assert shared == 16 or name.startswith("qwen3")
        before = held(pages, first)
        out.append(pages.encode([third], tokens(1, 5, seed=3), [5])[0])
        pages.truncate(first, 20)  # into a page that is published: a copy is written to
        assert all(torch.equal(a, b) for a, b in zip(before, held(pages, first), strict=True) if a.shape == b.shape)
        kept = held(pages, third)
        out += pages.encode([first, second, third], tokens(3, 1, seed=5), [1, 1, 0])[:2]
        assert all(torch.equal(a, b) for a, b in zip(kept, held(pages, third), strict=True))
        out += [x for row in (first, second, third) for x in held(pages, row)]
        if name == "diffusion_gemma":
            canvases = tokens(2, 16, seed=7).to(DEVICE)
            out.append(pages.denoise([third, second], canvases[:, :8]))
            out.append(pages.denoise([second, first], canvases))
        pages.check()
        found.append(out)
    for one, other in zip(*found, strict=True):
        close(other.cpu(), one.cpu())


@pytest.mark.quick
@pytest.mark.parametrize("name", FAMILIES)
def test_a_commit_and_a_next_token_copy_nothing_of_the_prefix_and_read_nothing(name, on_meta):
    """Neither is a prefix made dense, nor are the call's own keys and values copied into pages after they were made."""
    pages = Pages(on_meta(name), PAGE, capacity=800)
    rows = [pages.open(), pages.open()]
    pages.encode(rows, tokens(2, 4), [4, 3])  # pools are made
    pages.encode(rows, tokens(2, 140), [140, 70])
    for count in (8, 1):
        with Copies() as copies:
            pages.encode(rows, tokens(2, count), [count, count])
        assert copies.largest < 100 * 16
        assert "aten.index_copy_.default" not in copies.found
    assert [row.length for row in rows] == [153, 82]


def test_what_a_layer_gives_back_is_written_for_it(monkeypatch):
    """A layer of one's own need not know of pages that it could write to itself."""
    _, model = pair("llama")
    found = []
    for is_told in (True, False):
        pages, layer = Pages(model, PAGE, capacity=400), model.layers[1]
        if not is_told:

            def told_nothing(
                x: Tensor, rope: Any, spans: Any, past: Any, is_noisy: Any, forward: Any = layer.forward
            ) -> Any:
                past = past and tuple(replace(x, pages=replace(x.pages, own_N=None)) for x in past)
                out, kv = forward(x, rope, spans, past, is_noisy)
                assert len(kv) == 2
                return out, kv

            monkeypatch.setattr(layer, "forward", told_nothing)
        rows = [pages.open(), pages.open()]
        hidden = [pages.encode(rows, tokens(2, 9, seed=n), [9, 4]) for n in range(3)]
        found.append([*(x[0] for x in hidden), *(x[1, :4] for x in hidden), *held(pages, rows[0])])
    for one, other in zip(*found, strict=True):
        close(other, one)


def test_who_encodes_writes_and_who_denoises_does_not(monkeypatch):
    asked: list[bool] = []
    for model in pair("qwen3 sliding, denoising"):
        pages, layer = Pages(model, PAGE, capacity=400), model.layers[0]
        row, forward = pages.open(), layer.forward
        pages.encode([row], tokens(1, 9), [9])

        def watched(x: Tensor, rope: Any, spans: Any, past: Any, is_noisy: Any, forward: Any = forward) -> Any:
            asked.append(written(past) is not None)
            return forward(x, rope, spans, past, is_noisy)

        monkeypatch.setattr(layer, "forward", watched)
        pages.denoise([row], tokens(1, 8).to(DEVICE))
        pages.encode([row], tokens(1, 8), [8])
    assert asked == [False, True] * 2
