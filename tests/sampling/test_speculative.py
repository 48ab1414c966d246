"""Drafted blocks: the tokens of next-token sampling, whatever drafts, however long they are, whoever runs beside."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

import blockdiff
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.plots.picture import draw_picture
from blockdiff.plots.trace_moments import canvas_moments
from blockdiff.sampling import Engine, Recorder, Request, Result, Sampler
from blockdiff.sampling.encoding import CapturedEncode
from blockdiff.sampling.graphs import BrokenCapture
from blockdiff.sampling.strategies import NextToken, Speculative
from tests.models.test_llama import oracle, ours
from tests.models.test_minimax_m3 import oracle as m3_oracle
from tests.oracles import dflash as plain
from tests.oracles import eagle3 as plain_head
from tests.support.drafters import drafter_for, drafter_values, head_for, head_values, head_weights, hub_weights
from tests.support.families import CONFIGS, small_model
from tests.support.oracle import our_config
from tests.support.pictures import gemma_config, image_row, pair
from tests.support.recorder import Recorder as GraphRecorder

pytestmark = pytest.mark.quick

EOS = 2
SETTINGS = Generation(max_new_tokens=13, eos_ids=(EOS,), pad_id=0)


def lopsided(model: BlockDiffusionModel) -> BlockDiffusionModel:
    """A model with few tokens that are ever likely, so that a draft and the head often agree."""
    with torch.no_grad():
        model.vocabulary.output_weights()[[5, 6]] *= 8
        model.vocabulary.output_weights()[EOS] *= 4
    return model


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drafted(target: BlockDiffusionModel, number: int = 0, **more: Any) -> Drafted:
    values = drafter_values(target.config, random.Random(number), **more)
    return Drafted(target, drafter_for(target, values, seed=number))


def headed(target: BlockDiffusionModel, number: int = 0) -> Drafted:
    return head_for(target, *files_of_head(target, number))


def files_of_head(target: BlockDiffusionModel, number: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head that often drafts tokens 5 and 6: its config and weights."""
    values = head_values(target.config, random.Random(number))
    weights = head_weights(values, number, embeds=bool(number % 2))
    draft_ids = torch.arange(values["draft_vocab_size"]) + weights.get("d2t", 0)
    weights["lm_head.weight"][(draft_ids == 5) | (draft_ids == 6)] *= 8
    return values, weights


@pytest.fixture(scope="module")
def target() -> BlockDiffusionModel:
    return lopsided(small_model("qwen3"))


@pytest.fixture(scope="module")
def model(target) -> Drafted:
    return drafted(target, 1, block_size=5)


@pytest.fixture(scope="module", params=["dflash", "eagle3"])
def either(request, target, model) -> Drafted:
    return model if request.param == "dflash" else headed(target, 2)


def requests(count: int = 6, **options: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    tokens = [torch.randint(6, 90, (length,), generator=generator).tolist() for length in lengths]
    return [Request(**{"id": n, "tokens": each} | options) for n, each in enumerate(tokens)]


def answered(model: BlockDiffusionModel, strategy: Any, asked: list[Request], **options: Any) -> list[Result]:
    tokenizer = options.pop("tokenizer", None)
    engine = Engine(model, tokenizer, SETTINGS, strategy=strategy, **{"page_tokens": 8} | options)
    for request in asked:
        engine.submit(request)
    while engine.step():
        pass
    engine.pages.check()
    results = {event.id: event for event in engine.events() if isinstance(event, Result)}
    found = [results[request.id] for request in asked]
    assert all(result.error is None for result in found), [result.error for result in found]
    return found


def tokens_of(*given: Any, **options: Any) -> list[list[int]]:
    return [result.tokens for result in answered(*given, **options)]


@pytest.mark.parametrize("name", [name for name in CONFIGS if our_config(CONFIGS[name]()).predicts_next_tokens])
def test_every_family_has_the_tokens_of_next_token_sampling(name):
    target, found = lopsided(small_model(name)), set()
    strategies = ("speculative:", "next_token:"), ("speculative:block=2,",)
    for number, sampling in enumerate(("temperature=0", "temperature=40,top_k=5")):
        expected = tokens_of(target, f"next_token:{sampling}", asked := requests(3))
        model = drafted(target, number)
        for strategy in strategies[number]:
            assert tokens_of(model, strategy + sampling, asked) == expected
        assert tokens_of(headed(target, number), f"speculative:{sampling}", asked) == expected
        found |= set(map(tuple, expected))
    assert len(found) > 3


def test_drafts_stand_and_save_calls_of_the_target(target, either):
    asked = requests(8, max_new_tokens=30)
    plainly, drafts = answered(target, "next_token", asked), answered(either, None, asked)
    assert [each.tokens for each in drafts] == [each.tokens for each in plainly]
    calls = [sum(each.forwards.encode + each.forwards.verify for each in found) for found in (drafts, plainly)]
    assert calls[0] < calls[1] and sum(each.forwards.draft for each in drafts) > 0
    assert all(each.forwards.denoise == 0 for each in drafts)


def test_places_behind_the_end_of_a_response_are_not_counted(either, monkeypatch):
    """The prompt's call gives a token, a round what stands and, unless that is the end, one more."""
    monkeypatch.setitem(globals(), "SETTINGS", replace(SETTINGS, eos_ids=(5, 6)))
    asked = requests(24, max_new_tokens=30)
    found = answered(either, "speculative:temperature=20,block=5", asked)
    for each in found:
        stood = sum(count for _, count in each.places)
        assert stood + 1 + each.forwards.verify - len(each.tokens) in (0, 1)
    assert any(stood for each in found for _, stood in each.places)


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"max_rows": 6, "capacity": 64, "chunk_tokens": 8}])
def test_company_and_preemption_change_no_token(target, either, options):
    asked, hot = requests(), "temperature=1.2,top_p=0.9"
    expected = tokens_of(target, f"next_token:{hot}", asked)
    assert tokens_of(either, f"speculative:{hot}", asked, **options) == expected
    mixed = [replace(each, strategy=f"next_token:{hot}") if each.id % 2 else each for each in asked]
    assert tokens_of(either, f"speculative:{hot}", mixed, **options) == expected


