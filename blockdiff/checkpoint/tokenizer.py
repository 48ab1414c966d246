"""The tokenizer beside a checkpoint's weights, and the texts of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import CONFIG, VOCABULARY_FILES, find, is_hub_id, read_json
from blockdiff.checkpoint.normaliser import require_bounded
from blockdiff.errors import CheckpointError
from blockdiff.models.family import for_transformers

BROKEN = "\N{REPLACEMENT CHARACTER}"  # a decoder writes it for bytes that form no character
PADDING = 512  # rows without a token that a table of any size may have
OTHER_MODELS = "is it that of the model? If not, put the tokenizer.json that the weights were trained with beside them"
LONGEST = 8  # most tokens that are decoded together to form characters


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """Load the tokenizer beside a checkpoint, in a directory of its own, or on the Hub; never runs remote code.

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
        # Without files transformers makes a tokenizer of the model's type with an empty vocabulary.
        if directory.is_dir() and not any((directory / name).is_file() for name in VOCABULARY_FILES):
            raise FileNotFoundError(f"none of {', '.join(VOCABULARY_FILES)}")
        # The model type is enough; building the model's config would import most of transformers.
        values, _ = PreTrainedConfig.get_config_dict(name)
        config = PreTrainedConfig.from_dict(for_transformers(values), name_or_path=name)
        return AutoTokenizer.from_pretrained(name, config=config)
    except Exception as error:  # transformers raises a dozen kinds for a directory without a tokenizer
        raise CheckpointError(
            f"{path_or_hub_id}: no tokenizer to be read there ({' '.join(str(error).split())[:200]}); "
            "put tokenizer.json beside the weights or name another one"
        ) from error


def rows_needed(tokenizer: Any) -> int:
    """Return the number of table rows that a tokenizer needs: its largest token id plus 1."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def mismatch(tokenizer: Any, vocab_size: int) -> str | None:
    """Return the reason why a tokenizer hardly belongs to a model with `vocab_size` tokens; None if it may.

    Tables are often padded: up to PADDING rows, or a tenth of them, may have no token.
    """
    count = rows_needed(tokenizer)
    if count > vocab_size or vocab_size - count > max(PADDING, vocab_size // 10):
        return f"the tokenizer has {count:,} tokens, the model {vocab_size:,}; {OTHER_MODELS}"
    return None


def require_same_tokens(draft_model: str | Path, model: str | Path) -> None:
    """Raise CheckpointError if the tokenizers of two models differ in tokens or their ids."""
    if load_tokenizer(draft_model).get_vocab() != load_tokenizer(model).get_vocab():
        raise CheckpointError(
            f"{draft_model}: its tokenizer has other tokens than that of {model}; a draft model needs the same"
        )


def mask_token(tokenizer: Any, vocab_size: int, name: str | None, reserved: Collection[int | None]) -> int:
    """Return the id of the token at places that a drafter predicts.

    It is the token `name` or, if that is None, the mask token, else a table row without a token. Raises CheckpointError
    if there is none, and if it is one of the `reserved` special tokens.
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
    """Return a function from a token id to its text, special tokens included; "<id>" for an id without a token."""
    size = len(tokenizer)

    @cache
    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False)) if token < size else f"<{token}>"

    return decode


def sequence_decoder(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Return a function from consecutive token ids to one text for each.

    If several tokens form one character together (`é` may be two byte-level tokens), the last has the text of all and
    the others are empty. Bytes that form no character stay broken.
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
