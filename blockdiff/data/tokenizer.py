"""Tokenizers made here: one token per character for small tasks, byte-level BPE from a text for everything else."""

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
MOST_TOKENS = 10_000_000  # of a vocabulary that is learnt


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with pad 0, eos 1, bos 2 and then one id per character of `alphabet`.

    Like Gemma's it puts bos before a text unless told `add_special_tokens=False`. A character outside the
    alphabet raises; decoding joins the characters without spaces. `save_pretrained` writes it, and
    `AutoTokenizer` reads it back without remote code.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet {alphabet!r} repeats a character")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, vocabulary["<bos>"])


def byte_level_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Sennrich et al. 2016 on bytes, as GPT-2) learnt from `texts`, of `vocab_size` tokens.

    Pad 0, eos 1, bos 2, a mask token, the tokens of the Gemma 4 turn format and its tools, every byte, then merges;
    digits stay single, as in Gemma. Any text can be written and comes back as it was. It has fewer tokens if the texts
    give no more merges. Raises DataError for a size without room for the bytes, and for texts without a character.
    """
    specials = (*SPECIAL_TOKENS, MASK, *TURN_TOKENS, *TOOL_TOKENS)
    least = BYTES + len(specials)
    if vocab_size < least:
        raise DataError(f"a vocabulary of {vocab_size} has no room for every byte; ask for at least {least}")
    if vocab_size > MOST_TOKENS:
        raise DataError(f"a vocabulary of {vocab_size:,} tokens is more than the {MOST_TOKENS:,} that may be learnt")
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
        raise DataError("the texts have no characters, so nothing can be learnt from them; give other rows")
    return _wrapped(tokenizer, specials.index("<bos>"), mask_token=MASK)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Write the files of a tokenizer into a directory, each of them whole or not at all; others there stay.

    Raises OSError with the name of the file that cannot be written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".tokenizer.", dir=directory) as beside:
        try:
            tokenizer.save_pretrained(beside)
            for file in sorted(Path(beside).iterdir()):
                sync(file)
                file.replace(directory / file.name)
        except Exception as error:  # tokenizers raises nothing narrower, with the number of the error in its text
            said = re.search(r"os error (\d+)", str(error))
            number = int(said[1]) if said else getattr(error, "errno", None)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(directory / "tokenizer.json")) from error


def _wrapped(tokenizer: Tokenizer, bos_id: int, **special: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows one; like Gemma's it puts bos before a text unless told not to."""
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
