"""Attempts: a part of a benchmark may fail without ending the others."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator

import torch

FAILED: list[str] = []  # names of failed attempts of this process


@contextlib.contextmanager
def attempt(name: str) -> Iterator[None]:
    """Report an exception in the block and add `name` to FAILED; the program goes on.

    If the device runs out of memory, this is reported but is not a failure.
    """
    try:
        yield
        return
    except torch.OutOfMemoryError as error:
        print(f"{name}: not available: {str(error)[:200]}", file=sys.stderr, flush=True)
    except Exception as error:
        FAILED.append(name)
        traceback.print_exc()
        said = str(error).strip().partition("\n")[0]
        print(f"{name}: FAILED: {type(error).__name__}: {said[:300]}", file=sys.stderr, flush=True)
    gc.collect()  # models and inputs that the error held
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # if the device itself is lost
            torch.cuda.empty_cache()
