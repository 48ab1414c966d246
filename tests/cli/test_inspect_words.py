"""The tokens of a batch as `inspect` shows them."""

from __future__ import annotations

import pytest

from blockdiff.checkpoint.tokenizer import sequence_decoder
from blockdiff.cli.inspect_recipe import token_words
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick


def test_tokens_that_make_a_character_together_are_shown_together():
    tokenizer = chat_tokenizer()
    ids = tokenizer("aü🙂—b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 1 + 2 + 4 + 3 + 1  # bytes
    texts = sequence_decoder(tokenizer)(ids)
    assert [text for text in texts if text] == ["a", "ü", "🙂", "—", "b"] and len(texts) == len(ids)
    # What the noise left of a character is no character, and its neighbours are not touched.
    without = sequence_decoder(tokenizer)([*ids[:4], ids[0], *ids[5:]])
    assert "".join(without).startswith("aü�a") and "".join(without).endswith("—b")


def test_start_and_end_tokens_are_told_apart_and_text_is_no_token():
    tokenizer = chat_tokenizer()
    ids = tokenizer("<|turn>user\n<b>\x1b<turn|>", add_special_tokens=False)["input_ids"]
    assert "".join(token_words(tokenizer)([*ids, len(tokenizer) + 5])) == (
        f"‹|turn›user⏎<b>\\u001b‹turn|›‹{len(tokenizer) + 5}›"
    )
