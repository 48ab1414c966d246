"""Adapters of MiniMax M3, its experts' among them: merged, and in PEFT's format under transformers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdiff
from blockdiff import checkpoint
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, adapters_of, draw_adapters, merge, targets
from blockdiff.models.model import BlockDiffusionModel
from tests.models.test_adapters import drawn
from tests.models.test_minimax_m3 import close, oracle, tokens
from tests.support.families import m3_config

pytestmark = pytest.mark.quick
PARTS = {"attention": LowRank(4, 8), "mlp": LowRank(2, 8), "experts": LowRank(3, 5)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' model in files."""
    directory = tmp_path_factory.mktemp("m3")
    oracle(m3_config()).save_pretrained(directory)
    return directory


def loaded(base: Path) -> BlockDiffusionModel:
    return blockdiff.load(base, dtype="float64", device="cpu", kernels="torch")


def adapted(base: Path, parts: dict[str, LowRank], rows: tuple[int, ...] = ()) -> BlockDiffusionModel:
    model = loaded(base)
    adapt(model, targets(model, parts), rows)
    draw_adapters(model, 0, torch.device("cpu"), torch.float64)
    drawn(adapter_tensors(model))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    prompt = tokens(2, 37)
    if isinstance(model, BlockDiffusionModel):
        return model.unembed(model.encode(prompt).hidden)
    found: Tensor = model(input_ids=prompt).logits
    return found


def test_merged_and_unmerged_logits_are_equal_and_every_part_counts(base):
    model = adapted(base, PARTS, (5, 17))
    names = set(adapters_of(model))
    assert {"layers.0.mlp.gate_proj", "layers.1.shared.down_proj", "layers.2.experts"} <= names
    before, plain = logits(model), logits(loaded(base))
    for part in PARTS:
        assert float((logits(adapted(base, {part: PARTS[part]})) - plain).abs().max()) > 0.01, part
    merge(model)
    assert not adapters_of(model)
    close(logits(model), before, 1e-6)  # logits are fp32


@pytest.mark.parametrize("parts", [PARTS, {"experts": LowRank(2, 4, rslora=True), "mlp": LowRank(4, 4, rslora=True)}])
def test_a_saved_adapter_loads_in_peft_with_equal_logits_and_is_read_back_as_it_was(base, tmp_path, parts):
    from peft import PeftModel

    model = adapted(base, parts, (5, 17))
    checkpoint.save_adapter(model, tmp_path / "a", base=str(base))
    theirs = PeftModel.from_pretrained(oracle(m3_config()), tmp_path / "a").eval()
    close(logits(theirs), logits(model), 1e-6)
    again = loaded(base)
    checkpoint.load_adapter(again, tmp_path / "a")
    found, expected = adapter_tensors(again), adapter_tensors(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())
    assert {n: m.low_rank for n, m in adapters_of(again).items()} == {
        n: m.low_rank for n, m in adapters_of(model).items()
    }


def test_an_adapter_that_peft_made_of_gate_and_up_together_is_read(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r"model\.language_model\.layers\.\d+\.mlp\.(shared_experts\.)?gate_up_proj",
        target_parameters=["mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    wrapped = get_peft_model(oracle(m3_config()), config)
    wrapped.save_pretrained(tmp_path)
    model = loaded(base)
    checkpoint.load_adapter(model, tmp_path)
    assert adapters_of(model)["layers.0.mlp.up_proj"].low_rank == LowRank(4, 6)
    close(logits(model), logits(wrapped.eval()), 1e-6)


def test_half_of_what_transformers_has_as_one_matrix_is_refused(base, tmp_path):
    model = loaded(base)
    adapt(model, {"layers.0.mlp.gate_proj": LowRank(2, 4)})
    draw_adapters(model, 0, torch.device("cpu"), torch.float64)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.gate_up_proj"):
        checkpoint.save_adapter(model, tmp_path / "a")
