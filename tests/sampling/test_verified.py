"""Verified canvases: the tokens of next-token sampling with the same head, whatever drafts and whoever runs beside."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import BlockdiffError, RequestError
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.page_keys import unpacked_identities
from blockdiff.models.pages import Pages
from blockdiff.sampling import (
    Canvases,
    Decision,
    DiffusionSettings,
    Engine,
    Recorder,
    Request,
    Result,
    Sampler,
    verification,
)
from blockdiff.sampling import engine as engines
from blockdiff.sampling.predict import predict
from blockdiff.sampling.strategies import Composed, NextToken, Verified, adjusted, as_strategy
from tests.support.families import CONFIGS, SMALL, small_model
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.recorder import Recorder as CapturingRecorder

pytestmark = pytest.mark.quick

EOS, L = 2, 4
SETTINGS = Generation(max_new_tokens=4 * L, eos_ids=(EOS,), pad_id=0)
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


def requests(count: int = 6, **options: Any) -> list[Request]:
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
        pass
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
        hot = requests(3, strategy=sampling + "temperature=6,top_k=5")
        greedy = requests(3, strategy=sampling + "temperature=0")
        both.append(greedy + [replace(each, id=f"hot {each.id}") for each in hot])
    expected = tokens_of(model, "next_token", both[0])
    assert len(set(map(tuple, expected))) > 3
    for asked in both[1:]:
        assert tokens_of(model, "verified", asked) == expected


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"max_rows": 6, "capacity": 64, "chunk_tokens": 8}])
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
    assert engine._scheduler.preemptions > 0 or "capacity" not in options


@pytest.mark.parametrize("noise", ["uniform", "mask"])
def test_models_of_any_noise_and_prediction_verify(model, noise):
    diffusion = DiffusionSettings(corruption=noise, mask_id=7 if noise == "mask" else None, prediction="leave_one_out")
    asked = requests(4)
    expected = tokens_of(model, NextToken(1.2), asked, diffusion=diffusion)
    assert not any(7 in tokens for tokens in expected) or noise == "uniform"
    assert tokens_of(model, Verified(NextToken(1.2), 2), asked, diffusion=diffusion) == expected


def test_captured_steps_draft_the_same(model, monkeypatch):
    asked, strategy = requests(6), Verified(NextToken(), 2)
    models = [model, Drafted(small_model("llama"), model)]
    expected = [answers(engine_of(each, strategy, graphs=False), asked) for each in models]
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)
    for each, eager in zip(models, expected, strict=True):
        recorder = CapturingRecorder()
        monkeypatch.setattr(engines, "step_capture", lambda _, recorder=recorder: recorder)
        engine = engine_of(each, strategy)
        assert answers(engine, asked) == eager
        captured = [key for key in engine._encoding.captured.graphs.keys if key[1] == ("encode", L)]
        assert recorder.replays > 0 and captured


def near_ties(name: str, dtype: torch.dtype, seed: int = 0) -> list[float]:
    """Where verified tokens first differ from next tokens: the gap of both logits, as a share of the largest logit.

    The second half of the tokens are twins of the first, with logits that are nearly theirs, so that rounding often
    decides. Calls of any size round alike on some processors, so each hidden state of either way is moved by a unit of
    rounding, up or down at random. Logits are those of the same weights in fp64.
    """
    model, generator = small_model(name, seed, dtype), torch.Generator().manual_seed(seed)
    weights = model.vocabulary.output_weights()
    half = len(weights) // 2
    apart = torch.randn(half, weights.shape[1], generator=generator) * 10 ** (
        torch.rand(half, 1, generator=generator) * 6 - 7
    )
    weights[half : 2 * half] = (weights[:half].double() * (1 + apart)).to(dtype)
    model.canvas_length, asked = L, requests(24, banned=[EOS])
    exact = deepcopy(model).double()

    def move(module, inputs, outputs):
        signs = torch.randint(2, outputs[0].shape, generator=generator) * 2 - 1
        return outputs[0] * (1 + signs * torch.finfo(dtype).eps).to(dtype), outputs[1]

    model.register_forward_hook(move)
    pairs = zip(
        asked,
        tokens_of(model, "next_token:temperature=0", asked),
        tokens_of(model, "verified:temperature=0", asked),
        strict=True,
    )
    shares = []
    for request, plain, verified in pairs:
        places = [place for place, token in enumerate(plain) if token != verified[place]]
        if places:
            read = [*request.tokens, *plain[: places[0]]]
            logits_V = exact.unembed(exact.encode(torch.tensor([read])).hidden[0, -1])
            gap = logits_V[plain[places[0]]] - logits_V[verified[places[0]]]
            shares.append(float(gap.abs() / logits_V.abs().max()))
    return shares


@pytest.mark.portable
def test_a_token_that_rounding_decides_is_a_near_tie():
    """The margin of docs/strategies.md: five units of rounding of the dtype, times the largest logit."""
    for dtype in (torch.float32, torch.bfloat16):
        shares = near_ties("qwen3 sliding, denoising", dtype)
        assert shares and max(shares) < 5 * torch.finfo(dtype).eps
    assert not near_ties("qwen3 sliding, denoising", torch.float64)


# -- memory ----------------------------------------------------------------------------------------------------


def test_rejected_drafts_leave_no_trace_and_are_never_published(model):
    engine, asked = engine_of(model, "verified:temperature=1.2", page_tokens=4), requests()
    for request in asked:
        engine.submit(request)
    while engine.step():
        engine.pages.check()
        assert all(row.length == row.accepted for row in engine.pages._rows)
    results = {event.id: event for event in engine.events() if isinstance(event, Result)}
    assert sum(each.forwards.verify for each in results.values()) > sum(len(r.steps) for r in results.values())
    rows = [[*request.tokens, *results[request.id].tokens] for request in asked]
    fresh = Pages(model, page_tokens=4)
    for link in engine.pages._links.values():
        chain, at = list[int](), link
        while at.parent is not None:
            chain, at = unpacked_identities(at.tokens) + chain, at.parent
        assert any(row[: len(chain)] == chain for row in rows)
        row = fresh.open()
        fresh.encode([row], torch.tensor([chain]), [len(chain)])
        for name, page in link.pages.items():
            for kept, anew in zip(engine.pages.pools[name].tensors, fresh.pools[name].tensors, strict=True):
                torch.testing.assert_close(kept[:, page], anew[:, row.tables[name][-1]], rtol=1e-9, atol=1e-9)
    whole_pages = [tokens[: len(tokens) // 4 * 4] for request in asked if len(tokens := request.tokens or []) >= 4]
    later = [Request(f"later {n}", tokens=tokens) for n, tokens in enumerate([*whole_pages, *rows])]
    reused = engine.pages.statistics.reused_tokens
    again = answers(engine, later)
    assert engine.pages.statistics.reused_tokens > reused
    assert again == answers(engine_of(model, "verified:temperature=1.2"), later)


def test_a_cancelled_request_keeps_the_tokens_that_stand(model):
    asked = requests(4, strategy="verified")
    expected = tokens_of(model, "entropy_bound", asked)
    engine = engine_of(model, "entropy_bound")
    for request in asked:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    for request in asked:
        engine.cancel(request.id)
    results = {event.id: event for event in engine.events() if isinstance(event, Result)}
    assert {each.finish_reason for each in results.values()} >= {"cancelled"}
    for request, tokens in zip(asked, expected, strict=True):
        assert tokens[: len(results[request.id].tokens)] == results[request.id].tokens
    engine.pages.check()
    assert not any(engine.pages.statistics.pages.values())


# -- requests --------------------------------------------------------------------------------------------------

TOKENIZER = character_tokenizer('abcd0123456789{}":, ')


@pytest.fixture(scope="module")
def writer() -> BlockDiffusionModel:
    """A random model of the tokenizer's vocabulary."""
    config = tiny_config(canvas_length=L, vocab_size=len(TOKENIZER), **TWO_LAYERS)
    return init(config, seed=4, dtype=torch.float64, device="cpu", kernels="torch")


