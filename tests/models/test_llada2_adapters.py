"""Adapters of LLaDA2.x, its experts' among them: merged, and in PEFT's format under the names of its own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import blockdiff
from blockdiff import checkpoint
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, adapters_of, draw_adapters, merge, targets
from blockdiff.models.llada2 import LLaDA2
from tests.models.test_adapters import drawn
from tests.support.closeness import require_close
from tests.support.families import small_model

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("without_gradients")]
PARTS = {"attention": LowRank(4, 8), "mlp": LowRank(2, 8), "experts": LowRank(3, 5)}
TOKENS = torch.randint(4, 90, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llada2")
    blockdiff.save(small_model("llada2"), directory)
    return directory


def loaded(base: Path) -> LLaDA2:
    return blockdiff.load(base, dtype="float64", device="cpu", kernels="torch")


def adapted(base: Path, rows: tuple[int, ...] = ()) -> LLaDA2:
    model = loaded(base)
    adapt(model, targets(model, PARTS), rows)
    draw_adapters(model, 0, torch.device("cpu"), torch.float64)
    drawn(adapter_tensors(model))
    return model


def their_modules(base: Path) -> nn.Module:
    """The modules of the released code that hold weights, with their names, and the weights of the files."""
    root = nn.Module()
    for name, tensor in load_file(base / "model.safetensors").items():
        if tensor.dim() == 2:
            path, owner = name.removesuffix(".weight").split("."), root
            for part in path[:-1]:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            is_table = path[-1] == "word_embeddings"
            made = nn.Embedding(*tensor.shape) if is_table else nn.Linear(*tensor.shape[::-1], bias=False)
            made.weight = nn.Parameter(tensor.double())
            owner.add_module(path[-1], made)
    return root


def their_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): x for name, x in model.state_dict().items() if "lora" not in name}


def ranks_of(model: LLaDA2) -> dict[str, LowRank | None]:
    return {name: module.low_rank for name, module in adapters_of(model).items()}


def test_query_key_value_is_one_module_with_one_adapter(base):
    model = adapted(base)
    assert adapters_of(model)["layers.0.attention.qkv_proj"].lora_B.shape == ((4 + 2 * 2) * 16, 4)
    before = model.encode(TOKENS).hidden
    merge(model)
    require_close(model.encode(TOKENS).hidden, before, 1e-10)


def test_a_saved_adapter_is_one_of_the_modules_of_its_own_code_and_is_read_back_as_it_was(base, tmp_path):
    from peft import PeftModel

    model = adapted(base, (5, 17))
    checkpoint.save_adapter(model, tmp_path, base=str(base))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"] is None
    theirs = PeftModel.from_pretrained(their_modules(base), tmp_path)
    merged, plain = their_weights(theirs.merge_and_unload()), load_file(base / "model.safetensors")
    again = loaded(base)
    checkpoint.load_adapter(again, tmp_path)
    expected = adapter_tensors(model)
    assert all(torch.equal(x, expected[name]) for name, x in adapter_tensors(again).items())
    assert {n: m.low_rank for n, m in adapters_of(again).items()} == {
        n: m.low_rank for n, m in adapters_of(model).items()
    }
    merge(again)
    blockdiff.save(again, tmp_path / "ours")
    ours = load_file(tmp_path / "ours/model.safetensors")
    adapters = [name for name, x in ours.items() if not torch.equal(x, plain[name])]
    assert any("experts.7.down_proj" in name for name in adapters) and any(
        "query_key_value" in name for name in adapters
    )
    for name in merged:
        require_close(merged[name], ours[name], 1e-6)


def test_adapters_that_peft_trained_of_gate_and_of_up_are_read_as_one_of_twice_the_rank(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    names = ["gate_proj", "up_proj", "query_key_value"]
    wrapped = get_peft_model(
        their_modules(base), LoraConfig(r=4, lora_alpha=6, target_modules=names, init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path)
    model = loaded(base)
    checkpoint.load_adapter(model, tmp_path)
    assert adapters_of(model)["layers.1.experts"].low_rank == LowRank(8, 12)
    assert adapters_of(model)["layers.1.shared.up_proj"].low_rank == LowRank(4, 6)
    merge(model)
    blockdiff.save(model, tmp_path / "ours")
    merged, ours = their_weights(wrapped.merge_and_unload()), load_file(tmp_path / "ours/model.safetensors")
    for name in merged:
        require_close(merged[name], ours[name], 1e-6)


def test_adapters_of_gate_without_up_are_refused(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        their_modules(base), LoraConfig(r=4, target_modules=["gate_proj"], init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: give all matrices"):
        checkpoint.load_adapter(loaded(base), tmp_path)
