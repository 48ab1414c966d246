"""Decisions: questions are written one way, and their probabilities are those of the model's own logits in the slot."""

from __future__ import annotations

import json

import pytest
import torch

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator
from blockdiff.data.sources import Source, read_rows
from blockdiff.decisions.form import Asking, ask_jointly, ask_one, with_question
from blockdiff.decisions.question import read_questions, read_systemone
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import RequestError
from blockdiff.sampling import Engine, Request, Result, Sampler
from blockdiff.sampling.calibration import fit_temperature
from blockdiff.sampling.canvas_control import FREE
from blockdiff.sampling.decide import RunningDecision, answer_of
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.little_model import LITTLE, save_preset

pytestmark = pytest.mark.quick
TEMPLATE = (
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
TOKENIZER = chat_tokenizer(TEMPLATE)
GENERATION = Generation(max_steps=8, eos_ids=(1,), stability=8)
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it spam?", "name": "spam"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": True, "description": "yes"}]},
    {"type": "score", "instructions": "How good?", "levels": [{"label": "bad"}, {"label": "fair"}, {"label": "good"}]},
]
SYSTEMONE = {
    "spam": {"type": "noul", "instructions": "Is it spam?", "criteria": {"true": "an advertisement"}},
    "which": {"type": "choice", "instructions": "Which?", "criteria": {"a": "the first", "b": None}},
    "good": {"type": "score", "instructions": "", "criteria": ["bad", "fair"]},
}


def made(folder, canvas_length: int):
    text = {**LITTLE["text_config"], "vocab_size": len(TOKENIZER)}
    save_preset(folder / "preset.json", {**LITTLE, "text_config": text, "canvas_length": canvas_length})
    return init(folder / "preset.json", seed=1, dtype="float64")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), 16)


def test_a_question_is_written_one_way():
    predicate, choice, score = (ask_one(each, "decisions") for each in read_questions(QUESTIONS))
    assert predicate.text == (
        "Question: Is it spam?\nA: false\nB: true\nAnswer with the letter of one option and nothing else."
    )
    assert choice.text.splitlines()[1:3] == ['A: "a"', "B: true - yes"]
    assert score.text.splitlines()[1:4] == ["A: bad", "B: fair", "C: good"]
    assert predicate.template == "<?q1>" and predicate.choices(predicate.spaces) == {"q1": ["A", "B"]}

    side, letter, level = (ask_one(each, "systemone") for each in read_systemone(SYSTEMONE))
    assert side.text.splitlines()[1:] == [
        "no", "yes: an advertisement", "Answer with yes or no and nothing else."
    ]  # fmt: skip
    assert letter.text.splitlines()[1:3] == ["A: a - the first", "B: b"]
    assert level.text.splitlines() == ["0: bad", "1: fair", "Answer with the number of one level and nothing else."]


def test_questions_are_asked_jointly_as_numbered_lines():
    asked = ask_jointly(read_questions(QUESTIONS), "decisions")
    assert asked.template == "1:<?q1>\n2:<?q2>\n3:<?q3>"
    assert asked.choices(asked.spaces)["q2"] == [" A", " B", "A", "B"]
    assert "Question 2: Which?" in asked.text
    assert ask_jointly(read_questions(QUESTIONS[:1]), "decisions").template == "<?q1>"


def test_a_question_follows_the_state():
    asked = ask_one(read_questions(QUESTIONS)[0], "decisions")
    assert with_question([{"role": "user", "content": "s"}], asked)[-1]["content"] == f"s\n\n{asked.text}"
    after = with_question([{"role": "user", "content": "s"}, {"role": "assistant", "content": "x"}], asked)
    assert [each["role"] for each in after] == ["user", "assistant", "user"] and after[-1]["content"] == asked.text


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([], "1 to 400 questions, got 0"),
        ([{"type": "guess", "instructions": "x"}], r"questions\[0\].type must be predicate, choice or score"),
        ([{"type": "predicate", "instructions": " "}], r"questions\[0\].instructions is empty"),
        ([{"type": "predicate", "instructions": "x", "levels": []}], "a predicate, which has no levels"),
        ([{"type": "score", "instructions": "x"}], "a score, which needs levels"),
        ([{**QUESTIONS[1], "choices": [{"value": "a"}, {"value": "a"}]}], 'has "a" twice'),
        ([{**QUESTIONS[1], "choices": [{"value": "a"}, {"value": 1}]}], r"choices\[1\].value must be text, true or"),
        ([{**QUESTIONS[1], "choice": 1}], "unknown key 'choice'"),
        ([{"type": "predicate", "instructions": [{"type": "input_file"}]}], "must be a part of type input_text"),
    ],
)
def test_what_is_no_question_is_refused(questions, words):
    with pytest.raises(RequestError, match=words):
        read_questions(questions)


def test_true_and_the_text_true_are_two_choices():
    [question] = read_questions([{**QUESTIONS[1], "choices": [{"value": "true"}, {"value": True}]}])
    assert question.place_of(True) == 1 and question.place_of("true") == 0
    with pytest.raises(RequestError, match="1 is no answer"):
        question.place_of(1)


