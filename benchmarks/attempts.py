"""Lines of a benchmark that fail without taking the others with them."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator

import torch

FAILED: list[str] = []  # what failed in this process, by the names that were tried


@contextlib.contextmanager
def attempt(name: str) -> Iterator[None]:
    """Whatever is raised within it is said, and remembered in FAILED; the work after it goes on.

    What a device has no memory for is said and is no failure.
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
        with contextlib.suppress(RuntimeError):  # where the device itself is gone
            torch.cuda.empty_cache()
