"""Checkpoints in NVFP4: read as they were released, made while weights are read, written, adapted and merged."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import blockdiff
from blockdiff import checkpoint
from blockdiff.checkpoint.file_forms import _divisor
from blockdiff.checkpoint.merging import lost_share
from blockdiff.errors import CheckpointError
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import forms_of, stored_layers
from blockdiff.training.plan.sampling import plan_sampling
from tests.support.closeness import relative_error
from tests.support.commands import works
from tests.support.families import CONFIGS

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:.*only weights are rounded")]
RELEASED = Path(__file__).parents[1] / "data" / "fourbit"
EXPERTS = "model.decoder.layers.0.experts"


def load(path: Path, **how: object) -> BlockDiffusionModel:
    return blockdiff.load(path, **{"dtype": "float32", "device": "cpu", "kernels": "torch", **how})  # type: ignore[arg-type]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        found |= load_file(file)
    return found


def is_same(one: Tensor, two: Tensor) -> bool:
    """True for the same bytes."""
    return one.dtype == two.dtype and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def written(folder: Path, tensors: dict[str, Tensor], origin: Path) -> Path:
    """A checkpoint with other tensors."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(origin / "config.json", folder / "config.json")
    return folder


def outputs(model: BlockDiffusionModel, golden: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        encoding = model.encode(golden["prompt"])
        hidden = model.denoise(golden["canvas"], encoding)
        return [encoding.hidden, hidden, model.unembed(hidden)]


def decoded(model: BlockDiffusionModel, dtype: torch.dtype) -> BlockDiffusionModel:
    """The model with weights like others; its scales are multiplied in a dtype, as fp32 is the libraries'."""
    other = copy.deepcopy(model)
    for layer, module in stored_layers(other).items():
        for weight in module.WEIGHTS:
            matrix = model.get_submodule(layer).held(weight)
            ones = Nvfp4(matrix.codes, torch.full_like(matrix.block_scale, 56), torch.ones_like(matrix.scale))
            scale = matrix.block_scale.view(torch.float8_e4m3fn).to(dtype) * matrix.scale.to(dtype)
            numbers = ones.decoded(dtype).unflatten(-1, (-1, 16)) * scale[..., None]
            for end in Nvfp4.SUFFIXES:
                del module._buffers[weight + end]
            setattr(module, weight, torch.nn.Parameter(numbers.flatten(-2).double()))
        module.stored = None
    return other


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return blockdiff.save(model, tmp_path_factory.mktemp("nvfp4") / "base")


# -- as released -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_modelopt", "tiny_ct"])
def test_a_released_checkpoint_is_read_as_it_is(name):
    model, tensors = load(RELEASED / name, dtype="float64"), tensors_of(RELEASED / name)
    golden = load_file(RELEASED / name / "expected.safetensors")
    layers = {layer.partition(".")[2].partition(".")[2] for layer in stored_layers(model)}
    in_mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert layers == {"experts"} | (in_mlp if name == "tiny_ct" else set()) and forms_of(model) == ("nvfp4",)
    codes, ends = ("_packed", "_global_scale") if name == "tiny_ct" else ("", "_scale_2")
    held = model.get_submodule("layers.0.experts").held("gate_up_proj")
    for n, matrix in enumerate(("gate_proj", "up_proj")):
        stored = f"{EXPERTS}.3.{matrix}.weight"
        rows = slice(32 * n, 32 * (n + 1))
        assert torch.equal(held.codes[3, rows], tensors[stored + codes])
        assert torch.equal(held.block_scale[3, rows], tensors[stored + "_scale"].view(torch.uint8))
        scale = 1 / tensors[stored + ends] if name == "tiny_ct" else tensors[stored + ends]
        assert torch.equal(held.scale[3, rows], scale.expand(32, 1))
    truths = (golden["encoder_hidden"], golden["hidden"], golden["logits"])
    # transformers rounds rotations and norms to fp32 on the way, and its decoded weights were
    for ours, true in zip(outputs(decoded(model, torch.float32), golden), truths, strict=True):
        assert relative_error(ours, true) < 1e-6
    for ours, true in zip(outputs(model, golden), outputs(decoded(model, torch.float64), golden), strict=True):
        assert relative_error(ours, true) < 1e-12
    plain = load(RELEASED / name, dtype="float64", quantize="none")
    assert not stored_layers(plain)
    for ours, true in zip(outputs(plain, golden), truths, strict=True):
        assert relative_error(ours, true) < 1e-6


def test_experts_may_be_those_of_a_module_moe(tmp_path):
    tensors = {
        key.replace(".experts.", ".moe.experts."): x for key, x in tensors_of(RELEASED / "tiny_modelopt").items()
    }
    respelt = load(written(tmp_path / "moe", tensors, RELEASED / "tiny_modelopt"), dtype="auto")
    expected = load(RELEASED / "tiny_modelopt", dtype="auto").state_dict()
    assert all(is_same(x, expected[name]) for name, x in respelt.state_dict().items())
    again = tensors_of(blockdiff.save(respelt, tmp_path / "again"))
    assert tensors_of(RELEASED / "tiny_modelopt").keys() <= again.keys()


def test_gate_and_up_of_one_expert_may_have_scales_of_their_own():
    scale = load(RELEASED / "tiny_ct").get_submodule("layers.0.experts").held("gate_up_proj").scale
    assert (scale[:, 0] != scale[:, -1]).any()


def test_what_inputs_and_the_cache_are_rounded_with_is_passed_over_with_one_line(recwarn):
    load(RELEASED / "tiny_modelopt")
    said = [str(each.message) for each in recwarn]
    assert len(said) == 1 and "inputs of layers and keys and values" in said[0]


def test_a_config_may_be_in_a_file_of_modelopt_alone(tmp_path):
    folder = shutil.copytree(RELEASED / "tiny_modelopt", tmp_path / "beside")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    read = checkpoint.read_config(folder).values["quantization_config"]
    assert read["quant_method"] == "modelopt" and "lm_head" in read["ignore"]
    assert forms_of(load(folder)) == ("nvfp4",)


@pytest.mark.parametrize(
    "change", ["scales of 32", "no scale of the tensor", "e8m0", "negative scales", "a missing one"]
)
def test_other_layouts_are_refused_by_name(tmp_path, change):
    tensors = tensors_of(RELEASED / "tiny_modelopt")
    name = f"{EXPERTS}.1.up_proj.weight"
    scales = tensors[name + "_scale"]
    if change == "scales of 32":
        tensors[name + "_scale"] = scales[:, ::2].contiguous()
    if change == "e8m0":
        tensors[name + "_scale"] = scales.view(torch.uint8)
    if change == "negative scales":
        tensors[name + "_scale"] = (scales.view(torch.uint8) | 128).view(scales.dtype)
    if change == "no scale of the tensor":
        del tensors[name + "_scale_2"]
    if change == "a missing one":
        for end in ("", "_scale", "_scale_2"):
            del tensors[name + end]
    folder = written(tmp_path / "other", tensors, RELEASED / "tiny_modelopt")
    with pytest.raises(CheckpointError, match=r"experts(\.1\.up_proj\.weight|\.gate_up_proj: matrix 1 of expert 1)"):
        load(folder)


@pytest.mark.parametrize("name", ["tiny_modelopt", "tiny_ct"])
def test_saving_what_was_read_writes_it_as_it_was(name, tmp_path):
    model = load(RELEASED / name, dtype="auto")
    again = blockdiff.save(model, tmp_path / "again")
    before, after = tensors_of(RELEASED / name), tensors_of(again)
    assert before.keys() <= after.keys()  # the vision tower is drawn anew
    for key in before:
        one, two = before[key], after[key]
        is_divisor = key.endswith("weight_global_scale")  # another with the same reciprocal, perhaps
        assert torch.equal(1 / one, 1 / two) if is_divisor else is_same(one, two)
    words = [
        json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (RELEASED / name, again)
    ]
    assert words[0] == words[1]


def test_a_divisor_has_the_scale_as_its_reciprocal():
    divisors = torch.rand(20000, generator=torch.Generator().manual_seed(0)) * 4000 + 0.01
    for scale in (1 / divisors).split(1):
        assert torch.equal(1 / _divisor(scale), scale)


# -- made here -------------------------------------------------------------------------------------------------


def test_experts_are_made_in_four_bits_and_other_layers_in_eight_and_come_back_to_the_bit(base, tmp_path):
    plain, model = load(base), load(base, quantize="nvfp4")
    for layer, module in stored_layers(model).items():
        assert module.stored is (Nvfp4 if layer.endswith("experts") else Fp8)
        for leaf in module.WEIGHTS:
            weight = plain.get_parameter(f"{layer}.{leaf}").detach()
            assert all(map(torch.equal, module.held(leaf), module.stored.nearest(weight)))
    again = load(blockdiff.save(model, tmp_path / "made"))
    one, two = model.state_dict(), again.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[each], two[each]) for each in one)
    words = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    groups = {group["format"]: group for group in words["config_groups"].values()}
    assert words["format"] == "mixed-precision"
    assert r"re:.*self_attn\.q_proj$" in groups["float-quantized"]["targets"]
    assert r"re:.*experts\.\d+\.gate_proj$" in groups["nvfp4-pack-quantized"]["targets"]
    config = checkpoint.read_config(tmp_path / "made")
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    for planned, how in ((config, None), (checkpoint.read_config(base), "nvfp4")):
        plan = plan_sampling(planned, torch.float32, device="cpu", quantize=how)
        assert plan.weights == held and plan.forms == ("fp8", "nvfp4")


