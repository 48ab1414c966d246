"""The image side of a checkpoint: carried, run and written back with every tensor equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import blockdiff
from blockdiff.checkpoint import Carried, draw_weights, empty, empty_image_side, load_weights, save, save_adapter
from blockdiff.errors import BlockdiffError, CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, draw_adapters, targets
from blockdiff.sampling import Generation
from tests.models.test_images import arguments
from tests.support.closeness import relative_error
from tests.support.families import m3_text_config
from tests.support.oracle import our_config
from tests.support.pictures import gemma_config, image_row, minimax_config, pair, picture

pytestmark = pytest.mark.quick
FAMILIES: dict[str, Callable[[random.Random], Any]] = {"diffusion_gemma": gemma_config, "minimax_m3": minimax_config}


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def require_same(found: Path, truth: Path) -> None:
    one, other = stored(found), stored(truth)
    assert one.keys() == other.keys()
    assert all(x.dtype == other[name].dtype and torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_it_goes_through_load_save_transformers_and_back_with_every_tensor_equal(name, tmp_path):
    draw = random.Random(4)
    model, mine = pair(FAMILIES[name](draw), 4, tmp_path / "theirs")
    assert not any(mine.config.names.is_carried(hub, True) for hub in mine.carried.stored)
    save(mine, tmp_path / "ours")
    back, loading = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, dtype=torch.float64)
    assert not any(loading.values())
    back.save_pretrained(tmp_path / "back")
    for directory in ("ours", "back"):
        require_same(tmp_path / directory, tmp_path / "theirs")

    early = empty(mine.config, "torch")  # as a training run has it
    early.image_side = empty_image_side(early.config)
    assert not any(parameter.requires_grad for parameter in early.image_side.parameters())
    load_weights(early, tmp_path / "ours", device="cpu")
    images = [picture(mine.config, draw) for _ in range(2)]
    assert torch.equal(early.image_features(images), mine.image_features(images))
    save(early, tmp_path / "early")
    require_same(tmp_path / "early", tmp_path / "theirs")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_sees_texts_alone_neither_builds_nor_reads_it(name, tmp_path):
    save(blockdiff.init(FAMILIES[name](random.Random(4)), seed=1, device="cpu"), tmp_path)
    model = blockdiff.load(tmp_path, device="cpu")
    sampler = blockdiff.Sampler(model, generation=Generation(max_new_tokens=6))
    sampler.generate([blockdiff.Request("a", tokens=[5, 6, 7])])
    assert model.image_side is None and not any("image" in name for name in model.state_dict())
    assert model.carried.stored and not model.carried.tensors  # where they lie is known, and none is in memory


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_weights_are_the_same_carried_and_run(name, tmp_path):
    config = FAMILIES[name](random.Random(5))
    model = empty(our_config(config), "torch")
    model.image_side = empty_image_side(model.config)
    fresh = blockdiff.init(config, seed=2, device="cpu")
    for directory, each in (("run", draw_weights(model, 2, device="cpu")), ("carried", fresh)):
        save(each, tmp_path / directory)
    require_same(tmp_path / "run", tmp_path / "carried")
    save(blockdiff.with_image_side(fresh), tmp_path / "later")
    require_same(tmp_path / "later", tmp_path / "carried")
    assert len(blockdiff.with_image_side(fresh).image_features([fresh.image_side.blank()] * 3)) == 3


@pytest.mark.parametrize("parts", [("images", "mlp"), ("mlp",)], ids=" and ".join)
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_it_are_written_read_merged_and_run_by_peft_and_those_of_texts_leave_it_out(name, parts, tmp_path):
    draw = random.Random(7)
    theirs, model = pair(FAMILIES[name](draw), 7, tmp_path / "base")
    row = image_row(model.config, draw, 3)
    inputs = [placed.image for placed in row.images]
    before = model.image_features(inputs)
    adapt(model, targets(model, dict.fromkeys(parts, LowRank(2, 4))))
    draw_adapters(model, 0, torch.device("cpu"), torch.float64)
    assert torch.equal(model.image_features(inputs), before)
    for tensor in adapter_tensors(model).values():
        torch.nn.init.normal_(tensor, std=0.3, generator=torch.Generator().manual_seed(tensor.numel()))
    features = model.image_features(inputs)
    features.sum().backward() if "images" in parts else None
    reached = {each for each, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {each for each in adapter_tensors(model) if each.startswith("image_side.")}
    assert bool(reached) == ("images" in parts) != torch.equal(features, before)

    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    loaded = blockdiff.load(tmp_path / "adapter", device="cpu", kernels="torch")
    assert (loaded.image_side is not None) == ("images" in parts)
    blockdiff.export(tmp_path / "adapter", tmp_path / "merged")
    merged = blockdiff.load(tmp_path / "merged", device="cpu", kernels="torch")
    wrapped: Any = PeftModel.from_pretrained(theirs, tmp_path / "adapter").base_model.model.model
    seen = getattr(wrapped, "encoder", wrapped).get_image_features(**arguments(row)).pooler_output
    for found in (
        *(blockdiff.with_image_side(each).image_features(inputs) for each in (loaded, merged)),
        torch.cat([*seen]),
    ):
        assert relative_error(found.view_as(features), features) < 1e-6  # PEFT has adapters in fp32


def test_a_model_that_has_no_image_side_says_so_in_one_line():
    config = gemma_config(random.Random(6))
    model = blockdiff.init(config, device="cpu")
    image = picture(config, random.Random(1))
    with pytest.raises(BlockdiffError, match="with_image_side"):
        model.image_features([image])
    wrong = replace(image, tokens=image.tokens + 1)
    with pytest.raises(BlockdiffError, match=rf"^images .*\b{wrong.tokens}\b.*\b{image.tokens}\b"):
        blockdiff.with_image_side(model).image_features([wrong])
    model.image_side, model.carried = None, Carried()
    with pytest.raises(CheckpointError, match=r"\(model\.encoder"):
        blockdiff.with_image_side(model)
    with pytest.raises(CheckpointError, match=r"minimax_m3_vl_text.*vision_config"):
        blockdiff.with_image_side(blockdiff.init(m3_text_config(), device="cpu"))
