"""Rows become tokens whose responses are marked exactly, in the Gemma 4 turn format."""

from __future__ import annotations

import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2 import TemplateError

from blockdiff.data.chat import Encoder, truncated
from blockdiff.data.rows import Row
from blockdiff.data.template import (
    RefusedByTemplate,
    merged,
    packaged_template,
    render,
    token_spans,
    training_template,
    turn_ends,
)
from blockdiff.data.tokenise import chat_prompt
from blockdiff.data.tokenizer import byte_level_bpe, character_tokenizer
from blockdiff.errors import DataError
from blockdiff.recipes.sudoku import alphabet
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

SYSTEM = {"role": "system", "content": " be brief "}
USER = {"role": "user", "content": "hello\n"}
ASSISTANT = {"role": "assistant", "content": "  hi there"}

# The same format written another way and without tags, as released templates are.
UNTAGGED = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content.strip() }}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}"
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(packaged_template())


def text_of(tokenizer, *messages, **options):
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def encode(tokenizer, *messages, canvas_length=8, **options):
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=canvas_length, **options)
    return encoder.encode([Row("f.jsonl:1", messages=messages)])[0][0]


def responses(tokenizer, example):
    return [tokenizer.decode(example.tokens[start:end]) for start, end in example.responses]


def test_turns_are_written_as_the_format_says(tokenizer):
    assert text_of(tokenizer, SYSTEM, USER, ASSISTANT, USER, ASSISTANT) == (
        "<bos><|turn>system\nbe brief<turn|>\n<|turn>user\nhello<turn|>\n<|turn>model\nhi there<turn|>\n"
        "<|turn>user\nhello<turn|>\n<|turn>model\nhi there<turn|>\n"
    )
    assert text_of(tokenizer, USER) == "<bos><|turn>user\nhello<turn|>\n"


@pytest.mark.parametrize("messages", [[{"role": "tool", "content": "x"}], [USER, SYSTEM]])
def test_a_message_the_format_has_no_turn_for_is_refused_not_skipped(tokenizer, messages):
    with pytest.raises(TemplateError, match="no turn"):
        text_of(tokenizer, *messages)


def test_the_generation_prompt_is_the_same_with_thinking_on_and_off(tokenizer):
    plain = text_of(tokenizer, USER, add_generation_prompt=True)
    assert plain == "<bos><|turn>user\nhello<turn|>\n<|turn>model\n"
    thinking = text_of(tokenizer, USER, add_generation_prompt=True, enable_thinking=True)
    assert thinking == "<bos><|turn>system\n<|think|>\n<turn|>\n" + plain.removeprefix("<bos>")
    assert text_of(tokenizer, SYSTEM, USER, enable_thinking=True).startswith(
        "<bos><|turn>system\n<|think|>\nbe brief<turn|>\n<|turn>user"
    )


def test_reasoning_is_shown_only_after_the_last_user_message(tokenizer):
    thoughtful = {**ASSISTANT, "reasoning": "so\nthen"}
    assert text_of(tokenizer, USER, thoughtful, USER, thoughtful) == (
        "<bos><|turn>user\nhello<turn|>\n<|turn>model\nhi there<turn|>\n<|turn>user\nhello<turn|>\n"
        "<|turn>model\n<|channel>thought\nso\nthen\n<channel|>hi there<turn|>\n"
    )
    example = encode(tokenizer, USER, thoughtful)
    assert responses(tokenizer, example) == ["<|channel>thought\nso\nthen\n<channel|>hi there<turn|>\n"]


def test_consecutive_assistant_messages_are_one_turn_and_one_response(tokenizer):
    example = encode(tokenizer, USER, ASSISTANT, {"role": "assistant", "content": " again "}, USER, ASSISTANT)
    assert tokenizer.decode(example.tokens) == (
        "<bos><|turn>user\nhello<turn|>\n<|turn>model\nhi thereagain<turn|>\n"
        "<|turn>user\nhello<turn|>\n<|turn>model\nhi there<turn|>\n"
    )
    assert responses(tokenizer, example) == ["hi thereagain<turn|>\n", "hi there<turn|>\n"]


