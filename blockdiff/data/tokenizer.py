"""Tokenizers that blockdiff makes: one token per character for small tasks, and byte-level BPE learnt from texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from blockdiff.data.template import TOOL_TOKENS, TURN_TOKENS
from blockdiff.errors import DataError
from blockdiff.files import sync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")  # ids 0, 1, 2 as in Gemma
MASK = "<mask>"
BYTES = 256
MAX_TOKENS = 10_000_000  # of a vocabulary to learn


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with pad 0, eos 1, bos 2 and one id per character of `alphabet`.

    Like Gemma's it adds bos to a text unless `add_special_tokens=False`. A character outside the alphabet raises an
    error. Decoding joins the characters without spaces. `AutoTokenizer` reads its files without remote code.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} repeats a character")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, vocabulary["<bos>"])


def byte_level_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE (Sennrich et al. 2016 on bytes, like GPT-2) of `vocab_size` tokens from texts.

    Its tokens are pad 0, eos 1, bos 2, a mask token, the tokens of the Gemma 4 turn format and its tools, every byte,
    and merges; digits stay single, as in Gemma. Any text can be encoded and decoded exactly. There are fewer tokens if
    the texts have no more merges. Raises DataError for a size without room for all bytes, and for empty texts.
    """
    specials = (*SPECIAL_TOKENS, MASK, *TURN_TOKENS, *TOOL_TOKENS)
    least = BYTES + len(specials)
    if vocab_size < least:
        raise DataError(f"a vocabulary of {vocab_size} has no room for every byte; choose at least {least}")
    if vocab_size > MAX_TOKENS:
        raise DataError(f"a vocabulary of {vocab_size:,} tokens is too large; choose at most {MAX_TOKENS:,}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if not seen:
        raise DataError("the texts have no characters, so there is nothing to learn; choose other rows")
    return _wrapped(tokenizer, specials.index("<bos>"), mask_token=MASK)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Write the files of a tokenizer into a directory, each atomically. Other files there stay.

    Raises OSError with the name of the file that cannot be written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".tokenizer.", dir=directory) as hidden:
        try:
            tokenizer.save_pretrained(hidden)
            for file in sorted(Path(hidden).iterdir()):
                sync(file)
                file.replace(directory / file.name)
        except Exception as error:  # tokenizers raises nothing narrower, with the error's number in its text
            match = re.search(r"os error (\d+)", str(error))
            number = int(match[1]) if match else getattr(error, "errno", None)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(directory / "tokenizer.json")) from error


def _wrapped(tokenizer: Tokenizer, bos_id: int, **special: str) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers. Like Gemma's it adds bos to a text by default."""
    from transformers import PreTrainedTokenizerFast

    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos_id)]
    )
    pad, eos, bos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        clean_up_tokenization_spaces=False,
        **special,
    )
