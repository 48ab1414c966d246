"""Launching past Triton: what is launched is what Triton launches, for every kind of arguments."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blockdiff.kernels import relaunch
from blockdiff.kernels.launch import Launch, TooLarge


def scaled(x, pair, plan, other, n, eps, flag, D: tl.constexpr, BY: tl.constexpr):
    """A kernel with a parameter of each sort."""
    at = tl.program_id(0) * D + tl.arange(0, D)
    total = tl.load(x + at, mask=at < n, other=0) * BY + tl.load(plan.start) + pair[1] + eps
    if other is not None:
        total += tl.load(other + at, mask=flag)
    tl.store(pair[0] + at, total)


class Plan(NamedTuple):
    start: torch.Tensor
    end: torch.Tensor


class Driver:
    """In place of a GPU's driver: kernels are compiled for it, and what would be launched is listed."""

    def __init__(self) -> None:
        self.device, self.launched, self.loaded = 0, [], itertools.count(100)
        outer = self

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None: ...

            def __call__(self, *everything: Any) -> None:
                outer.launched.append(everything)

        self.launcher_cls, self.utils = Launcher, self

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return next(self.loaded), next(self.loaded), 32, 0, 1024

    def unload_module(self, module: Any) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Driver]:
    gpu = Driver()
    monkeypatch.setattr(driver, "_active", gpu)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield gpu


