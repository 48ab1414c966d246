"""Layers with weights in NVFP4: read into the form, computed with, adapted, merged, and cut for ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff import checkpoint
from blockdiff.errors import CheckpointError, RunError
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import forms_of, quantised_layers, stored_layers
from blockdiff.parallel.tensor import refuse_uneven, tensor_parallel
from blockdiff.stored_forms import QUANTIZE
from blockdiff.tensor_pieces import PlannedMesh
from blockdiff.training.freeze import count_parts
from tests.support.closeness import relative_error
from tests.support.families import CONFIGS

pytestmark = pytest.mark.quick
Q = "layers.0.attention.q_proj"


@pytest.fixture
def pair(tmp_path, monkeypatch) -> tuple[BlockDiffusionModel, BlockDiffusionModel]:
    """A model and the same with its weights in NVFP4: attention and dense MLP, too, as files may have them."""
    base = blockdiff.save(
        blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch"), tmp_path / "base"
    )
    mixed = load(base, "nvfp4")
    assert {type(module).__name__ for module in stored_layers(mixed).values() if module.stored is Nvfp4} == {"Experts"}
    assert forms_of(mixed) == ("fp8", "nvfp4")
    monkeypatch.setitem(QUANTIZE, "nvfp4", ("nvfp4", "nvfp4"))
    return load(base), load(base, "nvfp4")


def load(path: Any, quantize: str | None = None) -> BlockDiffusionModel:
    return blockdiff.load(path, dtype="float32", device="cpu", kernels="torch", quantize=quantize)


def hidden(model: BlockDiffusionModel) -> Tensor:
    tokens = torch.arange(2, 14)[None]
    return model.denoise(tokens[:, :8], model.encode(tokens))


def test_weights_are_read_into_the_form_computed_with_adapted_and_merged(pair):
    plain, model = pair
    q = model.get_submodule(Q)
    assert q.stored is Nvfp4 and {"weight", "weight_scale", "weight_scale_2"} <= dict(q.named_buffers()).keys()
    assert torch.equal(q.matrix().codes, Nvfp4.nearest(plain.get_submodule(Q).weight.detach()).codes)
    with torch.no_grad():
        assert 0 < relative_error(hidden(model), hidden(plain)) < 0.6
    model.to(torch.bfloat16).to(torch.float32)
    assert q.weight_scale_2.dtype == torch.float32 and q.weight.dtype == torch.uint8
    assert count_parts(model)[-1].frozen > 0
    adapt(model, targets(model, {part: LowRank(2, 4.0) for part in ("attention", "mlp", "experts")}))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    hidden(model).square().sum().backward()
    grads = {name: x.grad for name, x in model.named_parameters() if name.endswith("lora_B")}
    assert grads and all(grad is not None and grad.any() for grad in grads.values())
    before, weight = hidden(model).detach(), q.matrix().decoded(torch.float32)
    blockdiff.merge(model)
    assert not stored_layers(model) and torch.equal(q.weight, weight)  # B is 0
    assert relative_error(hidden(model), before) < 1e-5


def test_ranks_have_their_parts_of_every_tensor(pair):
    _, model = pair
    whole = {name: module.matrix().decoded(torch.float32) for name, module in stored_layers(model).items() if name == Q}
    tensor_parallel(model, PlannedMesh(2))
    q, o = model.get_submodule(Q), model.get_submodule(Q.replace("q_proj", "o_proj"))
    assert torch.equal(q.matrix().decoded(torch.float32), whole[Q][: len(whole[Q]) // 2])
    outputs, inputs = o.matrix().shape
    assert o.matrix().block_scale.shape == (outputs, inputs // 16) and o.matrix().scale.shape == (outputs, 1)
    with torch.no_grad():
        assert hidden(model).isfinite().all()


def test_a_split_that_would_cut_a_block_is_refused_by_name(monkeypatch, pair):
    plain, model = pair
    monkeypatch.setattr(type(model.config), "tensor_parts", {"layers.*.mlp": "mlp"})
    down = model.get_submodule("layers.0.mlp.down_proj")
    ranks = down.in_features // 8  # each would have half a block
    refuse_uneven(plain, ranks)
    with pytest.raises(RunError, match=rf"{ranks} .* {down.in_features} inputs, in blocks of 16, .* layers\.0\.mlp"):
        refuse_uneven(model, ranks)


def test_models_without_experts_or_with_uneven_inputs_are_refused_by_name():
    config = checkpoint.preset_config("sudoku4-causal")
    with pytest.raises(CheckpointError, match=r"nvfp4.*no experts"):
        quantised_layers(checkpoint.empty(config, "torch"), "nvfp4")
    config = checkpoint.preset_config("sudoku4")
    values = config.to_dict()
    config.text_of(values).update(moe_intermediate_size=24)
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts has 24 inputs"):
        quantised_layers(checkpoint.empty(config.read(values), "torch"), "nvfp4")
