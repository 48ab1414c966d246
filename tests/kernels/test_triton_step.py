"""The whole line on Triton: which kernels a choice gives, and one training step and one denoise beside native ops."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
import triton
from torch import Tensor

from blockdiff import kernels
from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import BlockdiffError
from blockdiff.kernels import CPU, NATIVE, NATIVE_ONLY, OPS, Kernels, resolve, triton_op
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.norm_rope import triton as norms
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Objective
from tests.oracle import oracle, ours, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L, V = 8, 384


# -- which kernels a choice gives ----------------------------------------------------------------------------------


def test_every_op_has_a_folder_and_two_implementations():
    assert OPS.keys() == {op.name for op in fields(Kernels)} - {"fused", "joined", "sweep_attention"}
    chosen = resolve("triton")
    for op in OPS:
        assert getattr(chosen, op).__name__ == op == getattr(NATIVE, op).__name__
        assert (getattr(chosen, op) is getattr(NATIVE, op)) == (op in NATIVE_ONLY)


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
    assert resolve(NATIVE) is NATIVE and resolve("torch") is NATIVE


def test_an_unknown_choice_names_the_known_ones():
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
    with pytest.raises(BlockdiffError, match="needs a CUDA device"):
        resolve("triton")
    assert resolve("auto") is CPU
    with_a_gpu(monkeypatch, (7, 5))
    with pytest.raises(BlockdiffError, match=r"compute capability 8\.0, this GPU has 7\.5"):
        resolve("triton")
    with pytest.warns(UserWarning, match="native ops only"):
        assert resolve("auto") is CPU
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BlockdiffError, match="triton package is not installed"):
        resolve("triton")


def test_a_rocm_build_runs_natively_with_one_warning(monkeypatch):
    """Its capability numbers mean something else."""
    with_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(BlockdiffError, match="built for ROCm"):
        resolve("triton")
    with pytest.warns(UserWarning, match="native ops only: this torch is built for ROCm") as warned:
        assert resolve("auto") is CPU
    assert len(warned) == 1


class OnGPU(Tensor):
    """A tensor of this machine that says it is on a GPU."""

    is_cuda = True


def test_auto_runs_a_call_that_has_no_kernel_natively_and_says_so_once(monkeypatch):
    def refuse(x: Tensor, weights: object, eps: float) -> None:
        raise Unserved("rms_norms in Triton has no tile for it")

    with_a_gpu(monkeypatch)
    monkeypatch.setattr(norms, "rms_norms", refuse)
    chosen, x = resolve("auto"), torch.randn(3, 8).as_subclass(OnGPU)
    with pytest.warns(UserWarning, match="rms_norms runs natively: rms_norms in Triton has no tile for it$") as warned:
        outs = [chosen.rms_norms(x, (None,), 1e-6)[0] for _ in range(2)]
    assert len(warned) == 1 and torch.equal(*outs) and torch.equal(outs[0], NATIVE.rms_norms(x, (None,), 1e-6)[0])
    with pytest.raises(BlockdiffError, match='has no tile for it; kernels="torch" has no such limit'):
        triton_op("rms_norms")(x, (None,), 1e-6)


def test_auto_on_a_gpu_machine_leaves_cpu_tensors_and_fp64_to_the_ops_of_a_cpu(monkeypatch):
    with_a_gpu(monkeypatch)
    chosen = resolve("auto")
    x = torch.randn(3, 8)
    assert torch.equal(chosen.rms_norms(x, (None,), 1e-6)[0], CPU.rms_norms(x, (None,), 1e-6)[0])
    assert chosen.rms_norms(x.double(), (None,), 1e-6)[0].dtype == torch.float64


# -- one step beside native ops ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> tuple[DiffusionGemma, DiffusionGemma, DiffusionGemma]:
    """The same weights of one sliding and one full layer: native in fp64, native in fp32, on Triton in fp32."""
    kinds = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_experts=4)
    truth = ours(oracle(tiny_config(canvas_length=L, **kinds))).to(DEVICE)
    native, on_triton = (DiffusionGemma(truth.config, kernels=kind).to(DEVICE) for kind in ("torch", "triton"))
    for model in (native, on_triton):
        model.load_state_dict(truth.state_dict())
    return truth, native.eval(), on_triton.eval()


def close(values: list[Tensor]) -> bool:
    """(fp64, fp32, Triton): Triton is about as far from fp64 as torch's fp32 is; single sums may be luckier."""
    truth, native, on_triton = (x.detach().double() for x in values)
    return bool((on_triton - truth).norm() <= 4 * (native - truth).norm() + 1e-6 * truth.norm())


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch() -> Batch:
    """Unequal rows longer and shorter than the window (16), two documents in one of them, coins and none."""

    def canvas(sample: int, row: list[int], start: int, doc: int = 0, coin: bool = False) -> Canvas:
        filled = [*row[start : start + L], *[1] * L][:L]
        return Canvas(filled, start, doc, None, 0.3 + 0.1 * sample, coin, address=(0, sample, start))

    a, b = tokens(40, 1), tokens(27, 2)
    return lay_out(
        [
            CleanRow(a, [canvas(0, a, 9), canvas(0, a, 28, 18, coin=True)], 0, doc_starts=(0, 18)),
            CleanRow(b, [canvas(1, b, 19, coin=True)], 1),
        ],
        L,
        pad_id=0,
    ).to(DEVICE)


def test_one_training_step_is_the_same_on_triton(models):
    """Both losses and every gradient, the routers' too."""
    losses, gradients = [], []
    for model in models:
        objective = Objective(model, Linear(), UniformCorruption(V), seed=5)
        sums = objective(batch())
        (sums.canvas_sum / 16 + sums.ar_sum / 60).backward()
        losses.append((sums.canvas_sum, sums.ar_sum))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert all(close(list(values)) for values in zip(*losses, strict=True))
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys() >= {"vocabulary.table"}
    for name, truth in gradients[0].items():
        assert truth.any() and close([of_model[name] for of_model in gradients]), name


@torch.no_grad()
def test_a_denoise_after_a_chunked_encode_is_the_same_on_triton(models):
    """What sampling runs: unequal rows, a second chunk, a canvas with a signal."""
    first, second, canvas = (
        torch.tensor([tokens(n, seed), tokens(n, seed + 1)], device=DEVICE) for n, seed in ((21, 3), (7, 5), (L, 7))
    )
    logits = []
    for model in models:
        prefix = model.encode(first, torch.tensor([21, 3], device=DEVICE))
        prefix = model.encode(second, torch.tensor([5, 7], device=DEVICE), prefix)
        soft = model.soft_embedding(model.unembed(model.denoise(canvas, prefix)))
        logits.append(model.unembed(model.denoise(canvas, prefix, soft)))
    assert close(logits)
