"""Scores by next-token prediction: exact log-probabilities, and the best of several answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from blockdiff.checkpoint import init
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.sampling import DiffusionSettings, Generation, Request, Result, Sampler, scores
from blockdiff.sampling.scores import best, next_token_logprobs, score
from blockdiff.seeding import child_seed
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.streamed import streamed

pytestmark = pytest.mark.quick

LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
SETTINGS = Generation(max_steps=3, max_new_tokens=16, eos_ids=(1,))


@pytest.fixture(scope="module")
def model():
    config = tiny_config(canvas_length=8, **TWO_LAYERS)
    made = init(config, seed=3, dtype="float64", device="cpu", kernels="torch")
    with torch.no_grad():
        for parameter in made.parameters():  # a fresh model finds every token about as probable as any other
            parameter.mul_(3.0)
    return made.eval()


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(model, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """One row alone and the log-softmax of all its logits."""
    logits = model.unembed(model.encode(torch.tensor([[*context, *continuation]])).hidden)[0].double()
    rows = logits[len(context) - 1 : -1]
    picked = rows.log_softmax(-1)[range(len(continuation)), continuation]
    return picked.tolist(), rows.argmax(-1).tolist() == continuation


PAIRS = [
    (random_tokens(length, length), random_tokens(more, 100 + more))
    for length, more in ((1, 1), (40, 3), (7, 20), (23, 9), (5, 0))
]


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 2048), (5, 2048), (2, 7), (5, 16)])
def test_a_score_is_the_log_softmax_of_next_token_logits_however_rows_are_batched_and_cut(
    model, monkeypatch, batch_size, chunk
):
    monkeypatch.setattr(scores, "CHUNK", chunk)
    with torch.no_grad():
        expected = [plain(model, *pair) if pair[1] else ([], True) for pair in PAIRS]
    found = score(model, [a for a, _ in PAIRS], [b for _, b in PAIRS], batch_size)
    for its, (logprobs, is_greedy) in zip(found, expected, strict=True):
        assert its.logprobs == pytest.approx(logprobs, abs=1e-5) and its.is_greedy == is_greedy
        assert its.total == pytest.approx(sum(logprobs), abs=1e-4)
        assert its.mean == pytest.approx(sum(logprobs) / max(1, len(logprobs)), abs=1e-5)


@torch.no_grad()
def test_the_most_probable_continuation_is_greedy_and_no_other_is(model):
    context, chosen = random_tokens(6, 1), []
    for _ in range(4):
        hidden = model.encode(torch.tensor([context + chosen])).hidden
        chosen.append(int(model.unembed(hidden[:, -1]).argmax()))
    other = [*chosen[:-1], (chosen[-1] + 1) % 384]
    assert [each.is_greedy for each in score(model, [context] * 2, [chosen, other])] == [True, False]


def test_a_score_needs_a_context(model):
    with pytest.raises(ValueError, match="bos"):
        score(model, [[]], [[5]])


@torch.no_grad()
def test_a_canvas_is_scored_from_its_own_encode_and_the_token_before_it(model):
    context, first, second = random_tokens(9, 2), random_tokens(8, 3), random_tokens(8, 4)
    prefix = model.encode(torch.tensor([context]))
    found, before_D = [], prefix.hidden[0, -1]
    for canvas in (first, second):
        prefix = model.encode(torch.tensor([canvas]), prefix=prefix)
        logprobs, _ = next_token_logprobs(model, before_D, prefix.hidden[0], torch.tensor(canvas))
        found += logprobs.tolist()
        before_D = prefix.hidden[0, -1]
    assert found == pytest.approx(score(model, [context], [first + second])[0].logprobs, abs=1e-5)


def sampler_of(model, **diffusion) -> Sampler:
    return Sampler(model, LETTERS, SETTINGS, DiffusionSettings(**diffusion))


def test_a_result_has_the_log_probability_of_every_token_of_it_where_asked_for(model):
    asked = [Request("a", prompt="abc", scores=True), Request("b", prompt="abcdef")]
    with_scores, without = sampler_of(model).generate(asked, seed=4)
    prompt = [2, *LETTERS("abc", add_special_tokens=False)["input_ids"]]
    expected = score(model, [prompt], [with_scores.tokens])[0]
    assert with_scores.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    assert with_scores.score == pytest.approx(expected.mean) and len(with_scores.logprobs) == len(with_scores.tokens)
    assert with_scores.to_record()["score"] == with_scores.score
    assert without.logprobs is without.score is None and not {"logprobs", "score", "draw"} & without.to_record().keys()


def test_scores_change_no_token(model):
    plain = sampler_of(model).generate([Request("a", prompt="abc")], seed=4)[0]
    assert sampler_of(model).generate([Request("a", prompt="abc", scores=True)], seed=4)[0].tokens == plain.tokens


def test_the_best_of_several_draws_is_the_one_with_the_highest_mean(model):
    seeds = [7, *(child_seed(7, n) for n in (1, 2, 3))]
    each = sampler_of(model).generate([Request("a", prompt="abc", seed=seed, scores=True) for seed in seeds])
    assert len({tuple(result.tokens) for result in each}) == 4
    expected = max(range(4), key=lambda draw: each[draw].score)
    events: list[object] = []
    (found,) = sampler_of(model).generate(
        [Request("a", prompt="abc", seed=7, best_of=4)], batch_size=3, on_canvas=lambda c: events.append(c.id)
    )
    assert (found.id, found.draw, found.tokens) == ("a", expected, each[expected].tokens)
    assert found.logprobs == pytest.approx(each[expected].logprobs, abs=1e-6)
    assert set(events) == {"a", "a draw 1", "a draw 2", "a draw 3"}


def result(draw: int, *logprobs: float, token: int | None = None) -> Result:
    return Result(
        "a", "", [draw if token is None else token] * len(logprobs), "eos", [1], logprobs=list(logprobs), draw=draw
    )


def test_the_mean_decides_and_not_the_sum_and_a_failed_draw_never_wins():
    failed = Result.failed("a", "no")
    assert best([failed, result(1, -0.9), result(2, -0.1, -0.1, -2.0), result(3, -0.9)]).draw == 2
    assert best([failed, result(1, -0.9), result(2, -0.9)]).draw == 1
    assert best([result(0, -3.0), result(1, -1.0, -1.0, -1.0, -1.0)]).draw == 1
    assert best([failed, failed]).error == "no"
    assert math.isclose(result(0, -1.0, -3.0).score or 0, -2.0)


def test_of_draws_of_the_same_tokens_the_first_is_given_whatever_rounding_says_of_their_scores():
    same = [result(1, -0.9, token=7), result(2, -0.9 + 1e-7, token=7)]
    assert best([result(0, -1.0), *same]).draw == 1
    assert best([replace(same[0], finish_reason="cancelled"), same[1]]).draw == 2


def test_a_model_trained_without_the_next_token_loss_warns_that_scores_say_nothing(model):
    asked = [Request("a", prompt="abc", scores=True)]
    with pytest.warns(UserWarning, match="trained without the next-token loss"):
        sampler_of(model, objective={"ar_loss": "none"}).generate(asked, max_steps=1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, 2000])
def test_a_number_of_draws_that_cannot_be_is_an_error_of_that_request_alone(model, number):
    asked = [Request("a", prompt="abc", best_of=number), Request("b", prompt="abc")]
    bad, good = streamed(sampler_of(model), asked, max_steps=1)
    assert "best_of must be an integer from 1" in str(bad.error) and good.error is None


def test_a_draw_that_was_cancelled_or_not_scored_to_its_end_is_not_the_best():
    whole = Result("a", "x", [3, 4], "eos", [1], logprobs=[-5.0, -5.0])
    cancelled = Result("a", "", [], "cancelled", [], logprobs=[])
    cut = Result("a", "y", [3, 4], "eos", [1], logprobs=[-0.1])
    assert best([cancelled, cut, whole]) is whole