def test_a_response_starts_right_after_the_turn_header_and_ends_with_the_turn(tokenizer):
    # Trap 7: without tags a mask starts three tokens early, and the model learns to write "model\n".
    example = encode(tokenizer, USER, {"role": "assistant", "content": "model user ü🙂"})
    header = tokenizer("<|turn>model\n", add_special_tokens=False)["input_ids"]
    assert len(header) == 3
    ((start, end),) = example.responses
    assert example.tokens[start - 3 : start] == header
    assert tokenizer.decode(example.tokens[start:end]) == "model user ü🙂<turn|>\n"
    assert end == len(example.tokens)


def test_responses_agree_with_the_mask_of_transformers(tokenizer):
    messages = [SYSTEM, USER, ASSISTANT, USER, {"role": "assistant", "content": "ü", "reasoning": "x y"}]
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    example = encode(tokenizer, *messages)
    marked = [0] * len(example.tokens)
    for start, end in example.responses:
        marked[start:end] = [1] * (end - start)
    assert example.tokens == encoded["input_ids"]
    assert marked == encoded["assistant_masks"]


def test_an_untagged_template_of_the_same_format_gives_the_packaged_one():
    assert training_template(chat_tokenizer(UNTAGGED)) == packaged_template()
    assert training_template(chat_tokenizer(None)) == packaged_template()


def test_the_ends_of_turns_are_the_last_control_tokens_that_a_template_writes():
    made = byte_level_bpe(["abc"], 300)
    assert made.convert_ids_to_tokens(turn_ends(made)) == ["<turn|>", "<|tool_response>"]
    tagged = "{% generation %}{{ messages[-1]['content'] ~ eos_token ~ '\n' }}{% endgeneration %}"
    assert turn_ends(chat_tokenizer(tagged)) == (1,)
    assert turn_ends(chat_tokenizer(CHATML)) == () == turn_ends(character_tokenizer("ab"))


def test_a_tagged_template_of_another_format_is_kept():
    tagged = CHATML.replace("{{ '<|im", "{% generation %}{{ '<|im", 1).replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    )
    assert training_template(chat_tokenizer(tagged)) == tagged


def test_a_template_that_refuses_or_marks_no_turn_is_named_with_the_row():
    for template, words in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        (CHATML, "add_generation_prompt"),
    ):
        with pytest.raises(DataError, match=rf"f\.jsonl:1: .*{words}"):
            encode(chat_tokenizer(template), USER, ASSISTANT)


def test_messages_without_a_template_are_refused_but_prompt_rows_are_not():
    encoder = Encoder(character_tokenizer(alphabet(4)), eos_id=1, canvas_length=4)
    with pytest.raises(DataError, match="no chat template"):
        encoder.encode([Row("f:1", messages=(USER, ASSISTANT))])
    (example,), _ = encoder.encode([Row("f:1", prompt="1.=", response="12")])
    assert example.tokens == [2, 5, 3, 4, 5, 6, 1]
    assert example.responses == [(4, 7)]


def test_of_several_templates_one_has_to_be_the_default():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"rag": CHATML, "tool_use": packaged_template()}
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8)
    assert encoder.fingerprint and encoder.encode([Row("f:1", prompt="a", response="b")])
    refusal = r"none of the tokenizer's chat templates \(rag, tool_use\) is the default; set data.template"
    with pytest.raises(DataError, match=refusal):
        encoder.encode([Row("f:1", messages=(USER, ASSISTANT))])
    with pytest.raises(DataError, match=refusal):
        chat_prompt([USER], None, tokenizer)
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    assert "look" in chat_prompt([USER], tools, tokenizer).text
    assert encoder.exported_template == tokenizer.chat_template


def test_prompt_and_response_are_tokenised_apart():
    tokenizer = chat_tokenizer()
    (example,), _ = Encoder(tokenizer, eos_id=1, canvas_length=8).encode([Row("f:1", prompt="us", response="er")])
    ((start, _),) = example.responses
    assert tokenizer.decode(example.tokens[:start]) == "<bos>us"
    assert tokenizer.decode(example.tokens[start:]) == "er<eos>"


