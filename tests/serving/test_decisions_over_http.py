"""Typed decisions over HTTP: OpenAI's client gets what `Sampler.decide` says; what is refused is refused by name."""

from __future__ import annotations

import asyncio

import pytest

from blockdiff.decisions import Asking, read_questions, read_systemone
from blockdiff.sampling import Request, Sampler
from tests.support.asking import served

QUESTIONS = [
    {"type": "predicate", "instructions": "Is it spam?", "name": "spam"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": True}]},
    {"type": "score", "instructions": "How good?", "levels": [{"label": "bad"}, {"label": "good"}]},
]
SYSTEMONE = {
    "which": {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": "the other"}},
    "good": {"type": "score", "instructions": "How good?", "criteria": ["bad", "good"]},
}


def test_openais_client_gets_the_answers_of_the_sampler(chatty: Sampler):
    async def use(asking):
        return await asking.openai.decisions.create(
            model="blockdiff",
            input=[{"role": "system", "content": "Be fair."}, {"role": "user", "content": "buy now"}],
            questions=QUESTIONS,
            extra_body={"seed": 5, "draws": 2},
        )

    found = served(chatty, use)
    messages = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "buy now"}]
    given = [Request("x", messages=messages, seed=5)]
    [answers] = chatty.decide(given, read_questions(QUESTIONS), Asking(draws=2))
    predicate, choice, score = found.answers
    assert predicate.type == "predicate" and predicate.name == "spam"
    assert predicate.probability == pytest.approx(answers[0].probabilities[1], rel=1e-5)
    assert [each.probability for each in choice.probabilities] == pytest.approx(answers[1].probabilities, rel=1e-5)
    assert choice.choice in ("a", True) and [each.value for each in choice.probabilities] == ["a", True]
    assert score.score == pytest.approx(answers[2].score, rel=1e-5)
    assert [each.label for each in score.probabilities] == ["bad", "good"]
    assert found.usage.output_tokens == 3
    assert found.usage.total_tokens == found.usage.input_tokens + 3


def test_questions_of_systemone_are_answered_by_their_ids(chatty: Sampler):
    async def use(asking):
        body = {"state": {"text": "buy now"}, "questions": SYSTEMONE, "seed": 5, "draws": 1, "instructions": "Be fair."}
        return (await asking.http.post("/v1/systemone", json=body)).json()

    found = served(chatty, use)
    messages = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": '{"text": "buy now"}'}]
    given = [Request("x", messages=messages, seed=5)]
    [answers] = chatty.decide(given, read_systemone(SYSTEMONE), Asking("systemone", draws=1))
    which, good = (found["answers"][name] for name in ("which", "good"))
    assert list(which["probabilities"].values()) == pytest.approx(answers[0].probabilities, rel=1e-5)
    assert which["label_mass"] == pytest.approx(answers[0].label_mass, rel=1e-4) and not which["calibrated"]
    assert good["legend"] == ["bad", "good"] and good["score"] == pytest.approx(answers[1].score, rel=1e-5)


def test_parts_of_json_are_read_as_text_and_a_seed_answers_alike(chatty: Sampler):
    parts = [{"type": "input_text", "text": "A row:"}, {"type": "input_json", "data": {"a": [1, None]}}]

    async def use(asking):
        body = {"input": [{"role": "user", "content": parts}], "questions": QUESTIONS[:1], "seed": 1}
        return [(await asking.http.post("/v1/decisions", json=body)).json() for _ in range(2)]

    first, second = served(chatty, use)
    one, other = (found["answers"][0]["probability"] for found in (first, second))
    assert one == pytest.approx(other, rel=1e-5)  # the second reads a cached prefix


def test_what_is_no_decision_is_refused_by_name(chatty: Sampler):
    plain = {"input": "x", "questions": QUESTIONS[:1]}
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    pictures = {"type": "predicate", "instructions": [{"type": "input_text", "text": "x"}, *[part] * 17]}
    few = {"type": "choice", "instructions": "x", "choices": []}
    wrong = [
        (plain | {"questions": []}, "1 to 400 questions"),
        (plain | {"draws": 1000}, "draws"),
        (plain | {"questions": [few]}, "choices must be a list of 2"),
        (plain | {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
        (
            plain | {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]},
            "no address",
        ),
        (plain | {"questions": [pictures]}, "the images of questions"),
        (plain | {"colour": 1}, "colour: is not a field of /v1/decisions"),
    ]

    async def use(asking):
        return await asyncio.gather(*(asking.refusal("/v1/decisions", **body) for body, _ in wrong))

    noul = {"spam": {"type": "noul", "instructions": "Is it spam?"}}

    async def ask_systemone(asking):
        return await asking.refusal("/v1/systemone", state="x", questions=noul)

    assert "the label 'no' is no single token" in served(chatty, ask_systemone)[1]["message"]
    for (status, error), (_, words) in zip(served(chatty, use), wrong, strict=True):
        assert status == 400 and words in error["message"]
