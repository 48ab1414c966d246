"""The measurement of reads: its questions have their answers in them, and its error is that of the definition."""

from __future__ import annotations

import pytest
import torch

from benchmarks.reads import Question, calibration_error, cells, lines_of, words
from blockdiff.checkpoint import init
from blockdiff.data.tokenizer import byte_level_bpe, character_tokenizer
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.little_model import LITTLE, save_preset

pytestmark = pytest.mark.quick


def test_the_calibration_error_is_the_distance_of_confidence_and_accuracy() -> None:
    top = torch.tensor([0.75] * 4 + [0.95] * 4, dtype=torch.float64)
    right = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1], dtype=torch.float64)
    assert calibration_error(top, right) == pytest.approx((0 * 4 + 0.7 * 4) / 8)
    assert calibration_error(torch.ones(3).double(), torch.ones(3).double()) == 0


def filled(question: Question) -> str:
    text = question.template
    for name, truth in question.truth.items():
        assert truth in question.choices[name]
        text = text.replace(f"<?{name}>", truth)
    return text


def test_questions_are_answers_with_holes() -> None:
    row = {"prompt": "14.332....3.431.=", "response": "1423324121344312"}
    for is_rest_written, count in ((True, 1), (False, 7)):
        [question] = cells([row], is_rest_written)
        assert filled(question) == row["response"] and len(question.truth) == count
    answers = ["3 + 4 = 7.", "Hello! How can I help you?", "9 - 4 = 5."]
    talk = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": a}]} for a in answers]
    asked = words(talk, byte_level_bpe(answers, 300), 40)
    assert [filled(question) for question in asked] == [answers[0], answers[2]]


def test_every_number_of_steps_and_draws_has_a_line(tmp_path) -> None:
    save_preset(tmp_path / "preset.json", LITTLE)
    model = init(tmp_path / "preset.json", seed=1)
    sampler = Sampler(model, character_tokenizer("abcd"), Generation(max_steps=3, eos_ids=(1,)))
    question = Question(
        Request(0, prompt="ab"), "c<?x>d<?y>", {"x": ["a", "b"], "y": ["aa", "bd"]}, {"x": "a", "y": "bd"}
    )
    lines = list(lines_of("toy", sampler, [question]))
    assert [(line.steps, line.draws, line.holes) for line in lines] == [(s, d, 2) for s in (1, 2, 4) for d in (1, 2, 4)]
    assert all(line.accuracy in (0, 0.5, 1) and 0 <= line.calibration_error <= 1 for line in lines)