def test_mixed_rows_keep_their_order_and_their_place_in_the_file():
    rows = [
        Row("f:1", prompt="a", response="b"),
        Row("f:2", messages=(USER, ASSISTANT)),
        Row("f:3", prompt="a" * 50, response="b"),
        Row("f:4", prompt="c", response="d"),
    ]
    examples, statistics = Encoder(chat_tokenizer(), eos_id=1, canvas_length=4, max_length=45).encode(rows)
    assert [(example.sample_id, example.where) for example in examples] == [
        (0, "f:1"),
        (1, "f:2"),
        (3, "f:4"),
    ]
    assert (statistics.rows, statistics.dropped) == (4, 1)


def test_a_row_the_tokenizer_cannot_write_is_named():
    rows = [Row("f:1", prompt="1=", response="1"), Row("f:2", prompt="1=", response="x")]
    with pytest.raises(DataError, match=r"f:2: .*tokenizer"):
        Encoder(character_tokenizer(alphabet(4)), eos_id=1, canvas_length=4).encode(rows)


def test_truncation_falls_between_canvases():
    # Trap 8: a response that is cut keeps whole canvases only, so no fill teaches it to end there.
    tokens = list(range(30))
    assert truncated(tokens, [(5, 30)], 30, 4) == (tokens, [(5, 30)])
    assert truncated(tokens, [(5, 30)], 29, 4) == (tokens[:29], [(5, 29)])
    assert truncated(tokens, [(5, 30)], 16, 4) == (tokens[:13], [(5, 13)])
    assert truncated(tokens, [(5, 10), (20, 30)], 22, 4) == (tokens[:10], [(5, 10)])
    assert truncated(tokens, [(5, 10), (20, 30)], 18, 4) == (tokens[:10], [(5, 10)])
    assert truncated(tokens, [(5, 30)], 8, 4) is None
    assert truncated(tokens, [(5, 30)], 3, 4) is None


def test_statistics_count_what_was_dropped_cut_and_filled():
    rows = [
        Row("f:1", prompt="1=", response="123"),  # 4 response tokens with eos: 1 canvas, no fill
        Row("f:2", prompt="1=", response="1234123"),  # 8 tokens
        Row("f:3", prompt="1=", response="1234"),  # 5 tokens: 2 canvases, 3 fill
        Row("f:4", prompt="1=" + "1" * 9, response="1"),  # the prompt fills the row
    ]
    encoder = Encoder(character_tokenizer(alphabet(4)), eos_id=1, canvas_length=4, max_length=9)
    examples, statistics = encoder.encode(rows)
    assert [example.is_truncated for example in examples] == [False, True, False]
    assert (statistics.dropped, statistics.truncated, statistics.cut_tokens) == (1, 1, 4)
    assert (statistics.responses, statistics.canvases, statistics.scored_tokens) == (3, 4, 16)
    assert statistics.response_tokens == 13
    assert statistics.clean_tokens == 3 * 3 + 13
    assert str(statistics) == (
        "4 rows (1 dropped, 1 truncated: 4 tokens cut), 3 responses, 4 canvases of 4, 18.8% fill, "
        "16 scored tokens, longest row 8"
    )


def test_a_file_whose_every_row_is_too_long_is_refused():
    encoder = Encoder(character_tokenizer(alphabet(4)), eos_id=1, canvas_length=4, max_length=3)
    with pytest.raises(DataError, match="1 rows"):
        encoder.encode([Row("f:1", prompt="1=", response="1234")])


def test_only_the_last_turn_can_be_a_response_and_the_others_are_context(tokenizer):
    whole = encode(tokenizer, USER, ASSISTANT, USER, ASSISTANT, {"role": "assistant", "content": "more"})
    last = encode(tokenizer, USER, ASSISTANT, USER, ASSISTANT, {"role": "assistant", "content": "more"}, turns="last")
    assert last.tokens == whole.tokens and last.responses == whole.responses[-1:]
    assert responses(tokenizer, last) == ["hi theremore<turn|>\n"]
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, turns="last")
    _, statistics = encoder.encode([Row("f:1", messages=(USER, ASSISTANT) * 3), Row("f:2", prompt="a", response="b")])
    assert (statistics.responses, statistics.unscored_turns, statistics.conversations) == (2, 2, 1)
    assert "2 responses (2 assistant turns as context only)" in str(statistics)


