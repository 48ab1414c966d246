"""Adapters of noisy tokens only: clean tokens are the base's to the bit, in every pass, on disk and while sampling."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdiff import checkpoint
from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.checkpoint.adapters import read_adapter
from blockdiff.diffusion import schedule
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.errors import CheckpointError
from blockdiff.layers.linear import Linear, outputs
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapter_tensors, adapters_of, draw_adapters, merge, targets
from blockdiff.models.pages import Pages
from blockdiff.objective import Objective
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.families import CONFIGS, small_model
from tests.support.oracle import our_config

pytestmark = pytest.mark.quick
DENOISERS = [name for name in CONFIGS if our_config(CONFIGS[name]()).denoises]
CPU = torch.device("cpu")


def adapted(name: str, noisy_only: bool = True, rank: int = 3, dtype: torch.dtype = torch.float64) -> Any:
    """A small model with adapters that count in every part that can have one."""
    model: Any = small_model(name, dtype=dtype)
    adapt(model, targets(model, dict.fromkeys(model.config.adapted_parts, LowRank(rank, 6.0, noisy_only=noisy_only))))
    draw_adapters(model, 0, CPU, dtype)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if name.endswith("B"):
                tensor.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [1, 3])
def test_outputs_and_gradients_are_those_of_the_formula_with_noisy_tokens_alone_adapted(count):
    torch.manual_seed(0)
    some, x = [], torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    is_noisy = torch.rand(2, 5) > 0.5
    for n in range(count):
        layer = Linear(12, 8 + n).double()
        layer.adapt(LowRank(2 + n, 3.0, noisy_only=True))
        for letter in "AB":
            matrix = torch.nn.Parameter(torch.randn(layer.get_parameter(f"lora_{letter}").shape).double())
            setattr(layer, f"lora_{letter}", matrix)
        some.append(layer)
    got = outputs(some, x, is_noisy)
    truth = [
        F.linear(x, y.weight, y.bias)
        + (y.low_rank.scale * F.linear(F.linear(x, y.lora_A), y.lora_B)) * is_noisy[..., None]
        for y in some
    ]
    trained = [x, *(parameter for layer in some for parameter in layer.parameters())]
    slope = torch.linspace(-1, 2, 10, dtype=torch.float64).view(2, 5, 1)
    found = [torch.autograd.grad(sum((out * slope).sum() for out in each), trained) for each in (got, truth)]
    for one, other in zip([*got, *found[0]], [*truth, *found[1]], strict=True):
        assert (one - other).abs().max() < 1e-12
    bare = outputs([copy.deepcopy(layer) for layer in some], x, False)
    for layer, plain, mixed in zip(some, bare, got, strict=True):
        assert torch.equal(plain, F.linear(x, layer.weight, layer.bias))
        assert torch.equal(plain[~is_noisy], mixed[~is_noisy])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", DENOISERS)
def test_clean_tokens_are_the_bases_to_the_bit_and_canvases_those_of_a_plain_adapter(name, dtype):
    base = small_model(name, dtype=dtype)
    noisy, plain = (adapted(name, noisy_only, dtype=dtype) for noisy_only in (True, False))
    row, canvas = tokens(2, 16), tokens(2, base.canvas_length)
    with torch.no_grad():
        prefixes = [model.encode(row) for model in (base, noisy, plain)]
        assert torch.equal(prefixes[0].hidden, prefixes[1].hidden)
        assert not torch.equal(prefixes[0].hidden, prefixes[2].hidden)
        for one, other in zip(prefixes[0].layers(), prefixes[1].layers(), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        soft = base.soft_embedding(base.unembed(base.denoise(canvas, prefixes[0])))
        of_base, of_noisy, of_plain = (model.denoise(canvas, prefixes[0], soft) for model in (base, noisy, plain))
    assert torch.equal(of_noisy, of_plain) and (of_noisy - of_base).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["diffusion_gemma", "llama tied, denoising", "minimax_m3 denoising"])
def test_one_sweep_has_the_losses_and_gradients_of_single_passes(name):
    model = adapted(name)
    canvases = [Canvas([*range(9, 17)], 6 + 8 * n, t=0.5, coin=n == 1, address=(0, 0, n)) for n in range(2)]
    batch = lay_out([CleanRow([*range(3, 40)], canvases), CleanRow([*range(3, 20)], [])], 8, pad_id=0)
    found = []
    for one_sweep in (True, False):
        model.zero_grad(set_to_none=True)
        losses = Objective(model, schedule.Linear(), UniformCorruption(model.vocab_size), 5, sweep=one_sweep)(batch)
        sum(losses.values()).backward()
        found.append([*losses.values(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all((one - other).abs().max() < 1e-11 for one, other in zip(*found, strict=True))
    assert all(x.abs().max() > 1e-6 for x in found[0])
    plain = Objective(small_model(name), schedule.Linear(), UniformCorruption(model.vocab_size), 5)(batch)
    assert (plain["ar"] - found[0][1]).abs() < 1e-12 and (plain["canvas"] - found[0][0]).abs() > 1e-3


def test_its_file_says_what_it_is_and_a_folder_does_where_a_release_has_no_word_for_it(tmp_path, monkeypatch):
    model = adapted("llama tied, denoising")
    checkpoint.save_adapter(model, tmp_path / "adapter")
    again: Any = small_model("llama tied, denoising")
    checkpoint.load_adapter(again, tmp_path / "adapter")
    assert {module.low_rank for module in adapters_of(again).values()} == {LowRank(3, 6.0, noisy_only=True)}
    assert all(torch.equal(x, adapter_tensors(model)[name]) for name, x in adapter_tensors(again).items())
    assert "disable_adapter" in (tmp_path / "adapter" / "README.md").read_text()

    released = tmp_path / "linear_spec_lora"  # PEFT's files alone
    released.mkdir()
    save_file(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), released / "adapter_model.safetensors")
    (released / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    base = small_model("llama tied, denoising")
    read = {low_rank.noisy_only for low_rank in read_adapter(released, base).modules.values()}
    monkeypatch.setattr(type(base.config), "noisy_adapters", ("linear_spec_lora",))
    assert read == {False}
    assert {low_rank.noisy_only for low_rank in read_adapter(released, base).modules.values()} == {True}
    plain = adapted("llama tied, denoising", noisy_only=False)
    checkpoint.save_adapter(plain, tmp_path / "ours" / "linear_spec_lora")
    ours = read_adapter(tmp_path / "ours" / "linear_spec_lora", base)  # our files say it themselves
    assert {low_rank.noisy_only for low_rank in ours.modules.values()} == {False}


def test_it_is_not_merged_and_goes_over_noisy_tokens_alone(tmp_path):
    model = adapted("llama tied, denoising")
    with pytest.raises(CheckpointError, match="noisy tokens only"):
        merge(model)
    checkpoint.save(small_model("llama tied, denoising"), tmp_path / "base")
    checkpoint.save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="--peft"):
        checkpoint.export(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    checkpoint.export(tmp_path / "adapter", tmp_path / "linear", peft=True)
    one, other = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapter", "linear"))
    assert all(torch.equal(x.float(), other[name]) for name, x in one.items())  # exported in fp32
    assert all(each.noisy_only for each in read_adapter(tmp_path / "linear", model_without()).modules.values())
    low_rank = {"attention": LowRank(2, 4.0, noisy_only=True)}
    causal = small_model("llama")
    with pytest.raises(CheckpointError, match="causal"):
        adapt(causal, targets(causal, low_rank))
    with pytest.raises(CheckpointError, match="rows"):
        adapt(base := model_without(), targets(base, low_rank), [5])
    some = model_without()
    adapt(some, targets(some, low_rank | {"mlp": LowRank(2, 4.0)}))
    draw_adapters(some, 0, CPU, torch.float64)
    with pytest.raises(CheckpointError, match="one kind"):
        checkpoint.save_adapter(some, tmp_path / "mixed")


def model_without() -> Any:
    return small_model("llama tied, denoising")


def test_answers_differ_while_the_pages_of_a_prompt_and_the_heads_next_tokens_are_the_bases():
    generation, prompt = Generation(max_steps=4, max_new_tokens=8), [*range(9, 30)]
    pages, answers, next_tokens = [], [], []  # canvases that the head verifies give its own next tokens
    for model in (model_without(), adapted("llama tied, denoising")):
        sampler = Sampler(model, None, generation, pages=Pages(model, 4))
        answers.append([each.tokens for each in sampler.generate([Request(0, tokens=prompt, seed=3)])])
        asked = Request(1, tokens=prompt, seed=3, strategy="verified:steps=1,temperature=0")
        next_tokens.append([each.tokens for each in sampler.generate([asked])])
        row, rows = sampler.pages.open(), sampler.pages.pools["full"]
        assert sampler.pages.reuse(row, prompt) == 20
        pages.append([x[:, row.tables["full"]].clone() for x in rows.tensors])
    assert answers[0] != answers[1] and next_tokens[0] == next_tokens[1]
    assert all(torch.equal(one, other) for one, other in zip(*pages, strict=True))
