"""Verified canvases: the tokens of next-token sampling with the same head, whatever drafts and whoever runs beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.sampling import Engine, Request, Result
from tests.families import CONFIGS, small_model

pytestmark = pytest.mark.quick

EOS, L = 2, 4
SETTINGS = Generation(max_new_tokens=5 * L, eos_ids=(EOS,), pad_id=0)
DENOISING = [name for name in CONFIGS if "denoising" in name or name == "diffusion_gemma"]


def lopsided(model: BlockDiffusionModel) -> BlockDiffusionModel:
    """A model with short canvases and few tokens that are ever likely, so that a draft and the head often agree."""
    with torch.no_grad():
        model.vocabulary.output_weights()[[5, 6]] *= 8
        model.vocabulary.output_weights()[EOS] *= 5
    model.canvas_length = L
    return model


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> BlockDiffusionModel:
    return lopsided(small_model("diffusion_gemma"))


def requests(count: int = 8, **options: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    tokens = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return [Request(**{"id": n, "tokens": each} | options) for n, each in enumerate(tokens)]


def engine_of(model: BlockDiffusionModel, strategy: Any, **options: Any) -> Engine:
    return Engine(model, None, SETTINGS, strategy=strategy, **{"page_tokens": 8} | options)


def answers(engine: Engine, asked: list[Request], watch: bool = False) -> dict[str | int, Result]:
    for request in asked:
        engine.submit(request, watch=watch)
    while engine.step():
        engine.pages.check()
    return {event.id: event for event in engine.events() if isinstance(event, Result)}


def tokens_of(model: BlockDiffusionModel, strategy: Any, asked: list[Request], **options: Any) -> list[list[int]]:
    results = answers(engine_of(model, strategy, **options), asked)
    assert all(result.error is None for result in results.values())
    return [results[request.id].tokens for request in asked]


# -- the head's tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENOISING)
def test_every_family_has_the_tokens_of_next_token_sampling(name):
    model, both = lopsided(small_model(name)), list[list[Request]]()
    for sampling in ("next_token:", "verified:steps=1,", "verified:steps=3,"):
        hot = requests(5, strategy=sampling + "temperature=6,top_k=5")
        greedy = requests(5, strategy=sampling + "temperature=0")
        both.append(greedy + [replace(each, id=f"hot {each.id}") for each in hot])
    expected = tokens_of(model, "next_token", both[0])
    assert len(set(map(tuple, expected))) > 3
    for asked in both[1:]:
        assert tokens_of(model, "verified", asked) == expected


@pytest.mark.parametrize(
    "options", [{"max_rows": 3}, {"exact": True}, {"canvases": 2}, {"max_rows": 6, "capacity": 80, "chunk_tokens": 8}]
)
def test_company_and_preemption_change_no_token(model, options):
    asked, hot = requests(), "temperature=1.2,top_p=0.9"
    expected = tokens_of(model, f"next_token:{hot}", asked)
    engine = engine_of(model, "entropy_bound", **options)
    beside = [replace(each, id=f"beside {each.id}") for each in asked]
    mixed = [replace(each, strategy=f"verified:steps=2,{hot}") for each in asked]
    results = answers(engine, [each for pair in zip(mixed, beside, strict=True) for each in pair])
    assert [results[each.id].tokens for each in asked] == expected
    unverified = answers(engine_of(model, "entropy_bound", **options | {"capacity": None}), beside)
    assert {id: results[id] for id in unverified} == unverified
    assert not any(engine.pages.statistics.pages.values())
    assert engine._scheduler.preemptions > 0 or "capacity" not in options