@torch.no_grad()
def test_probabilities_are_the_softmax_of_the_logits_in_the_slot(model):
    sampler, questions = Sampler(model, TOKENIZER, GENERATION), read_questions(QUESTIONS)
    [answers] = sampler.decide([Request("s", prompt="buy now", seed=3)], questions, Asking(draws=2))
    for question, answer in zip(questions, answers, strict=True):
        asked = ask_one(question, "decisions")
        messages = with_question([{"role": "user", "content": "buy now"}], asked)
        place = questions.index(question)
        request = Request(f"s/{place}", messages=messages, seed=3, allow_control_tokens=True)
        [read] = sampler.read([request], "<?q1><turn|>\n", asked.choices([""]), draws=2)
        assert list(answer.probabilities) == pytest.approx([*read.probabilities["q1"].values()], abs=1e-12)
        assert sum(answer.probabilities) == pytest.approx(1) and 0 < answer.label_mass < 1
    assert answers[0].to_record() == {
        "type": "predicate", "name": "spam", "probability": answers[0].probabilities[1]
    }  # fmt: skip
    levels = answers[2].to_record()
    assert levels["score"] == pytest.approx(
        sum(each["value"] * each["probability"] for each in levels["probabilities"])
    )


@torch.no_grad()
def test_joint_answers_fill_as_few_canvases_as_hold_them(model):
    sampler = Sampler(model, TOKENIZER, GENERATION)
    questions = read_questions(QUESTIONS[:1] * 5)  # a line has 4 tokens: 16 hold 3 lines and the end
    before = sampler.encoded_tokens
    [answers] = sampler.decide([Request(0, prompt="x", seed=1)], questions, Asking(joint=True, draws=1))
    assert len(answers) == 5 and all(sum(each.probabilities) == pytest.approx(1) for each in answers)
    assert sampler.encoded_tokens > before
    with pytest.raises(RequestError, match="not tokens"):
        sampler.decide([Request(0, tokens=[2, 3])], questions)


@torch.no_grad()
def test_canvases_are_as_narrow_as_the_answers_and_run_beside_others(model, tmp_path):
    wide, narrow = Sampler(made(tmp_path, 64), TOKENIZER, GENERATION), Sampler(model, TOKENIZER, GENERATION)
    questions, request = read_questions(QUESTIONS[:1] * 7), Request("s", prompt="buy now", seed=3)
    for asking in (Asking(draws=2), Asking(joint=True, draws=1)):
        running = RunningDecision.prepare(request, questions, wide.model, wide.settings, asking)
        widths = {draw.canvas_length for draws in running.sequences for draw in draws}
        assert widths == ({32} if asking.joint else {16})  # 7 lines of 4 tokens, and 2 that end the turn
        engine = Engine(wide.model, settings=wide.settings)
        answer = engine.submit(Request("text", prompt="hi", max_new_tokens=64))
        for draws in running.sequences:
            engine.submit(draws[0].request, draws=draws)
        while engine.step():
            pass
        results = {event.id: event for event in engine.events() if isinstance(event, Result)}
        [alone] = wide.generate([Request("text", prompt="hi", max_new_tokens=64)])
        assert results[answer].tokens == alone.tokens
        if not asking.joint:
            [expected] = narrow.decide([request], questions, asking)
            for one, other in zip(running.answers(), expected, strict=True):
                assert one.probabilities == pytest.approx(other.probabilities, abs=1e-12)


@pytest.mark.parametrize("joint", [False, True])
def test_a_decision_is_read_in_the_canvas_that_it_is_learnt_in(tmp_path, joint):
    wide = Sampler(made(tmp_path, 64), TOKENIZER, GENERATION)
    row = {"input": "buy now", "questions": QUESTIONS, "answers": [True, "a", 2], "joint": joint}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    examples = Encoder(TOKENIZER, eos_id=1, canvas_length=64).encode(list(read_rows(Source(tmp_path / "rows.jsonl"))))[
        0
    ]
    collator = Collator(64, pad_id=0, fill_id=1, seed=3, time=StratifiedTime(), scores_ar=False)
    slots = range(len(examples))
    learnt = collator.rows(examples, epoch=0, step=1, slots=slots, total_slots=len(examples))
    asking, request = Asking(joint=joint, draws=1), Request("s", prompt="buy now")
    running = RunningDecision.prepare(request, read_questions(QUESTIONS), wide.model, wide.settings, asking)
    for row_learnt, [sequence] in zip(learnt, running.sequences, strict=True):
        [canvas] = row_learnt.canvases
        assert sequence.prompt_tokens == list(row_learnt.tokens) and sequence.canvas_length == canvas.length
        given = [canvas.tokens[place] if place in canvas.pinned else FREE for place in range(canvas.length)]
        assert sequence.control.pins == given and given.count(FREE) == (3 if joint else 1)
        assert canvas.t == 1.0  # a slot is read from noise alone


def test_an_answer_takes_the_likelier_spelling_and_the_mass_of_both():
    [question] = read_questions(QUESTIONS[:1])
    p_SNX = torch.tensor([[[0.2, 0.1]], [[0.05, 0.3]]], dtype=torch.float64)
    answer = answer_of(question, p_SNX.log(), None)
    assert answer.probabilities == pytest.approx((0.4, 0.6)) and answer.label_mass == pytest.approx(0.65)
    assert answer.confidence == pytest.approx(0.6 * 0.65) and not answer.is_calibrated
    calmer = answer_of(question, p_SNX.log(), 2.0)
    assert calmer.probabilities[1] == pytest.approx(0.3**0.5 / (0.3**0.5 + 0.2**0.5))


def test_the_temperature_of_a_sure_model_is_found():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, dtype=torch.float64, generator=generator)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    targets = torch.nn.functional.one_hot(truth, 3).double()
    fit = fit_temperature(list(3 * logits), list(targets))
    assert fit.temperature == pytest.approx(3, rel=0.1) and fit.after < fit.before and not fit.is_at_bound
