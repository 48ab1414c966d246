"""Settings of every test run: only files with the marked tests are collected, and kernels run anywhere."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from blockdiff.kernels import c_library
from tests.plots.browser import Browser, missing
from tests.support.interpreter import faster_interpreter

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
    """With `-m gpu`, `quick` or `portable` leave out files without such a test: imports take time and packages."""
    mark = config.getoption("markexpr")
    if mark not in ("gpu", "quick", "portable") or collection_path.suffix != ".py":
        return None
    return True if f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m quick` takes the place of `-m "not gpu"` in the settings, and leaves out the tests of a GPU as that does."""
    if config.getoption("markexpr") == "quick":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


atexit.register(gc.unfreeze)  # or libraries complain of what is left at the end; pytest has looked for garbage by then


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules and tests live as long as the process: garbage is not looked for among them, and seldom elsewhere."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs started by tests keep their tokens out of the user's cache; the C functions are compiled there, once."""
    own = tmp_path_factory.mktemp("cache")
    if c_library.library() is not None and (users := c_library.cache_directory()) is not None:
        for built in users.glob("*.so"):
            shutil.copy2(built, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKDIFF_CACHE", str(own))
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium, where there is one."""
    if missing():
        pytest.skip(missing())
    with Browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture(scope="session", autouse=True)
def _no_power_cut() -> Iterator[None]:
    """No test cuts the power, so files need not be on the disk: that takes longer than to write them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> Iterator[None]:
    """Runs draw no curves, which takes longer than a short training; a test that looks at them draws them."""
    if "blockdiff.training.export" not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockdiff.training.export.draw_curves", lambda *_, **__: None)
        yield


class _KeepDouble(TorchFunctionMode):
    """Norms, softmax and logits of fp64 tensors are not cast to fp32."""

    is_on = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float or (function is Tensor.to and torch.float32 in args):
                return args[0]
            if kwargs.get("dtype") == torch.float32 and function is not Tensor.to:  # frequencies of RoPE are fp32
                kwargs = kwargs | {"dtype": torch.float64}
        if function is Tensor.matmul and {x.dtype for x in args} == {torch.float32, torch.float64}:
            args = tuple(x.double() for x in args)  # the weights of a mean over patches, and these
        return function(*args, **kwargs)


@pytest.fixture(scope="session", autouse=True)
def _exact_oracle() -> Iterator[None]:
    """transformers computes the norms, routers and logits of an fp64 model in fp64, as blockdiff does, not in fp32."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import PreTrainedModel

    from blockdiff.models.diffusion_gemma.images import GemmaImages

    def exact(function: Any) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            if _KeepDouble.is_on or next(self.parameters()).dtype != torch.float64:
                return function(self, *args, **named)
            with _KeepDouble(), mock.patch.object(_KeepDouble, "is_on", True):
                return function(self, *args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "__call__", exact(torch.nn.Module.__call__))
        patch.setattr(GemmaImages, "features", exact(GemmaImages.features))  # which the backward calls, too
        yield
