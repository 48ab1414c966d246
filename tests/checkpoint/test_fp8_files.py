"""Checkpoints with weights in fp8: rounded at load, written and read to the bit, decoded again, adapted and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import blockdiff
from blockdiff import checkpoint, memory
from blockdiff.errors import BlockdiffError, CheckpointError, RecipeError
from blockdiff.kernels.fp8 import Fp8
from blockdiff.layers.experts import Experts
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, is_adapted, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers
from blockdiff.training.freeze import count_parts
from blockdiff.training.plan.sampling import plan_sampling
from blockdiff.training.recipe_checks import refuse
from blockdiff.training.recipe_files import read_recipe
from tests.support.families import CONFIGS

pytestmark = pytest.mark.quick
Q = "layers.0.attention.q_proj.weight"
HUB_Q = "model.decoder.layers.0.self_attn.q_proj.weight"


def load(path: Path, **how: object) -> BlockDiffusionModel:
    return blockdiff.load(path, dtype="float32", device="cpu", kernels="torch", **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = blockdiff.init(CONFIGS["diffusion_gemma"](), seed=1, device="cpu", kernels="torch")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # random weights that have an effect
    return blockdiff.save(model, tmp_path_factory.mktemp("fp8") / "base")


@pytest.fixture(scope="module")
def written(base: Path) -> Path:
    return checkpoint.export(base, base.parent / "written", quantize="fp8")


def hidden(model: BlockDiffusionModel) -> torch.Tensor:
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        return model.denoise(tokens[:, :8], model.encode(tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_linear_layers_and_experts_of_every_family_are_rounded_and_come_back_to_the_bit(name, tmp_path):
    config = CONFIGS[name]()
    blockdiff.save(blockdiff.init(config, seed=1, device="cpu", kernels="torch"), tmp_path / "base")
    plain, model = load(tmp_path / "base"), load(tmp_path / "base", quantize="fp8")
    layers = stored_layers(model)
    for layer, module in plain.named_modules():
        part = layer.split(".")[2] if layer.startswith("layers.") and layer.count(".") > 1 else ""
        expected = isinstance(module, nn.Linear | Experts) and part in ("attention", "mlp", "shared", "experts")
        assert (layer in layers) == (expected and "indexer" not in layer), layer
    for layer, module in layers.items():
        for leaf in module.WEIGHTS:
            weight = plain.get_parameter(f"{layer}.{leaf}")
            made = Fp8.nearest(weight.detach())
            assert all(map(torch.equal, module.held(leaf), made))
            assert (made.decoded(torch.float32) - weight).norm() < 0.04 * weight.norm()
    blockdiff.save(model, tmp_path / "fp8")
    again = load(tmp_path / "fp8")
    one, two = model.state_dict(), again.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[each], two[each]) for each in one)
    assert not [p for n, p in model.named_parameters() if p.requires_grad and n.rpartition(".")[0] in layers]


def test_the_files_are_as_compressed_tensors_has_them(base, written):
    config = json.loads((written / "config.json").read_text())
    said = config["quantization_config"]
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "float-quantized")
    assert said["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    inputs = said["config_groups"]["group_0"]["input_activations"]  # as vLLM's loader takes it
    assert (inputs["strategy"], inputs["dynamic"], inputs["num_bits"]) == ("token", True, 8)
    assert r"re:.*router\.proj$" in said["ignore"] and r"re:.*self_conditioning\.up_proj$" in said["ignore"]
    tensors, before = load_file(written / "model.safetensors"), load_file(base / "model.safetensors")
    rows = before[HUB_Q].shape[0]
    assert tensors[HUB_Q].dtype == torch.float8_e4m3fn and tensors[HUB_Q + "_scale"].shape == (rows, 1)
    experts = "model.decoder.layers.0.experts"
    width = before[f"{experts}.gate_up_proj"].shape[1] // 2
    up = before[f"{experts}.gate_up_proj"][1, width:]
    stored, scale = tensors[f"{experts}.1.up_proj.weight"], tensors[f"{experts}.1.up_proj.weight_scale"]
    assert torch.equal(stored.view(torch.uint8), Fp8.nearest(up).codes) and torch.equal(scale, Fp8.nearest(up).scale)
    assert not any(name.endswith("gate_up_proj") for name in tensors)
    assert torch.equal(tensors["model.decoder.norm.weight"], before["model.decoder.norm.weight"])


def test_another_programs_checkpoint_that_rounds_inputs_is_read_without_that_and_says_so(base, written, tmp_path):
    copy_of(written, tmp_path, load_file(written / "model.safetensors"))  # without digests.json, so not written here
    with pytest.warns(UserWarning, match="rounds the inputs of layers to fewer bits"):
        published = load(tmp_path)
    assert torch.equal(hidden(published), hidden(load(base, quantize="fp8")))


def test_weights_that_this_program_wrote_in_fp8_are_read_without_a_word(written, recwarn):
    load(written)
    assert not recwarn


@pytest.mark.parametrize("word", ["fp8", "fp8-dynamic"])  # the second rounded inputs, too, before it was taken out
def test_an_adapter_brings_the_form_of_the_weights_that_it_was_trained_over(base, tmp_path, word, monkeypatch):
    model = load(base, quantize="fp8")
    adapt(model, targets(model, {"attention": LowRank(2, 4.0)}))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name))).mul_(0.1)
    monkeypatch.setattr("blockdiff.checkpoint.adapters.stored_as", lambda model: word)
    adapter = checkpoint.save_adapter(model, tmp_path / "adapter", str(base))
    truth = hidden(model)
    again = checkpoint.export(base, tmp_path / "peft", adapter, peft=True)
    for loaded in (load(adapter), load(base, adapter=adapter), load(again)):
        assert torch.equal(hidden(loaded), truth)
    assert not stored_layers(load(adapter, quantize="none"))
    # what has an adapter is fp8 no more, the others are what they were trained as
    merged = load(checkpoint.export(base, tmp_path / "merged", adapter))
    layers = stored_layers(merged)
    assert layers and not any(".attention." in name for name in layers)
    wanted = load(adapter)
    blockdiff.merge(wanted)
    assert torch.equal(merged.get_parameter(Q), wanted.get_parameter(Q))
    assert torch.equal(hidden(merged), hidden(wanted))
    plain = load(checkpoint.export(base, tmp_path / "none", adapter, quantize="none"))
    assert not stored_layers(plain) and torch.equal(plain.get_parameter(Q), wanted.get_parameter(Q))


def test_what_is_in_fp8_can_be_weights_like_others_again(base, written, tmp_path):
    rounded, plain = load(base, quantize="fp8"), load(written, quantize="none")
    assert not stored_layers(plain) and plain.state_dict().keys() == load(base).state_dict().keys()
    assert torch.equal(plain.get_parameter(Q), rounded.get_submodule(Q[:-7]).held("weight").decoded(torch.float32))
    assert (hidden(plain) - hidden(rounded)).norm() < 1e-5 * hidden(rounded).norm()
    blockdiff.save(plain, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert torch.equal(load(tmp_path / "plain").get_parameter(Q), plain.get_parameter(Q))


def test_casting_and_moving_leaves_weights_in_fp8_as_they_are(written):
    model = load(written)
    before = {name: x.clone() for name, x in model.state_dict().items() if "q_proj" in name}
    model.to(torch.float16).to(torch.float32)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())


@pytest.mark.parametrize("change", ["one for all", "one dimension", "bf16"])
def test_scales_as_others_write_them_are_read(written, tmp_path, change):
    tensors = load_file(written / "model.safetensors")
    scale = tensors[HUB_Q + "_scale"]
    tensors[HUB_Q + "_scale"] = {
        "one for all": scale[:1, 0], "one dimension": scale[:, 0].contiguous(), "bf16": scale.bfloat16()
    }[change]  # fmt: skip
    copy_of(written, tmp_path, tensors)
    made = load(tmp_path).get_buffer(Q + "_scale")
    wanted = scale[:1].expand_as(scale) if change == "one for all" else scale
    assert made.dtype == torch.float32 and torch.allclose(made, wanted, rtol=0 if change != "bf16" else 2**-8)


def test_scales_of_another_form_are_refused_and_codes_that_are_no_number_are_warned_of(written, tmp_path):
    tensors = load_file(written / "model.safetensors")
    copy_of(written, tmp_path, tensors | {HUB_Q + "_scale": torch.ones(3, 2)})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight .*F8_E4M3.*F32 \[3, 2\]"):
        load(tmp_path)
    codes = tensors[HUB_Q].view(torch.uint8).clone()
    codes[2, 3] = 255
    copy_of(written, tmp_path, tensors | {HUB_Q: codes.view(torch.float8_e4m3fn)})
    with pytest.warns(UserWarning, match=r"q_proj\.weight is not finite"):
        model = load(tmp_path)
    assert model.get_buffer(Q + "_scale").isnan().nonzero().tolist() == [[2, 0]]


def copy_of(written: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((written / "config.json").read_bytes())


@pytest.mark.portable
def test_adapters_train_over_fp8_and_are_merged_into_weights_that_are_not(base, written, tmp_path):
    model = load(written)
    parts = {"attention": LowRank(2, 4.0), "mlp": LowRank(2, 4.0), "experts": LowRank(2, 4.0)}
    adapt(model, targets(model, parts))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    assert torch.equal(hidden(model), hidden(load(written)))  # B is 0
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens, losses = torch.arange(2, 14)[None], []
    for _ in range(8):
        logits = model.unembed(model.denoise(tokens[:, :8], model.encode(tokens)))
        losses.append(nn.functional.cross_entropy(logits[0], tokens[0, 4:12]))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(CheckpointError, match="adapters"):
        blockdiff.save(model, tmp_path / "no")
    checkpoint.save_adapter(model, tmp_path / "adapter", str(written))
    loaded = load(written, adapter=tmp_path / "adapter")
    assert is_adapted(loaded) and torch.equal(hidden(loaded), hidden(model))
    merged = load(checkpoint.export(written, tmp_path / "merged", tmp_path / "adapter"))
    assert not stored_layers(merged)  # every layer in fp8 had an adapter
    # rounding in fp32; what the adapter itself does is a thousand times as much
    assert (hidden(merged) - hidden(model)).norm() < 1e-4 * hidden(model).norm()
    assert (hidden(load(written)) - hidden(model)).norm() > 0.1 * hidden(model).norm()
    assert merged.get_parameter(Q).dtype == torch.float32
    rounded = load(checkpoint.export(written, tmp_path / "rounded", tmp_path / "adapter", quantize="fp8"))
    assert torch.equal(rounded.get_buffer(Q), Fp8.nearest(merged.get_parameter(Q).detach()).codes)


def test_sizes_say_what_weights_in_fp8_take(base, written, monkeypatch):
    config, model = checkpoint.read_config(base), load(base, quantize="fp8")
    assert {part.part: part.trained + part.frozen for part in count_parts(model)} == {
        part.part: part.trained + part.frozen for part in count_parts(load(base))
    }
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    for planned in (config, checkpoint.read_config(written)):
        how = "fp8" if planned is config else None
        assert plan_sampling(planned, torch.float32, device="cpu", quantize=how).weights == held
    assert held < 0.6 * plan_sampling(config, torch.float32, device="cpu").weights
    monkeypatch.setattr(memory, "total_bytes", lambda device: held + 1000)
    assert stored_layers(load(base, quantize="fp8"))
    with pytest.raises(BlockdiffError, match=r'quantize="fp8" \('):
        load(base)


def test_what_cannot_be_is_refused_in_one_line(base, tmp_path):
    with pytest.raises(CheckpointError, match="quantize='int4'"):
        load(base, quantize="int4")
    tree = {"model": {"path": str(base), "quantize": "fp8"}, "data": {"train": [{"prompt": "a", "response": "b"}]}}
    tree["train"] = {"steps": 1, "batch_size": 2}
    with pytest.raises(RecipeError, match=r"^model\.quantize: .*lora"):
        refuse(read_recipe(tree | {"lora": "none"}, []))
    with pytest.raises(RecipeError, match=r"^model\.quantize: parallel\.shard"):
        refuse(read_recipe(tree | {"lora": {"rank": 2}, "parallel": {"shard": "full"}}, []), 2)