def test_shared_pages_and_any_length_of_response(target, either):
    prompt = torch.randint(6, 90, (21,), generator=torch.Generator().manual_seed(5)).tolist()
    asked = [Request(n, tokens=[*prompt, *range(6, 6 + n)], max_new_tokens=n + 1, seed=n) for n in range(7)]
    hot = "temperature=1.5"
    found = answered(either, f"speculative:{hot}", asked, max_rows=2)
    assert [each.tokens for each in found] == tokens_of(target, f"next_token:{hot}", asked)
    assert all(len(each.tokens) == n + 1 or each.tokens[-1] == EOS for n, each in enumerate(found))
    assert sum(each.cached_tokens for each in found) > 0
    alone = [answered(either, f"speculative:{hot}", [each])[0] for each in asked]
    assert [each.places for each in found] == [each.places for each in alone]  # the same is drafted over shared pages


def test_responses_reach_the_last_position_and_one_token_more_is_refused(target, either):
    """Of blocks of 5 tokens fewer and fewer fit, down to a prompt that leaves room for one token."""
    positions = Engine(target, None, SETTINGS).settings.positions
    tokens = torch.randint(6, 90, (positions,), generator=torch.Generator().manual_seed(4)).tolist()
    rest = (1, 2, 3, 4, 5, 9)
    asked = [Request(n, tokens=tokens[: positions - n], max_new_tokens=n, banned=(EOS,)) for n in rest]
    strategies = (target, "next_token:temperature=1.2"), (either, "speculative:block=5,temperature=1.2")
    expected, found = (answered(each, strategy, asked) for each, strategy in strategies)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert tuple(len(each.tokens) for each in found) == rest
    assert [each.forwards.draft > 0 for each in found] == [length > 2 for length in rest]
    for request in asked:
        said = f"positions leave room for {positions - request.id - 1} before a response of {request.id + 1};"
        for each, strategy in strategies:
            with pytest.raises(RequestError, match=said):
                answered(each, strategy, [replace(request, max_new_tokens=request.id + 1)])


def test_scores_best_of_and_penalties_are_those_of_next_tokens(target, either):
    for options in (
        {"scores": True, "top_logprobs": 2},
        {"best_of": 3},
        {"repetition_penalty": 1.3},
        {"min_tokens": 6},
        {"banned": (5,)},
    ):
        asked = requests(4, seed=9, **options)
        one, other = (
            answered(each, strategy, asked)
            for each, strategy in ((target, NextToken(1.2)), (either, Speculative(NextToken(1.2))))
        )
        assert [each.tokens for each in one] == [each.tokens for each in other]
        for a, b in zip(one, other, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None)
            assert a.logprobs is None or b.logprobs == pytest.approx(a.logprobs, abs=1e-9)


