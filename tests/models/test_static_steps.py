"""The needs of a CUDA graph in a denoising step and a commit: the host reads nothing, no shape follows from data.

On torch's meta device tensors have no values: whatever reads one, or makes a tensor as large as a value says, raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.kernels import launch as launching
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.page_rows import PagedRow
from blockdiff.models.pages import Pages
from blockdiff.sampling import DiffusionSettings
from blockdiff.sampling.canvas_control import grouped
from blockdiff.sampling.control import compile_control
from blockdiff.sampling.predict import PredictInputs, controlled_stats
from blockdiff.sampling.prepare import sampling_settings
from blockdiff.sampling.request import Request
from blockdiff.sampling.step import CanvasStep, StepCall
from blockdiff.sampling.strategy import captured_shape
from tests.support.oracle import our_config, tiny_config

L, D, PAGE = 16, 64, 8


class NothingFromTheHost(TorchDispatchMode):
    """Refuses operations on tensors of the host: in a graph their values would never change."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        assert not any(x.device.type == "cpu" for x in tensors), func
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _past_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops do what they do, and not only say what shapes they give."""
    monkeypatch.setattr(launching, "torch_must_see_op", lambda: False)
    with torch.no_grad():
        yield


def model_on(device: str) -> DiffusionGemma:
    with torch.device(device):
        return DiffusionGemma(our_config(tiny_config(canvas_length=L)), kernels="triton").eval()


def rows_of(pages: Pages, lengths: list[int]) -> list[PagedRow]:
    """Rows of so many tokens."""
    rows = [pages.open() for _ in lengths]
    tokens = torch.randint(3, 380, (len(lengths), max(lengths)))
    pages.encode(rows, tokens, lengths)
    return rows


def step_of(
    model: DiffusionGemma, pages: Pages, rows: list[PagedRow], strategy: str | None = None
) -> Callable[[], Any]:
    """The step of canvases after these rows, by the default strategy or another, as a graph would hold it."""
    settings, B = sampling_settings(model, None, Generation(), strategy=strategy), len(rows)
    step = CanvasStep(model, settings, pages, B, keeps=False)
    shape = captured_shape(settings.strategy, 8)
    assert shape is not None
    step.prefixes.load(rows)
    call = StepCall(B, B, (), ((settings.strategy, None),), [], [shape] * B)
    return lambda: step(call)


STRATEGIES = (
    None,
    "ddim",
    "quota",
    "entropy_bound:top_k=20,top_p=0.9,min_p=0.01",
    "ddim:top_k=20,min_p=0.01",
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_denoising_step_reads_nothing_and_brings_nothing_from_the_host(strategy):
    model = model_on("meta")
    pages = Pages(model, page_tokens=PAGE, capacity=4096)
    step = step_of(model, pages, rows_of(pages, [21, 30]), strategy)
    with NothingFromTheHost():
        step()


HOLDS = (
    {"template": "ab<?9>c<?8>"},
    {"banned": (5, 7), "repetition_penalty": 1.3},
    {"regex": "(ab|c){1,20}", "repetition_penalty": 1.3},
)


@pytest.mark.parametrize("mask_id", [None, 9])
@pytest.mark.parametrize("asked", HOLDS, ids=str)
def test_what_holds_canvases_reads_nothing_and_brings_nothing_from_the_host(asked, mask_id):
    """Nor does the dynamic program over an automaton."""
    tokenizer, device = character_tokenizer("abcd"), torch.device("meta")
    model = model_on("meta")
    tokens_BL, step_B = torch.zeros(2, L, dtype=torch.int64, device=device), torch.zeros(2, device=device).long()
    uniform_BL, hidden_BLD = torch.zeros(2, L, device=device), torch.zeros(2, L, D, device=device)
    noise = DiffusionSettings() if mask_id is None else DiffusionSettings(corruption="mask", mask_id=mask_id)
    settings = sampling_settings(model, tokenizer, Generation(eos_ids=(1,), pad_id=0), noise)
    control = compile_control(
        Request(0, tokens=[3], **asked), [3], settings, max_tokens=2 * L, max_steps=4, device=device
    )
    [held] = grouped([control.begin(n) for n in range(2)])
    fixed = held.in_buffers({}, most=4, count=2)
    inputs = PredictInputs(hidden_BLD, tokens_BL, 0.8, uniform_BL, step_B)
    with NothingFromTheHost():
        controlled_stats(model, inputs, fixed, mask_id)


def test_what_is_refused_is_noticed():
    with NothingFromTheHost(), pytest.raises(AssertionError):
        torch.zeros(2, device="meta") + torch.tensor(1.0)
    for reads in (Tensor.item, Tensor.tolist, bool, torch.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            reads(torch.zeros(1, device="meta"))


def test_a_commit_reads_nothing_from_the_device():
    """Where pages stand and how long rows are is known to the host, which writes it; nothing comes back."""
    pages = Pages(model_on("meta"), page_tokens=PAGE, capacity=4096)
    rows = rows_of(pages, [21, 30])
    pages.encode(rows, torch.zeros(2, L, dtype=torch.int64), [L, L])
    assert [row.length for row in rows] == [37, 46]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches: kernel, grid, shapes of tensors and all numbers; nothing runs."""
    found: list[Any] = []

    def told(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(told, value))
        return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value

    def launch(self: launching.Launch, *arguments: Any) -> None:
        found.append((self.kernel.__name__, self.grid, told(arguments), self.constants))

    monkeypatch.setattr(launching.Launch, "__call__", launch)
    return found


def test_steps_and_commits_launch_the_same_whatever_rows_hold(launches):
    """For as long as block tables stay in their bucket: rows of 40 to 60 tokens have 5 to 8 pages."""
    model, found = model_on("cpu"), []
    for lengths in ([41, 52], [58, 45]):
        pages = Pages(model, page_tokens=PAGE, capacity=4096)
        for pool in pages.pools.values():
            pool.grows = False  # as on a GPU
        rows = rows_of(pages, lengths)
        for work in ("step", "commit"):
            launches.clear()
            if work == "step":
                step_of(model, pages, rows)()
            else:
                pages.encode(rows, torch.zeros(2, 4, dtype=torch.int64), [4, 4])
            found.append(list(launches))
    assert len(found[0]) > 20 and len(found[1]) > 20
    assert found[0] == found[2] and found[1] == found[3]
