"""What several commands load the same way: a model, its tokenizer, and the terminal to print on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.errors import BlockdiffError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from blockdiff.sampling import Sampler

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def load_tokenizer(path_or_hub_id: str | Path) -> Any:
    """The tokenizer beside a checkpoint, in a directory of its own, or on the Hub; never runs remote code."""
    from transformers import AutoTokenizer

    from blockdiff.checkpoint.files import first_line

    directory = Path(path_or_hub_id)
    try:
        # Without files transformers makes an empty tokenizer of the model's type, which knows no word.
        if directory.is_dir() and not any((directory / name).is_file() for name in TOKENIZER_FILES):
            raise FileNotFoundError(f"none of {', '.join(TOKENIZER_FILES)}")
        return AutoTokenizer.from_pretrained(str(path_or_hub_id))
    except Exception as error:  # transformers raises a dozen kinds for a directory without a tokenizer
        raise DataError(
            f"{path_or_hub_id}: no tokenizer to be read there ({first_line(error)[:200]}); "
            "put tokenizer.json beside the weights or name another one"
        ) from error


def make_parent(path: Path | None) -> None:
    """Make the directory that a file is to be written into, before any work is done for it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BlockdiffError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def console(stderr: bool = False) -> Console:
    """A terminal that neither guesses at markup nor colours numbers of its own accord."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def quiet() -> None:
    """Keep libraries from drawing bars and warnings between our lines."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity(hub_logging.CRITICAL)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_sampler(path: str, dtype: str, device: str, kernels: str) -> Sampler:
    """A checkpoint's model, tokenizer and generation settings as a sampler."""
    from blockdiff import checkpoint
    from blockdiff.checkpoint.files import find
    from blockdiff.sampling import Generation, Sampler

    quiet()
    directory = find(path)
    generation = Generation.from_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    model = checkpoint.load(directory, dtype=dtype, device=device, kernels=kernels)
    return Sampler(model, tokenizer, generation)


def decoder(tokenizer: Any) -> Callable[[int], str]:
    """Token id -> its text, special tokens included; ids the tokenizer does not have show as their number."""
    size = len(tokenizer)

    @cache
    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False)) if token < size else f"<{token}>"

    return decode
