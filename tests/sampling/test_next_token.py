"""Next-token sampling: greedy as transformers generates, seeded draws, filters, stop texts, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import blockdiff
from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling import CommittedCanvas, Engine, Request, Result, Sampler
from blockdiff.sampling.constraints.token_automaton import TokenAutomaton
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategies import NextToken, as_strategy
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.families import small_model
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick
LONG = 24
SETTINGS = Generation(max_new_tokens=LONG, eos_ids=(2,), pad_id=0)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def ask(model: BlockDiffusionModel, tokens: list[list[int]], strategy: Any = None, **request: Any) -> list[list[int]]:
    sampler = Sampler(model, generation=SETTINGS, strategy=strategy)
    requests = [Request(**{"id": n, "tokens": each} | request) for n, each in enumerate(tokens)]
    results = sampler.generate(requests, seed=3)
    assert all(result.error is None for result in results)
    return [result.tokens for result in results]


def one_by_one(model: BlockDiffusionModel, tokens: list[int], count: int = LONG) -> list[int]:
    """Greedy decoding as it is defined: the whole row is encoded for every token."""
    row = list(tokens)
    for _ in range(count):
        row.append(int(model.unembed(model.encode(torch.tensor([row])).hidden[0, -1]).argmax()))
        if row[-1] == 2:
            break
    return row[len(tokens) :]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def causal() -> BlockDiffusionModel:
    return small_model("llama")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3 sliding, denoising"])
def test_greedy_decoding_is_that_of_transformers(name, tmp_path):
    model = small_model(name)
    blockdiff.save(model, tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64).eval()
    tokens = prompts(5, 40, 17)
    found = ask(model, tokens, "next_token")
    for prompt, mine in zip(tokens, found, strict=True):
        truth = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=LONG, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert mine == truth[0, len(prompt) :].tolist()


def test_a_causal_model_is_sampled_token_by_token_without_being_asked(causal):
    sampler = Sampler(causal, generation=SETTINGS)
    assert sampler.strategy == NextToken()
    (result,) = sampler.generate([Request("a", tokens=prompts(9)[0])])
    assert result.tokens == one_by_one(causal, prompts(9)[0]) and set(result.steps) == {1}
    assert len(result.steps) == len(result.tokens)


def test_a_denoiser_can_be_sampled_by_its_next_token_predictions():
    model = small_model("diffusion_gemma")
    tokens = prompts(9, 21)
    assert ask(model, tokens, "next_token") == [one_by_one(model, each) for each in tokens]


def test_draws_follow_from_the_seed_of_the_request_whatever_runs_beside_it(causal):
    tokens = prompts(9, 9, 30)
    hot = NextToken(temperature=1.5)
    together = ask(causal, tokens, hot)
    assert [ask(causal, tokens[:1], hot)[0], together[1]] == together[:2] and together[0] != together[1]
    same = ask(causal, [tokens[0], tokens[0]], hot, seed=7)
    assert same[0] == same[1] != together[0]
    assert ask(causal, tokens, "next_token:temperature=1.5") == together


def test_draws_have_the_models_distribution(causal):
    """Of 2,000 draws of one token the shares lie within 5 standard errors of their probabilities."""
    prompt, count = prompts(6)[0], 2000
    p = (causal.unembed(causal.encode(torch.tensor([prompt])).hidden[0, -1]) / 2.0).softmax(-1)
    sampler = Sampler(causal, generation=replace(SETTINGS, max_new_tokens=1), strategy=NextToken(2.0))
    drawn = sampler.generate([Request(n, tokens=prompt) for n in range(count)], batch_size=500)
    share = torch.bincount(torch.tensor([each.tokens[0] for each in drawn]), minlength=96) / count
    assert ((share - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1e-9).all() and float(p.max()) < 0.9


def test_every_row_has_a_temperature_of_its_own(causal):
    tokens = prompts(9, 9, 30, 14)
    said = ["next_token:temperature=0", "next_token:temperature=0.7", "next_token:temperature=1.5",
            "next_token:temperature=1.5,top_p=0.9"]  # fmt: skip
    sampler = Sampler(causal, generation=SETTINGS)
    asked = [Request(n, tokens=each, strategy=how) for n, (each, how) in enumerate(zip(tokens, said, strict=True))]
    together = sampler.generate(asked, seed=3)
    for request, found in zip(asked, together, strict=True):
        assert found.error is None and found.tokens == sampler.generate([request], seed=3)[0].tokens
    assert together[0].tokens == one_by_one(causal, tokens[0])


def test_only_the_last_token_of_a_prompt_meets_the_head(causal, monkeypatch):
    seen: list[int] = []
    stats = type(causal.vocabulary).stats

    def noted(vocabulary: Any, hidden_BLD: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen.append(hidden_BLD.shape[0] * hidden_BLD.shape[1])
        return stats(vocabulary, hidden_BLD, *rest, **named)

    monkeypatch.setattr(type(causal.vocabulary), "stats", noted)
    monkeypatch.setattr(type(causal.vocabulary), "logits", None)
    found = ask(causal, prompts(30, 17))
    assert sum(seen) == sum(map(len, found)) and seen[0] == 2


def test_filters_leave_the_likeliest_tokens(causal):
    tokens = prompts(9, 21)
    greedy = ask(causal, tokens)
    for keys in ("top_k=1", "top_p=0.000001", "min_p=1"):
        assert ask(causal, tokens, f"next_token:temperature=1.5,{keys}") == greedy
    with pytest.raises(RequestError, match=r"top_p .*0"):
        as_strategy("next_token:top_p=0", SETTINGS)
    with pytest.raises(RequestError, match="'confidence'"):
        as_strategy("next_token:confidence=0", SETTINGS)


def test_settings_of_the_model_say_how_it_is_sampled():
    theirs = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]}
    read = Generation.from_dict(theirs)
    assert as_strategy(None, read, denoises=False) == NextToken(0.6, 50, 0.9)
    assert Generation.from_dict(read.to_dict()) == read
    greedy = Generation.from_dict(theirs | {"do_sample": False})
    assert as_strategy(None, greedy, denoises=False) == NextToken()
    assert "do_sample" not in greedy.to_dict()


def test_prompts_that_are_shared_or_preempted_give_the_same_tokens(causal):
    tokens = prompts(40, 33, 38)
    tokens += [tokens[0], tokens[1]]
    alone = [ask(causal, [each])[0] for each in tokens]
    engine = Engine(causal, generation=SETTINGS, page_tokens=8, capacity=120, max_rows=3, chunk_tokens=16)
    for n, each in enumerate(tokens):
        engine.submit(Request(n, tokens=each))
    while engine.step():
        pass
    results = {event.id: event.tokens for event in engine.events() if isinstance(event, Result)}
    assert [results[n] for n in range(5)] == alone
    assert engine.pages.statistics.reused_tokens > 0 and engine._scheduler.preemptions > 0
    engine.pages.check()


def test_scores_are_those_of_the_tokens(causal):
    prompt = prompts(9)[0]
    sampler = Sampler(causal, generation=SETTINGS, strategy=NextToken(1.2))
    (scored,) = sampler.generate([Request("a", tokens=prompt, scores=True)])
    (plain,) = sampler.generate([Request("a", tokens=prompt)])
    assert scored.tokens == plain.tokens and scored.logprobs is not None
    row = torch.tensor([[*prompt, *scored.tokens]])
    truth = causal.unembed(causal.encode(row).hidden[0]).log_softmax(-1)
    for place, (token, logprob) in enumerate(zip(scored.tokens, scored.logprobs, strict=True), len(prompt) - 1):
        assert abs(float(truth[place, token]) - logprob) < 1e-5


# -- texts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writer() -> tuple[BlockDiffusionModel, Any]:
    """A causal model of a tokenizer's vocabulary."""
    tokenizer = chat_tokenizer()
    from tests.support.families import CONFIGS

    config = CONFIGS["llama"]()
    config.vocab_size = len(tokenizer)
    return blockdiff.init(config, seed=1, kernels="torch", device="cpu"), tokenizer


