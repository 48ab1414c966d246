"""Settings of every test run: only files with the marked tests are collected, and kernels run anywhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.interpreter import faster_interpreter

if not torch.cuda.is_available():
    # Triton's interpreter, which the kernels' tests need; it is chosen when triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    faster_interpreter()

# torch remembers, when a device is first made the default, which functions make tensors. Some tests replace one of
# these for a while, and a default device would never be that of the function itself again.
with torch.device("meta"):
    torch.empty(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m quick` leave out files without such a test: importing them takes time and more packages."""
    mark = config.getoption("markexpr")
    if mark not in ("gpu", "quick") or collection_path.suffix != ".py":
        return None
    return True if f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs started by tests keep their tokens out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