@pytest.fixture
def kernel(gpu: Driver) -> Iterator[Any]:
    kernel = JITFunction(scaled)
    yield kernel
    kernel.device_caches.clear()
    gc.collect()  # while there is a driver to unload what was compiled


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every launch that goes through Triton."""
    found: list[tuple[Any, ...]] = []
    run = JITFunction.run

    def counted(kernel: Any, *arguments: Any, **named: Any) -> Any:
        found.append(arguments)
        return run(kernel, *arguments, **named)

    monkeypatch.setattr(JITFunction, "run", counted)
    return found


def argument_lists() -> list[tuple[Any, ...]]:
    """A list of arguments, and others that differ from it in one thing that Triton compiles anew for, or may."""
    x, ints = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    first = [x, (x, 5), Plan(ints, ints), None, 48, 1e-6, True]
    changes = {
        0: (x[1:], x.bfloat16(), torch.nn.Parameter(x)),
        1: ((x[1:], 5), (x, 1), (x, 16), (ints, 5)),
        2: (Plan(ints[2:], ints), Plan(ints.long(), ints), Plan(ints, ints[1:])),
        3: (x, x[3:], ints),
        4: (1, 47, 1 << 40, (1 << 40) + 1),
        5: (2.0, 1, 16),
        6: (False, 1, 0),
    }
    return [tuple(first)] + [
        (*first[:place], other, *first[place + 1 :]) for place, others in changes.items() for other in others
    ]


def test_every_kind_of_arguments_launches_what_triton_launches_and_triton_is_asked_once(gpu, kernel, through_triton):
    constants = dict(D=16, BY=2, num_warps=1)
    launch, lists = Launch(kernel, (3, 2), **constants), argument_lists()
    for arguments in lists:
        kernel[(3, 2)](*arguments, **constants)
    truth, gpu.launched = gpu.launched, []
    assert len({function for *_, function in (each[:5] for each in truth)}) > 10  # there is what to mix up
    launch(*lists[0])
    for arguments in lists:
        launch(*arguments)
    gpu.launched.clear()
    through_triton.clear()
    for _ in range(2):
        for arguments in lists:
            launch(*arguments)
    assert not through_triton
    assert len(gpu.launched) == 2 * len(truth)
    for ours, theirs in zip(gpu.launched, [*truth, *truth], strict=True):
        assert same(ours, theirs)


def same(a: Any, b: Any) -> bool:
    """True where both are the same tensor, equal numbers, or tuples of such; or tell a profiler the same."""
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, LazyDict):
        return isinstance(b, LazyDict) and a.get() == b.get()
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)


@pytest.mark.quick
def test_each_device_launches_what_was_compiled_for_it(gpu, kernel, through_triton):
    launch, arguments = Launch(kernel, (1,), D=16, BY=2), argument_lists()[0]
    functions = []
    for _ in range(3):
        for gpu.device in (0, 1):
            launch(*arguments)
            functions.append((gpu.launched[-1][3], gpu.launched[-1][4]))
    assert functions[2:] == functions[:2] * 2 and functions[0] != functions[1]
    assert len(through_triton) == 3  # the first of all is not remembered


def test_numbers_that_a_kernel_is_not_compiled_for_are_of_one_kind(gpu, through_triton):
    """Those of 31 bits; longer ones are other numbers to Triton, too."""
    kernel, (x, *rest) = JITFunction(scaled, do_not_specialize=["n"]), argument_lists()[0]
    launch, numbers = Launch(kernel, (1,), D=16, BY=2), (1, 16, 47, 48, 1 << 40)
    functions = []
    for n in (48, *numbers, *numbers):
        launch(x, *rest[:3], n, *rest[4:])
        functions.append(gpu.launched[-1][4])
    assert len(through_triton) == 3  # the first of all, and the first of each kind
    assert functions[1:6] == functions[6:] and len(set(functions[:5])) == 1 and functions[5] != functions[0]
    kernel.device_caches.clear()
    gc.collect()


@pytest.mark.quick
def test_a_launch_that_is_too_large_is_refused_and_triton_asked_once(gpu, kernel, through_triton, monkeypatch):
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: -1)
    launch = Launch(kernel, (1,), D=16, BY=2)
    for _ in range(3):
        with pytest.raises(TooLarge, match=r"scaled .* 0 .*-1"):
            launch(*argument_lists()[0])
    assert len(through_triton) == 1 and not gpu.launched


@pytest.mark.quick
def test_what_is_launched_in_too_many_ways_and_what_is_switched_off_goes_through_triton(
    gpu, kernel, through_triton, monkeypatch
):
    x, *rest = argument_lists()[0]
    launch = Launch(kernel, (1,), D=16, BY=2)
    monkeypatch.setattr(relaunch, "MOST_SIGNATURES", 2)
    for _ in range(2):
        for n in (48, 48, 80, 96):
            launch(x, *rest[:3], n, *rest[4:])
    assert len(through_triton) == 5 and len(gpu.launched) == 8
    monkeypatch.setattr(relaunch, "IS_ON", False)
    switched_off = Launch(kernel, (1,), D=16, BY=2)
    through_triton.clear()
    for _ in range(3):
        switched_off(x, *rest)
    assert len(through_triton) == 3


@pytest.mark.quick
def test_a_kernel_that_somebody_watches_goes_through_triton(gpu, kernel, through_triton):
    seen: list[Any] = []
    kernel.add_pre_run_hook(lambda *arguments, **named: seen.append(arguments))
    launch = Launch(kernel, (1,), D=16, BY=2)
    for _ in range(3):
        launch(*argument_lists()[0])
    assert len(seen) == len(through_triton) == 3


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch, "_has_warned", False)


@pytest.mark.quick
@pytest.mark.parametrize("is_given", [False, True], ids=["no launch is given", "the launch fails"])
def test_kernels_that_cannot_be_launched_past_triton_go_through_it_with_one_warning(
    gpu, kernel, through_triton, unsaid, monkeypatch, is_given
):
    refuses = Mock(side_effect=TypeError("launch takes 9 arguments"))
    monkeypatch.setattr(relaunch.CompiledKernel, "__getitem__", (lambda *_: refuses) if is_given else refuses)
    launch, lists = Launch(kernel, (1,), D=16, BY=2), argument_lists()[:2]
    with pytest.warns(UserWarning, match="TypeError: launch takes 9 arguments") as warned:
        for arguments in lists * 4:
            launch(*arguments)
    assert len(warned) == 1 and len(through_triton) == len(gpu.launched) == 8
    assert refuses.call_count == len(lists)  # each kind is tried once


@pytest.mark.quick
def test_what_a_gpu_refuses_is_raised_without_a_warning(gpu, kernel, monkeypatch, recwarn):
    launch, arguments = Launch(kernel, (1,), D=16, BY=2), argument_lists()[0]
    for _ in range(3):
        launch(*arguments)

    def failing(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(gpu.launcher_cls, "__call__", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch(*arguments)
    assert not recwarn