def both(writer: BlockDiffusionModel, head: NextToken, draft: str | None = None, **options: Any) -> list[Result]:
    """The answers to a request by next tokens and by verified canvases, of which the first may start from a draft."""
    settings = Generation(max_new_tokens=8 * L, eos_ids=(1,), pad_id=0)
    request = Request(0, **{"prompt": "ab", "seed": 3} | options)
    samplers = [Sampler(writer, TOKENIZER, settings, strategy=each) for each in (head, Verified(head, 2))]
    results = [*samplers[0].generate([request]), *samplers[1].generate([replace(request, draft=draft)])]
    assert not any(result.error for result in results)
    return results


@dataclass(frozen=True)
class Same(Composed):
    """A draft that is one token over and over."""

    token: int = 6

    def decide(self, canvases: Canvases) -> Decision:
        decision = super().decide(canvases)
        return replace(decision, final_BL=torch.full_like(canvases.tokens_BL, self.token))


def test_the_law_of_sampled_responses_is_that_of_the_head(writer, monkeypatch):
    """Of 1,200 responses of four tokens, each one of three, the counts fit the probabilities (chi-square)."""
    monkeypatch.setattr(writer, "canvas_length", 2)
    prompt, free, count = [9, 5], [6, 7, 8], 1200
    law = {(): 1.0}
    for _ in range(4):
        hidden = writer.encode(torch.tensor([[*prompt, *each] for each in law])).hidden[:, -1]
        p = (writer.unembed(hidden)[:, free] / 0.5).softmax(-1).tolist()
        law = {
            (*each, token): law[each] * q
            for each, row in zip(law, p, strict=True)
            for token, q in zip(free, row, strict=True)
        }
    banned = [token for token in range(writer.vocab_size) if token not in free]
    sampler = Sampler(
        writer, generation=replace(SETTINGS, max_new_tokens=4), strategy=Verified(NextToken(0.5), denoising=Same())
    )
    drawn = sampler.generate([Request(n, tokens=prompt, banned=banned) for n in range(count)], batch_size=400)
    found = Counter(tuple(result.tokens) for result in drawn)
    assert found.keys() <= law.keys() and min(law.values()) * count > 4
    chi_square = sum((found[each] - p * count) ** 2 / (p * count) for each, p in law.items())
    assert chi_square < 80 + 4 * 160**0.5  # of 80 degrees of freedom
    assert 2 < sum(result.forwards.verify for result in drawn) / count < 3.8  # drafts are accepted, and rejected


