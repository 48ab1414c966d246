"""A small tokenizer for tests that knows the turn tokens of the Gemma 4 format; bytes otherwise."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TURN_TOKENS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")


def chat_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Pad 0, eos 1, bos 2, turn tokens from 3, one id per byte, and `model` and `user` as words."""
    specials = ("<pad>", "<eos>", "<bos>", *TURN_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*specials, *alphabet]
    merges = []
    for word in ("model", "user"):
        for length in range(2, len(word) + 1):
            if word[:length] not in pieces:
                pieces.append(word[:length])
                merges.append((word[: length - 1], word[length - 1]))
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
