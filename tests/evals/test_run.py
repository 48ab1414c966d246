"""The runner of the tasks: what is asked, how long an answer can be, and what is counted."""

from __future__ import annotations

import pytest

from blockdiff.data.chat import Encoder
from blockdiff.data.rows import Row
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.evals import task
from blockdiff.evals.questions import longest_response, questions_of
from blockdiff.evals.run import evaluate
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.quick

EXACT, GSM8K = task("exact"), task("gsm8k")
LETTERS = character_tokenizer("abcdefgh #0123456789")


def messages(*pairs: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in pairs)


def pair(prompt: str, response: str, place: int = 1) -> Row:
    return Row(f"f.jsonl:{place}", prompt=prompt, response=response)


def test_a_conversation_is_asked_up_to_its_last_assistant_turn():
    row = Row(
        "f.jsonl:1",
        messages=messages(
            ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")
        ),
        id="x",
    )
    (question,) = questions_of([row], EXACT)
    assert question.prompt == row.messages[:4] and question.reference == "d"
    assert question.last_message == "c"
    report = evaluate(ScriptedSampler(LETTERS, [("d", [2, 4])]), [row], EXACT)
    assert report["solved"] == 1 and report["steps_per_canvas"] == 3.0
    assert report["records"][0]["id"] == "x"


def test_a_turn_in_several_messages_is_one_reference():
    row = Row("f:1", messages=messages(("user", "a"), ("assistant", "b "), ("assistant", "c")))
    (question,) = questions_of([row], EXACT)
    assert (question.prompt, question.reference) == (row.messages[:1], "bc")


def test_a_conversation_that_the_assistant_opens_asks_nothing():
    row = Row("f.jsonl:7", messages=messages(("assistant", "hello"), ("user", "bye")))
    with pytest.raises(DataError, match=r"f\.jsonl:7: .*before"):
        questions_of([row], EXACT)


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(DataError, match="no rows"):
        questions_of([], EXACT)


def test_a_response_has_the_room_of_the_longest_reference_unless_longer_ones_can_be_right():
    rows = [pair("a", "b"), pair("a", "abcd")]
    sampler = ScriptedSampler(LETTERS, [("b", [1])] * 2, max_new_tokens=99)
    assert longest_response(sampler, questions_of(rows, EXACT), EXACT) == 5
    solved = [pair("a", "#### 1")]
    assert longest_response(sampler, questions_of(solved, GSM8K), GSM8K) == 99
    assert (
        longest_response(ScriptedSampler(LETTERS, []), questions_of(solved, GSM8K), GSM8K) == 7
    )  # never less than the reference
    evaluate(sampler, rows, EXACT)
    assert sampler.asked["max_new_tokens"] == 5
    evaluate(sampler, rows, EXACT, max_new_tokens=3)
    assert sampler.asked["max_new_tokens"] == 3


def test_a_reference_that_the_tokenizer_cannot_encode_is_named():
    with pytest.raises(DataError, match=r"f\.jsonl:2: .*response"):
        evaluate(ScriptedSampler(LETTERS, []), [pair("a", "b"), pair("a", "xyz", 2)], EXACT)


def test_an_unanswered_row_is_an_error_and_not_solved():
    report = evaluate(ScriptedSampler(LETTERS, [(None, []), ("b", [3])]), [pair("a", "b"), pair("a", "b")], EXACT)
    assert (report["errors"], report["solved"], report["count"]) == (1, 1, 2)
    assert report["records"][0]["error"] == "f.jsonl:1: no"
    assert report["steps_per_canvas"] == 3.0


CHATS = [
    Row("f:1", messages=messages(("system", " be kind "), ("user", "hi"), ("assistant", "hello"))),
    Row("f:2", messages=messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))),
    Row("f:3", prompt="once", response=" upon"),
]


def test_a_prompt_of_the_encoder_is_what_the_sampler_makes_of_the_messages():
    tokenizer = chat_tokenizer(packaged_template())
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, max_length=20)
    plain, laid_out = questions_of(CHATS, EXACT), questions_of(CHATS, EXACT, encoder)
    for without, question in zip(plain, laid_out, strict=True):
        expected = without.request().as_tokens(tokenizer, len(tokenizer))[1]
        assert list(question.request().tokens) == expected
        assert question.request().id == without.request().id == question.place  # what the draws are addressed by
    turn_end = tokenizer.convert_tokens_to_ids("<turn|>")
    ends = [[turn_end, *tokenizer("\n", add_special_tokens=False)["input_ids"]]] * 2 + [[1]]
    for row, question, end in zip(("hello", "d", " upon"), laid_out, ends, strict=True):
        assert question.length == len(tokenizer(row, add_special_tokens=False)["input_ids"]) + len(end)


def test_with_thinking_the_prompt_says_so_and_the_answer_is_what_follows_the_thoughts():
    tokenizer = chat_tokenizer(packaged_template())
    row = Row(
        "f:1",
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "42", "reasoning": "6 * 7"}),
    )
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, enable_thinking=True)
    (question,) = questions_of([row], EXACT, encoder)
    assert "<|think|>" in tokenizer.decode(question.tokens)
    text = "<|channel>thought\n6 * 7\n<channel|>42"
    sampler = ScriptedSampler(tokenizer, [(text, [1])])
    report = evaluate(sampler, [row], EXACT, encoder=encoder)
    (record,) = report["records"]
    assert (report["solved"], record["text"], record["reasoning"]) == (1, "42", "6 * 7")
    assert sampler.asked["max_new_tokens"] == question.length > len(tokenizer(text)["input_ids"])
    wrong = ScriptedSampler(tokenizer, [("<|channel>thought\n42\n<channel|>41", [1])])
    assert evaluate(wrong, [row], EXACT, encoder=encoder)["solved"] == 0
    # Without the encoder it is not known how many tokens the reasoning takes.
    assert longest_response(ScriptedSampler(tokenizer, [], max_new_tokens=77), questions_of([row], EXACT), EXACT) == 77