def test_a_system_prompt_is_put_before_conversations_without_one(tokenizer):
    given = encode(tokenizer, {"role": "system", "content": "be kind"}, USER, ASSISTANT)
    added = encode(tokenizer, USER, ASSISTANT, system="be kind")
    assert added.tokens == given.tokens and added.responses == given.responses
    own = encode(tokenizer, SYSTEM, USER, ASSISTANT, system="be kind")
    assert own.tokens == encode(tokenizer, SYSTEM, USER, ASSISTANT).tokens
    raw, _ = Encoder(tokenizer, eos_id=1, canvas_length=8, system="x").encode([Row("f:1", prompt="a", response="b")])
    assert tokenizer.decode(raw[0].tokens) == "<bos>ab<eos>"


def test_thinking_opens_the_system_turn_and_reasoning_is_part_of_the_response(tokenizer):
    thoughtful = {**ASSISTANT, "reasoning": "so"}
    example = encode(tokenizer, USER, thoughtful, enable_thinking=True, system="be kind")
    assert tokenizer.decode(example.tokens).startswith("<bos><|turn>system\n<|think|>\nbe kind<turn|>\n<|turn>user")
    assert responses(tokenizer, example) == ["<|channel>thought\nso\n<channel|>hi there<turn|>\n"]


def test_a_prompt_and_its_response_can_be_two_turns(tokenizer):
    pair = Row("f.jsonl:1", prompt=USER["content"], response=ASSISTANT["content"])
    as_chat = Encoder(tokenizer, eos_id=1, canvas_length=8, chat=True)
    (example,), statistics = as_chat.encode([pair])
    conversation = encode(tokenizer, USER, ASSISTANT)
    assert (example.tokens, example.responses) == (conversation.tokens, conversation.responses)
    assert statistics.conversations == 1
    as_text = Encoder(tokenizer, eos_id=1, canvas_length=8)
    assert as_text.encode([pair])[0][0].tokens != example.tokens and as_text.fingerprint != as_chat.fingerprint


def test_rows_that_are_too_long_are_cut_left_out_or_refused(tokenizer):
    rows = [Row("f:1", prompt="a", response="b" * 20), Row("f:2", prompt="a", response="b")]
    options = dict(eos_id=1, canvas_length=8, max_length=20)
    cut, statistics = Encoder(tokenizer, **options).encode(rows)
    assert [len(example.tokens) for example in cut] == [18, 4] and statistics.truncated == 1
    kept, statistics = Encoder(tokenizer, **options, too_long="drop").encode(rows)
    assert kept == cut[1:] and (statistics.dropped, statistics.truncated, statistics.cut_tokens) == (1, 0, 0)
    assert kept[0].sample_id == 1
    with pytest.raises(DataError, match=r"f:1: 23 tokens.*data\.max_length 20;.*truncate: 20"):
        Encoder(tokenizer, **options, too_long="refuse").encode(rows)
    assert Encoder(tokenizer, eos_id=1, canvas_length=8, max_length=23, too_long="refuse").encode(rows)


def test_tokens_are_those_of_the_tokenizer_whatever_it_was_used_for_before():
    tokenizer = chat_tokenizer()
    row = Row("f:1", prompt="<|turn>user", response="x<eos>")
    allow = dict(eos_id=1, canvas_length=8, control_tokens="allow")
    first = Encoder(tokenizer, **allow).encode([row])[0][0]
    assert first.tokens == [2, *tokenizer("<|turn>user", add_special_tokens=False)["input_ids"], *tokenizer(
        "x<eos>", add_special_tokens=False)["input_ids"], 1]  # fmt: skip
    for leave in (lambda backend: backend.enable_truncation(1), lambda backend: backend.enable_padding(length=20)):
        leave(tokenizer.backend_tokenizer)
        assert Encoder(tokenizer, **allow).encode([row])[0][0] == first
    split = chat_tokenizer()
    split.split_special_tokens = True
    apart = Encoder(split, **allow).encode([row])[0][0]
    assert apart.tokens[1:-1] == [*split("<|turn>user", add_special_tokens=False)["input_ids"], *split(
        "x<eos>", add_special_tokens=False)["input_ids"]] != first.tokens[1:-1]  # fmt: skip