def test_a_word_adds_to_what_is_stored_so_already(base, tmp_path):
    mixed = load(RELEASED / "tiny_modelopt", quantize="nvfp4")
    as_stored = load(RELEASED / "tiny_modelopt")
    experts = [model.get_submodule("layers.1.experts").held("down_proj") for model in (mixed, as_stored)]
    assert all(map(torch.equal, *experts)) and forms_of(mixed) == ("fp8", "nvfp4")


def test_released_files_are_inspected_and_planned():
    for name, matrices in (("tiny_modelopt", "24 matrices of them in NVFP4 of ModelOpt"), ("tiny_ct", "of compressed")):
        assert matrices in works("inspect", RELEASED / name)
        model = load(RELEASED / name, dtype="auto")
        plan = plan_sampling(checkpoint.read_config(RELEASED / name), torch.bfloat16, device="cpu")
        assert plan.weights == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


# -- adapters --------------------------------------------------------------------------------------------------


def with_adapters(model: BlockDiffusionModel, *parts: str) -> BlockDiffusionModel:
    adapt(model, targets(model, {part: LowRank(2, 4.0) for part in parts}))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name))).mul_(0.1)
    return model


@pytest.mark.parametrize("name", ["tiny_modelopt", "tiny_ct"])
def test_adapters_of_other_layers_are_merged_into_a_released_file_whose_codes_stay(name, tmp_path):
    model = with_adapters(load(RELEASED / name, dtype="auto"), "attention", "mlp")
    adapter = checkpoint.save_adapter(model, tmp_path / "adapter", str(RELEASED / name))
    merged = checkpoint.export(RELEASED / name, tmp_path / "merged", adapter)
    before, after = tensors_of(RELEASED / name), tensors_of(merged)
    is_expert = [key for key in before if ".experts." in key and "global_scale" not in key]
    assert is_expert and all(is_same(before[key], after[key]) for key in is_expert)
    assert after["model.decoder.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert not [key for key in after if ".mlp." in key and key.endswith("scale")]
    words = json.loads((merged / "config.json").read_text())["quantization_config"]
    assert words["quant_method"] == ("modelopt" if name == "tiny_modelopt" else "compressed-tensors")
    assert ("model.decoder.layers.0.mlp.up_proj" in words["ignore"]) is (name == "tiny_ct")
    truth, tokens = load(RELEASED / name, adapter=adapter), torch.arange(2, 14)[None]
    blockdiff.merge(truth)
    loaded = load(merged)
    assert forms_of(loaded) == ("nvfp4",)
    with torch.no_grad():
        hidden = [each.denoise(tokens[:, :8], each.encode(tokens)) for each in (loaded, truth)]
    assert relative_error(*hidden) < 2e-2  # merged weights are rounded to bf16


def test_adapters_of_experts_in_four_bits_go_into_the_weights_below_and_are_rounded_again_only_if_asked(base, tmp_path):
    model = with_adapters(load(base, quantize="nvfp4"), "experts")
    adapter = checkpoint.save_adapter(model, tmp_path / "adapter", str(base))
    with pytest.raises(CheckpointError, match=r"experts .*nvfp4.* lose \d+ %.*--merge-into"):
        checkpoint.export(base, tmp_path / "no", adapter)
    with pytest.raises(CheckpointError, match="merge_into"):
        checkpoint.export(base, tmp_path / "no", merge_into=base)
    name = "layers.0.experts.down_proj"
    delta = load(adapter).get_submodule("layers.0.experts")
    change = (delta.down_lora_B @ delta.down_lora_A) * delta.low_rank.scale
    own = load(checkpoint.export(base, tmp_path / "own", adapter, merge_into=base))
    assert not stored_layers(own)
    assert torch.allclose(own.get_parameter(name), load(base).get_parameter(name) + change, atol=1e-6)
    decoded = load(checkpoint.export(base, tmp_path / "decoded", adapter, quantize="none"))
    below = model.get_submodule("layers.0.experts").held("down_proj").decoded(torch.float32)
    assert torch.allclose(decoded.get_parameter(name), below + change, atol=1e-6)
    with pytest.warns(UserWarning, match=r"lose \d+ %"):
        rounded = checkpoint.export(base, tmp_path / "rounded", adapter, quantize="nvfp4")
    assert load(rounded).get_submodule("layers.0.experts").stored is Nvfp4
    once = load(checkpoint.export(base, tmp_path / "once", adapter, merge_into=base, quantize="nvfp4"))
    held = once.get_submodule("layers.0.experts").held("down_proj")
    assert torch.equal(held.codes, Nvfp4.nearest(own.get_parameter(name).detach()).codes)
    assert checkpoint.export(base, tmp_path / "peft", adapter, peft=True)


def test_small_changes_are_mostly_lost_and_large_ones_kept():
    g = torch.Generator().manual_seed(0)
    matrix = Nvfp4.nearest(torch.randn(64, 128, generator=g))
    change = torch.randn(64, 128, generator=g)
    shares = [lost_share(matrix, size * change) for size in (1e-3, 0.03, 3.0)]
    assert shares[0] > 0.8 and shares[0] > shares[1] > shares[2] and shares[2] < 0.05
