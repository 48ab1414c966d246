"""The contract of a model family, and that only a family's own files know it by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from blockdiff.checkpoint import empty, empty_image_side, preset_config
from blockdiff.errors import CheckpointError
from blockdiff.models.family import families, family_of
from blockdiff.models.model import BlockDiffusionModel

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
OWN = [
    ROOT / "blockdiff" / "models" / name
    for name in ("diffusion_gemma", "dflash", "eagle3", "llada2", "minimax_m3", "llama.py", "sdar")
]
NAMES = ("diffusiongemma", "dflash", "eagle", "llada2", "minimax", "qwen", "sdar")  # llama3 is a kind of RoPE, too
TOKENS = ("]<]minimax[>[",)  # control tokens of a format of calls: a tokenizer has them, whatever the family


@pytest.fixture(scope="module")
def model() -> BlockDiffusionModel:
    model = empty(preset_config("tiny"), "torch")
    model.image_side = empty_image_side(model.config)
    return model


def test_a_family_is_found_by_its_model_type():
    tiny = preset_config("tiny")
    assert family_of({"model_type": "diffusion_gemma"}) is type(tiny) is families()["diffusion_gemma"]
    assert {family.model_type for family in families().values()} == families().keys()
    for unknown in ("gpt2", None):
        with pytest.raises(CheckpointError, match=r"model_type .*'diffusion_gemma', .*'llama', "):
            family_of({"model_type": unknown})


def test_every_parameter_and_buffer_has_a_part_and_a_name_on_the_hub(model):
    family = model.config
    parts = {name: family.part_of(name) for name in model.state_dict()}
    assert set(parts.values()) == set(family.parts)
    expected = {
        "vocabulary.table": "embedding",
        "norm.weight": "norms",
        "self_conditioning.pre_norm.weight": "self_conditioning",
        "layers.0.attention.q_proj.weight": "attention",
        "layers.0.attention.q_norm.weight": "norms",
        "layers.3.mlp.up_proj.weight": "mlp",
        "layers.3.experts.gate_up_proj": "experts",
        "layers.3.router.scale": "router",
        "layers.3.encoder_scalar": "layer_scalars",
        "image_side.vision_tower.encoder.layers.0.input_layernorm.weight": "images",
    }
    assert {name: parts[name] for name in expected} == expected
    assert family.part_of("lora.up") == "other"
    for name in model.state_dict():
        assert family.names.to_ours(family.names.to_hub(name)) == name


def test_names_lead_from_both_ends_of_a_tie_to_the_same_tensor(model):
    names = model.config.names
    assert names.to_ours("lm_head.weight") == "vocabulary.table"
    tied = "model.encoder.language_model.layers.2.mlp.up_proj.weight"
    assert names.to_ours(tied) == "layers.2.mlp.up_proj.weight" != names.to_ours(tied.replace("mlp", "mtp"))
    assert names.to_hub("layers.2.lora.weight") is None and names.to_ours("model.decoder.mystery") is None
    assert names.is_carried("model.encoder.vision_tower.x") and not names.is_carried("model.encoder.x")


def test_sharding_units_are_modules_inner_ones_first_and_cover_the_model(model):
    units = model.config.units(model)
    assert units[-1] is model and len({id(unit) for unit in units}) == len(units) == 2 * 4 + 3
    seen: set[nn.Module] = set()
    for unit in units:
        assert unit not in seen, "a unit inside one that came before"
        seen |= set(unit.modules())


def test_what_a_family_cannot_do_is_refused_in_one_line():
    family = families()["diffusion_gemma"]
    family.require(predictions="leave_one_out", corruptions="mask", meshes="replicate")
    with pytest.raises(CheckpointError, match=r"sideways \(predictions: posterior, leave_one_out\)"):
        family.require(predictions="sideways")
    none = type("None", (family,), {"meshes": ()})
    with pytest.raises(CheckpointError, match=r"tensor \(meshes: none\)"):
        none.require(meshes="tensor")


def test_frequencies_and_kinds_are_there_in_an_empty_model(model):
    assert model.layer_kinds == ("sliding", "sliding", "sliding", "full")
    assert {name: kind.window for name, kind in model.kinds.items()} == {"sliding": 16, "full": None}
    assert all(kind.name == name and kind.frequencies.device.type == "cpu" for name, kind in model.kinds.items())
    cos, sin = model.kinds["full"].rope(torch.arange(5)[None], torch.float32)
    assert cos.shape == sin.shape == (1, 5, 32)


def words_of(tree: ast.AST) -> set[str]:
    """Every name that code uses, defines or imports, and every string that is one word."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            found |= {part for part in ([value] if isinstance(value, str) else []) if " " not in part}
    return found


@pytest.mark.parametrize("folder", ["blockdiff", "cli"])
def test_only_a_familys_own_files_know_it_by_name(folder):
    wrong = [
        f"{file.relative_to(ROOT)}: {word}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not {*OWN} & {file, *file.parents}
        for word in words_of(ast.parse(file.read_text(encoding="utf-8")))
        if word not in TOKENS
        and (any(name in word.lower().replace("_", "") for name in NAMES) or word in ("text_config", "vision_config"))
    ]
    assert not wrong
