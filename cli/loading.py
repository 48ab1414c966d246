"""What several commands load the same way: a model, its tokenizer, and the terminal to print on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdiff.errors import BlockdiffError
from blockdiff.terminal import quiet

if TYPE_CHECKING:
    from blockdiff.sampling import Sampler


def make_parent(path: Path | None) -> None:
    """Make the directory that a file is to be written into, before any work is done for it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BlockdiffError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def load_sampler(path: str, dtype: str, device: str, kernels: str) -> Sampler:
    """A checkpoint's model, tokenizer and generation settings as a sampler."""
    from blockdiff import checkpoint
    from blockdiff.checkpoint.files import find
    from blockdiff.data.tokenizer import load_tokenizer
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
