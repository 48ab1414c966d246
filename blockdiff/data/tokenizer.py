"""A tokenizer with one token per character, for tasks that bring no tokenizer of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")  # ids 0, 1, 2 as in Gemma


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with pad 0, eos 1, bos 2 and then one id per character of `alphabet`.

    Like Gemma's it puts bos before a text unless told `add_special_tokens=False`. A character outside the
    alphabet raises; decoding joins the characters without spaces. `save_pretrained` writes it, and
    `AutoTokenizer` reads it back without remote code.
    """
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} repeats a character")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    pad, eos, bos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        clean_up_tokenization_spaces=False,
    )