def test_a_response_ends_before_the_first_stop_text(writer):
    model, tokenizer = writer
    sampler = Sampler(model, tokenizer, replace(SETTINGS, eos_ids=()), strategy=NextToken(1.0))
    (whole,) = sampler.generate([Request("a", prompt="Hello")])
    stop = whole.text[len(whole.text) // 2 :][:2]
    (cut,) = sampler.generate([Request("a", prompt="Hello", stop=[stop, "never said"])])
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.steps) == len(cut.tokens)
    assert stop in tokenizer.decode(cut.tokens) and stop not in tokenizer.decode(cut.tokens[:-1])
    with pytest.raises(RequestError, match=r"stop .*list of "):
        Request("a", prompt="x", stop="y").check()


def test_constraints_hold_token_by_token(writer):
    model, tokenizer = writer
    sampler = Sampler(model, tokenizer, replace(SETTINGS, eos_ids=(tokenizer.eos_token_id,)), strategy=NextToken(1.0))
    (found,) = sampler.generate([Request("a", prompt="Hello", regex="[ab]{3,5}!")])
    assert found.error is None and found.text[-1] == "!" and 4 <= len(found.text) <= 6
    sampler = Sampler(model, tokenizer, sampler.generation, strategy=NextToken(1.0, top_k=5))
    with pytest.raises(RequestError, match="draws"):
        sampler.generate([Request("a", prompt="Hello", regex="[ab]{3,5}!")])