def test_stops_constraints_and_templates_are_those_of_next_tokens(target, either):
    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz +-*/=().,:;!?")
    for options in (
        {"stop": ("5", "ab")},
        {"regex": "[0-9]{3}(a|bc)*"},
        {"regex": "(ab|ac)[0-9]+=x", "max_new_tokens": 9},
        {"template": "x=<?4>; y=<?2>"},
        {"banned": ("7", "q")},
    ):
        asked = requests(4, **options)
        expected = answered(target, NextToken(1.2), asked, tokenizer=tokenizer)
        found = answered(either, Speculative(NextToken(1.2)), asked, tokenizer=tokenizer)
        assert [each.tokens for each in found] == [each.tokens for each in expected], options
        assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]


def test_greedy_rounds_are_those_of_the_plain_reference_and_are_drawn(tmp_path):
    from transformers import Qwen3Config

    from tests.support.families import SMALL

    theirs = oracle(Qwen3Config(**SMALL | {"eos_token_id": None}))
    with torch.no_grad():
        theirs.lm_head.weight[[5, 6]] *= 8
    target = ours(theirs)
    for number in range(3):
        drafter = drafter_for(target, drafter_values(target.config, random.Random(number)), seed=number)
        prompt = torch.randint(6, 90, (number + 1,), generator=torch.Generator().manual_seed(number)).tolist()
        expected, accepted = plain.generate(hub_weights(drafter), drafter.config, theirs, prompt, 16)
        recorder = Recorder()
        generation, strategy = Generation(max_new_tokens=16, pad_id=0), f"speculative:block={drafter.canvas_length}"
        sampler = Sampler(Drafted(target, drafter), None, generation, strategy=strategy)
        [result] = sampler.generate([Request(0, tokens=prompt)], on_step=recorder.step, on_canvas=recorder.canvas)
        assert result.tokens == expected
        stood = [each.accepted + 1 for each in recorder.traces[0].verifications]
        assert stood[: len(accepted) - 1] == accepted[: len(stood)][: len(accepted) - 1]
        assert result.forwards.draft == len(stood)
        trace = recorder.traces[0]
        told = [each.detail for canvas in trace.canvases for each in canvas_moments(trace, canvas, str)]
        assert sum("drafted" in each for each in told) == len(stood) and "committed" not in told
        draw_picture(trace, tmp_path / "trace.png", str)
        with Image.open(tmp_path / "trace.png") as picture:
            assert picture.height > 2 * 22 * len(stood)  # a row for each round, drawn twice as large


@pytest.mark.parametrize("family", ["qwen3", "minimax_m3"])
def test_greedy_rounds_of_a_head_are_those_of_the_plain_reference(family, tmp_path):
    theirs = oracle(CONFIGS[family]()) if family == "qwen3" else m3_oracle(CONFIGS[family]())
    theirs.get_output_embeddings().weight[[5, 6]] *= 8
    theirs.save_pretrained(tmp_path)
    target = blockdiff.load(tmp_path, device="cpu", kernels="torch")
    counts = set()
    for number in range(4):
        values, weights = files_of_head(target, number)
        model, block = head_for(target, values, weights), 2 + number
        prompt = torch.randint(6, 90, (number + 1,), generator=torch.Generator().manual_seed(number)).tolist()
        ids = [n + 1 for n in model.drafter.target_layers]
        expected, accepted = plain_head.generate(
            weights, model.drafter.config.layer, values, theirs, ids, prompt, 16, block
        )
        recorder, generation = Recorder(), Generation(max_new_tokens=16, pad_id=0)
        sampler = Sampler(model, None, generation, strategy=f"speculative:block={block}")
        [result] = sampler.generate([Request(0, tokens=prompt)], on_step=recorder.step, on_canvas=recorder.canvas)
        assert result.tokens == expected
        stood = [each.accepted + 1 for each in recorder.traces[0].verifications]
        # blocks are cut to what is asked for, the last one perhaps to nothing
        assert stood[:-1] == accepted[: len(stood) - 1] and len(accepted) - len(stood) in (0, 1)
        counts |= set(stood)
    assert len(counts) > 2


def test_an_engine_that_was_warmed_up_answers_the_same(target, either):
    engine = Engine(either, None, SETTINGS, page_tokens=8, max_rows=2)
    engine.warm_up()
    drafts = engine.denoised_canvases
    engine.submit(requests(1)[0])
    while engine.step():
        pass
    assert engine.denoised_canvases > drafts == 0
    [result] = [event for event in engine.events() if isinstance(event, Result)]
    assert result.tokens == tokens_of(target, "next_token", requests(1))[0]