def test_spans_that_touch_are_merged_and_empty_ones_left_out():
    assert merged([(0, 2), (2, 5), (7, 7), (8, 9)]) == [(0, 5), (8, 9)]


def test_a_token_over_the_edge_of_a_turn_is_an_error():
    offsets = [(0, 2), (2, 5), (5, 5), (5, 9)]
    assert token_spans(offsets, [(2, 9)]) == [(1, 4)]
    assert token_spans(offsets, [(2, 5)]) == [(1, 2)]
    for span in [(3, 9), (2, 7)]:
        with pytest.raises(ValueError, match="crosses the edge"):
            token_spans(offsets, [span])


def test_rendering_without_tags_marks_nothing(tokenizer):
    assert render(tokenizer, UNTAGGED, [USER, ASSISTANT])[1] == []


def test_prompts_are_rendered_in_several_threads_at_once(tokenizer):
    def prompt(_):
        return render(tokenizer, training_template(tokenizer), [USER] * 20, is_prompt=True).text

    expected, switched = prompt(0), sys.getswitchinterval()  # all share the compiled template
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(prompt, range(200))) == {expected}
    finally:
        sys.setswitchinterval(switched)


@pytest.mark.parametrize(
    ("endless", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"0\.05 seconds"),
        ("{{ 'a' * 10**15 }}", r"chat_template of m/y: it takes more than 1 GiB of memory"),
        ("{{ 'a' * 2 * 10**9 }}", r"1 GiB of memory"),
        ("{{ 'a'.center(2 * 10**9) }}", r"1 GiB of memory"),
        ("{{ (['a' * 10**6] * 2000) | join }}", r"1 GiB of memory"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ],
)
def test_a_template_without_an_end_is_refused_and_an_earlier_timer_goes_on(monkeypatch, endless, reason):
    monkeypatch.setattr("blockdiff.data.template.TEMPLATE_SECONDS", 0.05 if "seconds" in reason else 10)
    tokenizer = chat_tokenizer()
    tokenizer.name_or_path = "m/y"
    handler = signal.getsignal(signal.SIGALRM)
    before = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with pytest.raises(RefusedByTemplate, match=reason):
            render(tokenizer, endless, [{"role": "user", "content": "a"}])
        assert 990 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


GROWING = (
    "{% set all = namespace(texts=[]) %}"
    "{% for a in range(9999) %}{% set all.texts = all.texts + ['a' * 10**6 ~ a] %}{% endfor %}"
)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_template_that_takes_memory_bit_by_bit_is_refused_in_threads_too(monkeypatch, is_prompt):
    monkeypatch.setattr("blockdiff.data.template.TEMPLATE_BYTES", 1 << 26)
    peak, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)

    def refused():
        with pytest.raises(RefusedByTemplate, match=r"0\.0625 GiB of memory"):
            render(chat_tokenizer(), GROWING, [USER], is_prompt=is_prompt)

    refused()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(refused).result()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 3 << 20  # KiB
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_rows_under_a_template_without_an_end_are_refused_at_once_with_the_template(monkeypatch):
    monkeypatch.setattr("blockdiff.data.template.TEMPLATE_SECONDS", 0.05)
    tokenizer = chat_tokenizer("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    tokenizer.name_or_path = "m/y"
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, skips_bad_rows=True)
    rows = [Row(f"f:{line}", messages=(USER, ASSISTANT)) for line in range(1, 5)]
    with pytest.raises(
        DataError, match=r"^chat_template of m/y: it takes more than 0\.05 seconds for the row at f:1; name"
    ):
        encoder.encode(rows)
