"""A further form of stored weights is a class and a line in each of two tables, here bytes with scales of 16.

Its tensors are those of the published forms of four bits: codes, a scale for each block of 16 inputs, one of a matrix.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import blockdiff
from blockdiff.layers import weights
from blockdiff.layers.lora import LowRank
from blockdiff.models import stored
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers
from blockdiff.parallel.tensor import tensor_parallel
from blockdiff.tensor_pieces import PlannedMesh
from blockdiff.training.freeze import count_parts
from tests.support.closeness import relative_error
from tests.support.families import CONFIGS

pytestmark = pytest.mark.quick
BLOCK = 16
Q = "layers.0.attention.q_proj"


class Tensors(NamedTuple):
    codes: Tensor
    scale: Tensor
    factor: Tensor


class Blocks(Tensors):
    """Bytes [..., out, in], scales [..., out, in / 16], and a factor of each matrix [...]."""

    __slots__ = ()
    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_scale", "_scale_2")
    DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float32, torch.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @classmethod
    def empty_like(cls, weight: Tensor) -> Blocks:
        *experts, outputs, inputs = weight.shape
        scale = weight.new_empty((*experts, outputs, inputs // BLOCK), dtype=torch.float32)
        return cls(weight.new_empty(weight.shape, dtype=torch.uint8), scale, scale.new_empty(experts))

    @classmethod
    def nearest(cls, weight: Tensor) -> Blocks:
        wide = weight.float()
        factor = wide.abs().amax((-1, -2))
        blocks = (wide / factor[..., None, None]).unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1) / 127
        codes = (blocks / scale[..., None]).round().to(torch.int8).view(torch.uint8)
        return cls(codes.flatten(-2), scale, factor)

    def part(self, index: Any) -> Blocks:
        return Blocks(
            self.codes[index], self.scale[index], self.factor if isinstance(index, slice) else self.factor[index]
        )

    def decoded(self, dtype: torch.dtype) -> Tensor:
        numbers = self.codes.view(torch.int8).float().unflatten(-1, (-1, BLOCK)) * self.scale[..., None]
        return (numbers.flatten(-2) * self.factor[..., None, None]).to(dtype)

    def product(self, ops: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.decoded(x.dtype))


@pytest.fixture
def pair(tmp_path, monkeypatch) -> tuple[BlockDiffusionModel, BlockDiffusionModel]:
    """A model and the same with its weights in the form."""
    monkeypatch.setitem(weights.FORMS, "blocks", Blocks)
    monkeypatch.setitem(stored.QUANTIZE, "blocks", (weights.FORMS["fp8"], Blocks))  # experts alone, at first
    base = blockdiff.save(
        blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch"), tmp_path / "base"
    )
    mixed = load(base, "blocks")
    assert {type(module).__name__ for module in stored_layers(mixed).values() if module.stored is Blocks} == {"Experts"}
    monkeypatch.setitem(stored.QUANTIZE, "blocks", (Blocks, Blocks))
    return load(base), load(base, "blocks")


def load(path: Any, quantize: str | None = None) -> BlockDiffusionModel:
    return blockdiff.load(path, dtype="float32", device="cpu", kernels="torch", quantize=quantize)


def hidden(model: BlockDiffusionModel) -> Tensor:
    tokens = torch.arange(2, 14)[None]
    return model.denoise(tokens[:, :8], model.encode(tokens))


def test_weights_are_read_into_the_form_computed_with_adapted_and_merged(pair):
    plain, model = pair
    q = model.get_submodule(Q)
    assert q.stored is Blocks and {"weight", "weight_scale", "weight_scale_2"} <= dict(q.named_buffers()).keys()
    assert torch.equal(q.matrix().codes, Blocks.nearest(plain.get_submodule(Q).weight.detach()).codes)
    with torch.no_grad():
        assert 0 < relative_error(hidden(model), hidden(plain)) < 0.05
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
    assert o.matrix().scale.shape == (outputs, inputs // BLOCK) and o.matrix().factor.shape == ()
    with torch.no_grad():
        assert hidden(model).isfinite().all()