def test_captured_passes_and_verifications_give_the_same_answers(target, either, monkeypatch):
    """The recorder refuses what waits for the device, and replays on the memory that it saw."""
    capture, options = GraphRecorder(), {"max_rows": 3, "buckets": (1, 2, 4)}
    counts, encode = Counter[int](), CapturedEncode.__call__

    def counted(self: CapturedEncode, rows: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
        counts[tokens_BT.shape[1]] += 1
        return encode(self, rows, tokens_BT)

    monkeypatch.setattr(CapturedEncode, "__call__", counted)
    monkeypatch.setattr("blockdiff.sampling.engine.step_capture", lambda model: capture)
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)  # which looks for empty rows
    asked = requests(5, max_new_tokens=30, scores=True)
    expected = answered(either, "speculative:block=3", asked, graphs=False, **options)
    assert capture.runs == 0
    assert answered(either, "speculative:block=3", asked, graphs=True, **options) == expected
    assert [each.tokens for each in expected] == tokens_of(target, "next_token", asked, graphs=False)
    assert counts[3] > 10 and set(counts) <= {1, 2, 3}
    assert capture.captures > 1 and capture.replays > 2 * capture.captures
    adaptive = [answered(either, "speculative", asked, graphs=graphs, **options) for graphs in (False, True)]
    assert [each.places for each in adaptive[0]] == [each.places for each in adaptive[1]]  # passes of several lengths
    counts.clear()
    expected = answered(target, "next_token", asked, graphs=False, **options)
    assert answered(target, "next_token", asked, graphs=True, **options) == expected
    assert counts[1] > 10  # a next token is a verification of no draft


class BrokenVerification(GraphRecorder):
    """Cannot end the capture of a verification."""

    def capture(self, work: Any) -> Any:
        """As CUDA does with a forbidden operation."""
        if "CapturedEncode" in work.__qualname__:
            raise BrokenCapture("operation not permitted when stream is capturing")
        return super().capture(work)


def test_answers_are_the_same_where_the_capture_of_a_verification_cannot_be_ended(target, model, monkeypatch):
    broken, asked = BrokenVerification(), requests(5, max_new_tokens=30)
    monkeypatch.setattr("blockdiff.sampling.engine.step_capture", lambda model: broken)
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted"):
        found = tokens_of(model, "speculative:block=3", asked, max_rows=3)
    assert found == tokens_of(target, "next_token", asked, graphs=False) and broken.runs > 2


def test_blocks_follow_what_stood_lately(model):
    drafting = Engine(model, None, SETTINGS).settings
    from blockdiff.sampling.prepare import prepare_sequences
    from blockdiff.sampling.trace import Verification

    [follows] = prepare_sequences(requests(1)[0], drafting)
    [fixed] = prepare_sequences(requests(1, strategy="speculative:block=4")[0], drafting)
    assert follows.round.reach == 4 and fixed.round.reach == 3
    for accepted, reach in ((0, 1), (1, 1), (1, 2), (2, 2), (4, 3), (4, 4)):
        for each in (follows, fixed):
            each.round.note(Verification(0, 0, 0, [6] * 4, 0, accepted, 7))
        assert follows.round.reach == reach and fixed.round.reach == 3
    follows.round.note(Verification(0, 0, 0, [], 0, 0, 7))
    assert follows.round.reach == 4


def test_what_a_drafter_cannot_draft_is_refused(target, model):
    with pytest.raises(RequestError, match=r"drafter .*speculative"):
        Engine(model, None, SETTINGS, strategy="entropy_bound")
    with pytest.raises(RequestError, match="speculative needs a drafter"):
        Engine(target, None, SETTINGS, strategy="speculative")
    with pytest.raises(RequestError, match="speculative needs a drafter"):
        tokens_of(target, "next_token", requests(1, strategy="speculative"))
    with pytest.raises(RequestError, match=r"drafter .*speculative"):
        tokens_of(model, None, requests(1, strategy="verified"))
    with pytest.raises(RequestError, match="denoising"):
        tokens_of(model, None, requests(1, draft="a"), tokenizer=character_tokenizer("abc"))


def test_images_in_the_prompt_are_the_targets(tmp_path):
    draw = random.Random(1)
    config = gemma_config(draw)
    _, target = pair(config, 1, tmp_path)
    row = image_row(config, draw, parts=2)
    request = Request(0, tokens=row.tokens, images=[placed.image for placed in row.images], seed=3)
    expected = tokens_of(target, NextToken(1.2), [request])
    model = drafted(target, 2)
    [found] = answered(model, Speculative(NextToken(1.2)), [request])
    assert found.tokens == expected[0] and found.forwards.draft > 0