SCHEMA = {"type": "object", "properties": {"a": {"enum": [12, "b"]}, "b": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize(
    "options",
    [
        {"template": "ab<?7>c<?3>"},
        {"template": "ab<?6>"},
        {"regex": "[abc]{3,9}d+"},
        {"regex": "(ab|cd){2,6}", "template": "ab<?6>"},
        {"json_schema": SCHEMA},
        {"banned": ["ab", "c", 5], "repetition_penalty": 1.7},
        {"min_tokens": 7},
        {"regex": "[a-d]{9}", "repetition_penalty": 2.0, "draft": "abcdabcda"},
    ],
    ids=str,
)
def test_controls_hold_the_head_as_they_hold_next_tokens(writer, options, temperature):
    expected, found = both(writer, NextToken(temperature), **options)
    assert (found.tokens, found.text) == (expected.tokens, expected.text)
    assert found.finish_reason == expected.finish_reason


def test_stop_texts_scores_and_the_best_of_several_are_those_of_next_tokens(writer):
    head = NextToken(1.2)
    stop = both(writer, head, banned=[1])[0].text[6:8]
    for options in ({"stop": [stop]}, {"scores": True, "top_logprobs": 2}, {"best_of": 3}):
        expected, found = both(writer, head, banned=[1], **options)
        assert (found.text, found.tokens, found.draw) == (expected.text, expected.tokens, expected.draw)
        assert found.finish_reason == expected.finish_reason
        assert found.logprobs == (expected.logprobs and pytest.approx(expected.logprobs, abs=1e-5))
        assert len(found.top_logprobs or ()) == len(expected.top_logprobs or ())
    assert both(writer, head, banned=[1], stop=[stop])[1].finish_reason == "stop"


@pytest.mark.parametrize("seed", [1, 2])
def test_what_stands_behind_a_stop_text_is_not_held_to_the_constraint(writer, seed):
    options = {"regex": "(ab|cd){8}", "stop": ["b"], "seed": seed}
    expected, found = both(writer, NextToken(1.2), **options)
    assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)


def test_every_round_is_told_and_counted(model):
    recorder, asked = Recorder(), requests(4)
    sampler = Sampler(model, generation=SETTINGS, strategy="verified:steps=2")
    results = sampler.generate(asked, on_step=recorder.step, on_canvas=recorder.canvas)
    for result, trace in zip(results, sorted(recorder.traces, key=lambda trace: trace.id), strict=True):
        assert result.forwards.verify == len(trace.verifications)
        assert result.forwards.denoise == len(trace.steps) == sum(result.steps)
        tokens = dict[int, int]()
        for each in trace.verifications:
            assert each.given <= each.accepted <= L and each.step in [s.step for s in trace.steps_of(each.canvas)]
            told = [*each.draft[: each.accepted], *([] if each.own is None else [each.own])]
            tokens |= {each.canvas * L + place: token for place, token in enumerate(told)}
        assert [tokens[place] for place in range(len(result.tokens))] == result.tokens


def test_logits_that_are_not_finite_are_the_error_of_their_request(model, monkeypatch):
    def broken(*arguments: Any) -> Any:
        stats = predict(*arguments)
        return stats._replace(entropy=stats.entropy * torch.nan)

    monkeypatch.setattr(verification, "predict", broken)
    for result in answers(engine_of(model, "verified"), requests(2)).values():
        assert "not finite" in str(result.error) and "(canvas 1, verification 1)" in str(result.error)


# -- what is said and refused ----------------------------------------------------------------------------------


def test_text_and_temperature_set_the_head():
    assert as_strategy("verified:steps=2,temperature=0.5,top_k=4", SETTINGS) == Verified(NextToken(0.5, 4), 2)
    assert adjusted(Verified(steps=3), 0.7, top_p=0.9) == Verified(NextToken(0.7, top_p=0.9), 3)
    for text, reason in (("steps=0", "an integer from 1 to 1000"), ("bound=1", "verified has no key 'bound'")):
        with pytest.raises(RequestError, match=reason):
            as_strategy(f"verified:{text}", SETTINGS)


def test_what_cannot_be_verified_is_refused_in_one_line(model, writer):
    with pytest.raises(RequestError, match="causal model"):
        Sampler(small_model("llama"), generation=SETTINGS, strategy="verified")
    with pytest.raises(RequestError, match="another strategy"):
        Sampler(writer, TOKENIZER, SETTINGS, strategy="verified").read(["ab"], "a<?x:2>")
    with pytest.raises(RequestError, match="one of the two"):
        both(writer, NextToken(1.0, top_k=3), regex="a+")


def test_a_model_without_a_trained_head_gets_a_warning(model):
    diffusion = DiffusionSettings(objective={"ar_loss": "none"})
    with pytest.warns(UserWarning, match="which verify drafts, know nothing"):
        tokens_of(model, "verified", requests(1), diffusion=diffusion)
    with pytest.warns(UserWarning, match="which write the answer, know nothing"):
        tokens_of(model, "next_token", requests(1), diffusion=diffusion)
    learnt = replace(diffusion, objective=diffusion.objective | {"kind": "policy", "over": "next_token"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens_of(model, "next_token", requests(1), diffusion=learnt)


# -- a model that drafts for another ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, drafter, options",
    [
        ("llama", "diffusion_gemma", {"max_rows": 3}),
        ("qwen3", "minimax_m3 denoising", {}),
        ("diffusion_gemma", "qwen3 sliding, denoising", {"max_rows": 6, "capacity": 64, "chunk_tokens": 8}),
    ],
)
def test_a_canvas_model_drafts_for_another_model_of_the_same_tokens(target, drafter, options):
    verifies, drafts, asked = lopsided(small_model(target)), lopsided(small_model(drafter)), requests(4, scores=True)
    for sampling in ("temperature=0", "temperature=6,top_k=5"):
        expected = answers(engine_of(verifies, f"next_token:{sampling}"), asked)
        engine = engine_of(Drafted(verifies, drafts), f"verified:{sampling}", **{"page_tokens": 4} | options)
        for _ in range(2):
            found = answers(engine, asked)
            assert [found[n].tokens for n in expected] == [each.tokens for each in expected.values()]
            assert all(found[n].logprobs == pytest.approx(each.logprobs, abs=1e-5) for n, each in expected.items())
        assert engine.pages.statistics.reused_tokens > 0
        assert engine._scheduler.preemptions > 0 or "capacity" not in options


def test_what_cannot_draft_is_refused(model):
    with pytest.raises(BlockdiffError, match="causal"):
        Drafted(model, small_model("llama"))
    with pytest.raises(BlockdiffError, match=r"384.*96"):
        Drafted(model, init(tiny_config(), device="cpu", kernels="torch"))
    drafted = Drafted(small_model("llama"), model)
    with pytest.raises(RequestError, match="verified canvases"):
        Sampler(drafted, generation=SETTINGS, strategy="entropy_bound")
    with pytest.raises(RequestError, match="verified canvases"):
        tokens_of(drafted, None, requests(1, strategy="entropy_bound"))


@pytest.mark.parametrize("length", [1, 2, 2 * L], ids="target's canvas of {}".format)
def test_templates_end_as_the_targets_next_tokens_do_whatever_the_drafters_canvases(writer, length):
    """Of 4, 6, 8 and 11 tokens, which fill canvases of one model exactly, of both, or of none."""
    values = SMALL | {"vocab_size": len(TOKENIZER), "eos_token_id": 1, "canvas_length": length if length > 1 else None}
    target = init(LlamaConfig(**values), seed=5, dtype=torch.float64, device="cpu", kernels="torch")
    settings, head = Generation(max_new_tokens=2 * L, eos_ids=(1,), pad_id=0), NextToken(1.2)
    forms = [{"template": form} for form in ("a<?3>", "ab<?4>", "ab<?6>", "ab<?7>c<?1>")]
    forms.append({"template": "ab<?6>", "regex": "(ab|cd){2,6}"})
    asked = [Request(n, prompt="ab", scores=True, **form) for n, form in enumerate(forms)]
    pairs = [(target, head), (Drafted(target, writer), Verified(head, 2))]
    expected, found = (Sampler(each, TOKENIZER, settings, strategy=way).generate(asked) for each, way in pairs)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert {each.finish_reason for each in (*found, *expected)} == {"eos"}
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
