"""Which functions a backend gives: by name, by machine, and call by call."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import triton
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels import IN_C, IN_TORCH, Kernels, ops, resolve
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.norm_rope import triton as norms
from blockdiff.kernels.op import Composition
from blockdiff.kernels.ops import OPS

WITHOUT_TRITON = {"route", "logits", "divergence"}


@pytest.mark.parametrize("name", OPS)
def test_the_backends_of_an_op_are_called_alike(name):
    op = OPS[name]
    assert name == op.name == op.in_torch.__name__ and ("triton" in op.backends) is (name not in WITHOUT_TRITON)
    own = [*inspect.signature(op.in_torch).parameters][isinstance(op, Composition) :]
    for backend in op.backends:
        assert [*inspect.signature(op.on(backend)).parameters] == own


def test_a_backend_binds_its_functions():
    for name, op in OPS.items():
        if not isinstance(op, Composition):
            assert getattr(IN_TORCH, name) is op.in_torch
            assert getattr(resolve("triton"), name) is (op.in_torch if name in WITHOUT_TRITON else op.on("triton"))


def test_an_op_may_have_a_backend_of_its_own_and_compositions_use_it():
    calls = []

    def noted(x: Tensor, weights: object, eps: float) -> tuple[Tensor, ...]:
        calls.append(weights)
        return IN_TORCH.rms_norms(x, (None,), eps)

    x, kernels = torch.randn(3, 8), IN_C.replaced(rms_norms=noted, add_rms_norm="torch")
    kernels.residual_norms(x, x, torch.ones(8), (None,), 1e-6)
    assert calls == [(None,)] and kernels.add_rms_norm is IN_TORCH.add_rms_norm
    assert kernels.norm_rope.__name__ == "norm_rope" and IN_C.rms_norms is not noted


def test_the_folder_of_an_op_stays_a_module():
    """An op of the same name must not take its place in the package."""
    import blockdiff.kernels.expert_mlp.triton as experts
    import blockdiff.kernels.norm_rope.triton as norms
    import blockdiff.kernels.span_attention.triton as attention

    assert all(callable(op) for op in (experts.expert_mlp, norms.norm_rope, attention.span_attention))


@pytest.mark.parametrize("name", ["auto", "torch", "triton"])
def test_a_copied_model_has_the_functions_of_the_first(name):
    chosen = resolve(name)
    assert copy.deepcopy(chosen) is chosen


def test_a_kernels_object_is_taken_as_it_is():
    assert resolve(IN_TORCH) is IN_TORCH and resolve("torch") is IN_TORCH


def test_an_unknown_word_names_the_known_ones():
    with pytest.raises(BlockdiffError, match='"auto", "torch" or "triton"'):
        resolve("cuda")


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


def with_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    without_a_gpu(monkeypatch)
    with pytest.raises(BlockdiffError, match="CUDA device"):
        resolve("triton")
    assert resolve("auto") is IN_C
    with_a_gpu(monkeypatch, (7, 5))
    with pytest.raises(BlockdiffError, match=r"8\.0.*7\.5"):
        resolve("triton")
    with pytest.warns(UserWarning, match="no Triton"):
        assert resolve("auto") is IN_C
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BlockdiffError, match="triton package"):
        resolve("triton")


def test_a_rocm_build_runs_without_triton_with_one_warning(monkeypatch):
    """Its capability numbers mean something else."""
    with_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(BlockdiffError, match="ROCm"):
        resolve("triton")
    with pytest.warns(UserWarning, match="no Triton: this torch is built for ROCm") as warned:
        assert resolve("auto") is IN_C
    assert len(warned) == 1


class OnGPU(Tensor):
    """A tensor of this machine that says it is on a GPU."""

    is_cuda = True


def test_auto_runs_a_call_that_has_no_kernel_in_torch_and_says_so_once(monkeypatch):
    def refuse(x: Tensor, weights: object, eps: float) -> None:
        raise Unserved("rms_norms in Triton has no tile for it")

    with_a_gpu(monkeypatch)
    monkeypatch.setattr(norms, "rms_norms", refuse)
    chosen, x = resolve("auto"), torch.randn(3, 8).as_subclass(OnGPU)
    with pytest.warns(UserWarning, match="rms_norms runs in torch: rms_norms in Triton has no tile for it$") as warned:
        outs = [chosen.rms_norms(x, (None,), 1e-6)[0] for _ in range(2)]
    assert len(warned) == 1 and torch.equal(*outs) and torch.equal(outs[0], IN_TORCH.rms_norms(x, (None,), 1e-6)[0])
    with pytest.raises(BlockdiffError, match=r'tile.*kernels="torch"'):
        Kernels.rms_norms.on("triton")(x, (None,), 1e-6)


def test_auto_on_a_gpu_machine_leaves_cpu_tensors_and_fp64_to_the_ops_of_a_cpu(monkeypatch):
    with_a_gpu(monkeypatch)
    chosen = resolve("auto")
    x = torch.randn(3, 8)
    assert torch.equal(chosen.rms_norms(x, (None,), 1e-6)[0], IN_C.rms_norms(x, (None,), 1e-6)[0])
    assert chosen.rms_norms(x.double(), (None,), 1e-6)[0].dtype == torch.float64
