"""Files of weights and adapters are to the byte what they were at commit cb7716d2, whatever modules hold them now."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import blockdiff
from blockdiff import checkpoint
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, targets
from blockdiff.models.model import BlockDiffusionModel
from tests.support.families import CONFIGS

pytestmark = pytest.mark.quick
DIGESTS = {
    "diffusion_gemma": {
        "weights": "ba46beca79bbd570",
        "in fp8": "20d266522e6b0868",
        "adapter": "446f2c7a4938b0f0",
        "adapter over fp8": "8f71a7aa40dccfea",
        "merged": "9cd64f475660db1b",
        "tensors": "f4fd365ae4342a66",
    },
    "minimax_m3": {
        "weights": "beb40a32db1785eb",
        "in fp8": "c4b16a8453d7cc6b",
        "adapter": "2fe0e7ef647a60d1",
        "adapter over fp8": "b020157087485bee",
        "merged": "545ce175388a7417",
        "tensors": "c96c3495bc8819e4",
    },
}


def with_values(model: BlockDiffusionModel) -> BlockDiffusionModel:
    """Give all weights values that are exact in any arithmetic, and differ from tensor to tensor."""
    with torch.no_grad():
        for n, tensor in enumerate(model.parameters()):
            counted = torch.arange(tensor.numel(), dtype=torch.int64)
            tensor.copy_(((counted * 37 + 11 * n) % 251 - 125).view(tensor.shape) / 1024)
    return model


def adapted(path: Path, quantize: str | None = None) -> BlockDiffusionModel:
    model = blockdiff.load(path, dtype="float32", device="cpu", kernels="torch", quantize=quantize)
    adapt(model, targets(model, {part: LowRank(2, 4.0) for part in ("attention", "mlp", "experts")}), [5, 7])
    with torch.no_grad():
        for n, tensor in enumerate(p for p in model.parameters() if p.requires_grad):
            tensor.copy_((torch.arange(tensor.numel()) * 5 + n).remainder(17).view(tensor.shape) / 64)
    return model


def digest(folder: Path) -> str:
    """The digest of all tensor files of a directory."""
    files = sorted(folder.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS)
def test_files_of_weights_and_adapters_and_the_names_that_optimisers_go_by_stay(name, tmp_path):
    model = with_values(blockdiff.init(CONFIGS[name](), seed=0, device="cpu", kernels="torch"))
    base = blockdiff.save(model, tmp_path / "base")
    found = {"weights": digest(base)}
    found["in fp8"] = digest(checkpoint.export(base, tmp_path / "fp8", quantize="fp8"))
    names = []
    for what, quantize in (("adapter", None), ("adapter over fp8", "fp8")):
        model = adapted(base, quantize)
        names += [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
        names += [name for name, tensor in model.named_parameters() if tensor.requires_grad]
        found[what] = digest(checkpoint.save_adapter(model, tmp_path / what, "base"))
    found["merged"] = digest(checkpoint.export(base, tmp_path / "merged", tmp_path / "adapter"))
    found["tensors"] = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    assert found == DIGESTS[name]