# -- what is refused -------------------------------------------------------------------------------------------


def test_what_denoises_is_refused_of_a_causal_model(causal):
    with pytest.raises(RequestError, match="causal model"):
        Sampler(causal, generation=SETTINGS, strategy="quota")
    sampler = Sampler(causal, generation=SETTINGS)
    with pytest.raises(RequestError, match="not both"):
        sampler.generate([Request("a", tokens=[3], strategy="quota")])
    with pytest.raises(RequestError, match="tokenizer"):
        sampler.generate([Request("a", tokens=[3], stop=["x"])])


@pytest.mark.parametrize("strategy", ["next_token:temperature=1.0", "verified"])
def test_a_commit_takes_no_more_work_when_the_answer_is_longer(strategy, monkeypatch):
    """Automata go on from their states, and only what is read is decoded."""
    ran, decoded, run, text = [], [], TokenAutomaton.run, SamplingSettings.text
    count_run = lambda self, tokens, state=0: ran.append(len(tokens)) or run(self, tokens, state)  # noqa: E731
    count_text = lambda self, tokens: decoded.append(len(tokens)) or text(self, tokens)  # noqa: E731
    monkeypatch.setattr(TokenAutomaton, "run", count_run)
    monkeypatch.setattr(SamplingSettings, "text", count_text)
    model = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    settings = Generation(max_new_tokens=96)
    engine = Engine(model, character_tokenizer("abc"), settings, strategy=strategy)
    engine.submit(Request(0, tokens=[5], seed=1, regex="[abc]{90,96}", stop=["abcabcabcabc"], repetition_penalty=1.1))
    work, events = [], []
    while engine.step():
        work.append((sum(ran), sum(decoded)))
        ran.clear()
        decoded.clear()
        events += engine.events()
    assert len(work) > 10 and all(steps <= 2 * 8 + 1 and tokens <= 64 for steps, tokens in work)
    committed = [event for event in events if isinstance(event, CommittedCanvas)]
    assert all(committed[n].text.startswith(committed[n - 1].text) for n in range(1, len(committed)))
