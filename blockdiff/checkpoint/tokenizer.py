"""The tokenizer beside a checkpoint's weights, and the text of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import CONFIG, VOCABULARY_FILES, find, is_hub_id, read_json
from blockdiff.checkpoint.normaliser import require_bounded
from blockdiff.errors import CheckpointError
from blockdiff.models.family import for_transformers

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character
PADDING = 512  # rows that a table may have beyond the tokens, whatever its size
OTHER_MODELS = "is it that of the model? If not, put the tokenizer.json that the weights were trained with beside them"
LONGEST = 8  # tokens that may share their characters before they count as broken


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """The tokenizer beside a checkpoint, in a directory of its own, or on the Hub; never runs remote code.

    Raises CheckpointError if there is none.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    directory = Path(path_or_hub_id).expanduser()
    if directory.is_dir():
        directory = find(directory)
        if (directory / CONFIG).exists():
            read_json(directory / CONFIG)  # a broken one is not the tokenizer's fault
        require_bounded(directory)
    elif not directory.exists() and not is_hub_id(str(path_or_hub_id)):
        raise CheckpointError(f"{path_or_hub_id}: no such directory; name the directory or hub id of a tokenizer")
    name = str(directory if directory.is_dir() else path_or_hub_id)
    try:
        # Without files transformers makes an empty tokenizer of the model's type, which knows no word.
        if directory.is_dir() and not any((directory / name).is_file() for name in VOCABULARY_FILES):
            raise FileNotFoundError(f"none of {', '.join(VOCABULARY_FILES)}")
        # The type of the model decides; to build its whole config would import most of transformers.
        values, _ = PreTrainedConfig.get_config_dict(name)
        config = PreTrainedConfig.from_dict(for_transformers(values), name_or_path=name)
        return AutoTokenizer.from_pretrained(name, config=config)
    except Exception as error:  # transformers raises a dozen kinds for a directory without a tokenizer
        raise CheckpointError(
            f"{path_or_hub_id}: no tokenizer to be read there ({' '.join(str(error).split())[:200]}); "
            "put tokenizer.json beside the weights or name another one"
        ) from error


def rows_needed(tokenizer: Any) -> int:
    """The number of rows that a table needs for the tokens of a tokenizer: one more than the largest id."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def mismatch(tokenizer: Any, vocab_size: int) -> str | None:
    """The reason, in words, why a tokenizer is hardly that of a model with so many tokens; None if it may be.

    Tables are often padded: up to PADDING rows, or a tenth of them, may have no token.
    """
    count = rows_needed(tokenizer)
    if count > vocab_size or vocab_size - count > max(PADDING, vocab_size // 10):
        return f"the tokenizer has {count:,} tokens, the model {vocab_size:,}; {OTHER_MODELS}"
    return None


def require_same_tokens(draft_model: str | Path, model: str | Path) -> None:
    """Raise CheckpointError where the tokenizers beside two models have other tokens, or other ids for them."""
    if load_tokenizer(draft_model).get_vocab() != load_tokenizer(model).get_vocab():
        raise CheckpointError(
            f"{draft_model}: its tokenizer has other tokens than that of {model}; a draft model needs the same"
        )


def mask_token(tokenizer: Any, vocab_size: int, name: str | None, reserved: Collection[int | None]) -> int:
    """The token that stands where a drafter predicts: of this name, else the mask token, else a row without a token.

    Raises CheckpointError if there is none, and for one of the `reserved` special tokens.
    """
    remedy = "name one of its tokens that no text contains, --mask-token"
    if name is not None:
        token = tokenizer.get_vocab().get(name)
    else:
        free = rows_needed(tokenizer)
        token = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else free if free < vocab_size else None
    if token is None:
        problem = "the tokenizer has no mask token" if name is None else f"{name!r} is no token of the tokenizer"
        raise CheckpointError(f"{problem}; {remedy}")
    if token in reserved or token >= vocab_size:
        what = "is the bos, eos or pad token" if token in reserved else f"is none of the model's {vocab_size} tokens"
        raise CheckpointError(f"{tokenizer.convert_ids_to_tokens(token)!r} {what}; {remedy}")
    return int(token)


def decoder(tokenizer: Any) -> Callable[[int], str]:
    """Token id -> its text, special tokens included; an id that the tokenizer does not have shows as its number."""
    size = len(tokenizer)

    @cache
    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False)) if token < size else f"<{token}>"

    return decode


def sequence_decoder(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Token ids in a row -> a text for each; where several make one character together, the last has the text of all.

    Byte-level tokens do: `é` may be two of them. Bytes that make no character stay broken.
    """
    decode, size = decoder(tokenizer), len(tokenizer)

    def texts(ids: Sequence[int]) -> list[str]:
        decoded = [decode(token) for token in ids]
        start = 0
        while start < len(decoded):
            end = start + 1
            if BROKEN in decoded[start]:
                for last in range(start + 2, min(start + LONGEST, len(decoded)) + 1):
                    own_ids = [token for token in ids[start:last] if token < size]
                    together = str(tokenizer.decode(own_ids, skip_special_tokens=False))
                    if BROKEN not in together:
                        decoded[start:last] = [*[""] * (last - start - 1), together]
                        end = last
                        break
            start = end
        return decoded

    return texts
