"""Adapters of a model: what they add, what trains, what merging makes of them, and PEFT's format in and out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import shutil
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import blockdiff.checkpoint.merging
from blockdiff import checkpoint
from blockdiff.checkpoint import adapter_config, adapter_patterns, gathering
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.opening import model_files, with_adapter
from blockdiff.errors import CheckpointError
from blockdiff.kernels.vocabulary import Classes
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import (
    adapt,
    adapter_tensors,
    adapters_of,
    draw_adapters,
    is_adapted,
    merge,
    targets,
)
from blockdiff.time_limit import time_limit
from tests.support.oracle import oracle, ours, tiny_config
from tests.support.recorder import Looker

PARTS = ("attention", "mlp", "experts", "self_conditioning")
CPU = torch.device("cpu")


def drawn(tensors: dict[str, Tensor], seed: int = 3) -> None:
    """Give every adapter values that count; B is 0 at the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("token_rows"):
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * 0.3)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


def adapted(parts: dict[str, LowRank], tokens: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Any:
    """The oracle's weights in a model of ours with adapters that count."""
    model = ours(oracle(dtype=dtype))
    adapt(model, targets(model, parts), tokens)
    draw_adapters(model, 0, CPU, dtype)
    drawn(adapter_tensors(model))
    return model


def run(model: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states of an encode and the logits of a denoise with a signal."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, 300, (2, 21), generator=generator)
    canvas = torch.randint(0, 300, (2, 16), generator=generator)
    prefix = model.encode(prompt)
    first = model.denoise(canvas, prefix)
    soft = model.soft_embedding(model.unembed(first))
    return prefix.hidden, model.unembed(model.denoise(canvas, prefix, soft))


def all_parts(rank: int = 4, alpha: float = 6.0, rslora: bool = False) -> dict[str, LowRank]:
    return {part: LowRank(rank, alpha, rslora) for part in PARTS}


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_and_unmerged_logits_are_equal(rslora):
    model = adapted(all_parts(rslora=rslora), tokens=(5, 17))
    with torch.no_grad():
        before = run(model)
        merge(model)
        after = run(model)
    assert not is_adapted(model)
    for x, y in zip(before, after, strict=True):
        assert (x - y).abs().max() < 1e-5  # logits are capped in fp32
    model = adapted(all_parts(rslora=rslora), tokens=(5, 17))
    with torch.no_grad():
        hidden = run(model)[0]
        merge(model)
        assert (hidden - run(model)[0]).abs().max() < 1e-10
        assert (hidden - run(ours(oracle()))[0]).abs().max() > 0.1  # the adapters count


def test_constraints_see_the_rows_of_the_table_that_an_adapter_brings():
    model = adapted({"attention": LowRank(4, 6.0)}, tokens=(5, 17))
    size, generator = model.vocab_size, torch.Generator().manual_seed(0)
    hidden, uniform = torch.randn(1, 3, 64, dtype=torch.float64, generator=generator), torch.full((1, 3), 0.5)
    classes = Classes.of(torch.arange(size), size)  # a class for each token
    stats = model.vocabulary.class_stats(hidden, 1.0, uniform, classes)
    merge(model)
    merged = model.vocabulary.class_stats(hidden, 1.0, uniform, classes)
    torch.testing.assert_close(stats.maximum, merged.maximum)
    torch.testing.assert_close(stats.soft_embedding, merged.soft_embedding)


def test_the_rows_of_the_table_that_an_adapter_brings_can_be_captured():
    """Their ids are on the device after the first call, which a CUDA graph needs."""
    vocabulary = adapted({"attention": LowRank(4, 6.0)}, tokens=(5, 17)).vocabulary
    tokens = torch.tensor([[5, 6]])

    def work() -> None:
        vocabulary.logits(vocabulary.embed(tokens))

    work()
    Looker().capture(work)()


def test_fresh_adapters_change_nothing_and_nothing_else_trains():
    plain = ours(oracle())
    model = ours(oracle())
    adapt(model, targets(model, all_parts()), tokens=(3,))
    draw_adapters(model, 0, CPU, torch.float64)
    with torch.no_grad():
        for x, y in zip(run(model), run(plain), strict=True):
            assert torch.equal(x, y)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapter_tensors(model))
    per_layer = 2 * 4 + 2 * 3 + 4  # attention, dense MLP, experts; a full layer has no v_proj
    assert len(trained) == 4 * per_layer - 2 + 2 * 3 + 1


def test_gradients_of_adapters_are_those_of_the_weights_they_add_to():
    """d loss / dB = scale (d loss / dW) A^T and d loss / dA = scale B^T (d loss / dW), W being the merged weight."""
    model = adapted(all_parts())
    scale = 6.0 / 4
    run(model)[1].square().sum().backward()
    merged = adapted(all_parts())
    merge(merged)
    run(merged)[1].square().sum().backward()
    pairs = [("lora", "weight"), ("gate_up_lora", "gate_up_proj"), ("down_lora", "down_proj")]
    checked = 0
    for name, parameter in model.named_parameters():
        for low_rank, weight in pairs:
            if name.endswith(f".{low_rank}_B"):
                owner = name.removesuffix(f".{low_rank}_B")
                A, B = model.get_parameter(f"{owner}.{low_rank}_A"), parameter
                truth = merged.get_parameter(f"{owner}.{weight}").grad
                for mine, expected in ((B.grad, truth @ A.mT * scale), (A.grad, B.mT @ truth * scale)):
                    assert (mine - expected).norm() < 1e-5 * expected.norm() + 1e-9, name
                    checked += 1
    assert checked == len(adapter_tensors(model))


def test_dropout_acts_in_training_only_and_not_on_experts():
    model = ours(oracle())
    modules = targets(model, {"attention": LowRank(4, 8, dropout=0.5), "experts": LowRank(4, 8, dropout=0.5)})
    assert {m.dropout for name, m in modules.items() if "experts" in name} == {0.0}
    adapt(model, modules)
    draw_adapters(model, 0, CPU, torch.float64)
    drawn(adapter_tensors(model))
    with torch.no_grad():
        still = run(model)[0]
        assert torch.equal(still, run(model)[0])
        model.train()
        assert not torch.equal(still, run(model)[0])


def test_bfloat16_weights_keep_fp32_adapters_and_merging_rounds_once():
    model = adapted(all_parts(), dtype=torch.float32)
    exact = run(model)[0].detach()
    for name, parameter in model.named_parameters():
        if name not in adapter_tensors(model):
            parameter.data = parameter.data.bfloat16()
    for buffer in model.buffers():
        buffer.data = buffer.data.bfloat16()
    with torch.no_grad():
        apart = run(model)[0].float()
        assert {tensor.dtype for tensor in adapter_tensors(model).values()} == {torch.float32}
        merge(model)
        together = run(model)[0].float()
    assert model.layers[0].attention.q_proj.weight.dtype == torch.bfloat16
    # both are off the fp32 run by bf16's rounding, the merged one no more than twice as much as the other
    assert (together - exact).pow(2).mean() < 4 * (apart - exact).pow(2).mean()


@pytest.mark.parametrize("part", ["router", "norms", "nonsense"])
def test_a_part_without_adapters_is_refused(part):
    with pytest.raises(CheckpointError, match=f"part '{part}'"):
        targets(ours(oracle()), {part: LowRank(4, 8)})


# -- PEFT ----------------------------------------------------------------------------------------------------------

MIXED = {
    "attention": LowRank(4, 8),
    "mlp": LowRank(2, 8),
    "experts": LowRank(3, 5),
    "self_conditioning": LowRank(4, 6),
}


def peft_logits(directory: Path, truth: Any) -> Tensor:
    """The logits of a canvas without a signal by transformers with PEFT, with the adapter in a directory."""
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(truth, directory).eval()
    return transformers_logits(wrapped)


def transformers_logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 300, (2, 21), generator=generator)
    canvas = torch.randint(0, 300, (2, 16), generator=generator)
    with torch.no_grad():
        return model(input_ids=prompt, decoder_input_ids=canvas).logits


def our_logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 300, (2, 21), generator=generator)
    canvas = torch.randint(0, 300, (2, 16), generator=generator)
    with torch.no_grad():
        return model.unembed(model.denoise(canvas, model.encode(prompt)))


@pytest.mark.parametrize("parts", [MIXED, {"attention": LowRank(4, 8)}, {"experts": LowRank(2, 4, rslora=True)}])
def test_a_saved_adapter_loads_in_peft_with_equal_logits(tmp_path, parts):
    tokens = (5, 17, 250) if "mlp" in parts else ()
    model = adapted(parts, tokens)
    checkpoint.save_adapter(model, tmp_path / "adapter", base="somewhere")
    theirs = peft_logits(tmp_path / "adapter", oracle())
    mine = our_logits(model)
    assert (mine - theirs).abs().max() < 1e-5
    assert (mine - our_logits(ours(oracle()))).abs().max() > 0.05


def test_an_adapter_is_read_back_as_it_was_saved(tmp_path):
    model = adapted(MIXED, (5, 17, 250))
    checkpoint.save_adapter(model, tmp_path / "adapter")
    again = ours(oracle())
    checkpoint.load_adapter(again, tmp_path / "adapter")
    assert {n: t.tolist() for n, t in adapter_tensors(again).items()} == {
        n: t.tolist() for n, t in adapter_tensors(model).items()
    }
    assert again.vocabulary.token_ids == (5, 17, 250)
    assert torch.equal(our_logits(again), our_logits(model))


def test_an_adapter_is_found_on_the_hub(tmp_path, monkeypatch):
    checkpoint.save_adapter(adapted({"attention": LowRank(2, 4.0)}), tmp_path / "adapter", base=str(tmp_path))

    def snapshot_download(hub_id: str, allow_patterns: list[str]) -> str:
        ignored = shutil.ignore_patterns(*allow_patterns)
        there = {path.name for path in (tmp_path / "adapter").iterdir()}
        wanted = ignored(hub_id, sorted(there))
        return str(shutil.copytree(tmp_path / "adapter", tmp_path / "copy", ignore=lambda *_: there - wanted))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint.load_adapter(model := ours(oracle()), find("someone/adapter"))
    assert is_adapted(model)
    shutil.rmtree(tmp_path / "copy")
    assert model_files("someone/adapter", with_weights=False).adapter == tmp_path / "copy"
    assert not list((tmp_path / "copy").glob("*.safetensors"))


def test_an_adapter_that_peft_made_is_read(tmp_path):
    from peft import LoraConfig, get_peft_model

    pattern = r"model\.(decoder|encoder\.language_model)\.layers\.\d+\.self_attn\.(q|v)_proj"
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=pattern,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={r"experts.gate_up_proj": 2, r"experts.down_proj": 2},
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    wrapped = get_peft_model(oracle(), config)
    state = dict(wrapped.named_parameters())
    with torch.no_grad():  # PEFT trains the copies apart; ours are one
        for name, parameter in state.items():
            if "lora" in name and "encoder.language_model" in name:
                parameter.copy_(state[name.replace("encoder.language_model", "decoder")])
    wrapped.save_pretrained(tmp_path)
    model = ours(oracle())
    checkpoint.load_adapter(model, tmp_path)
    assert (our_logits(model) - transformers_logits(wrapped.eval())).abs().max() < 1e-5


def test_what_peft_put_on_all_linear_layers_is_read_where_the_image_encoder_has_learnt_nothing(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(oracle(), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    state = {name: parameter for name, parameter in wrapped.named_parameters() if "lora" in name}
    images = [name for name in state if "vision" in name and "lora_B" in name]
    with torch.no_grad():
        for name, parameter in state.items():
            if name not in images and "lora_B" in name:
                parameter.normal_(std=0.01)
        for name, parameter in state.items():  # PEFT trains the copies apart; ours are one
            if "encoder.language_model" in name:
                parameter.copy_(state[name.replace("encoder.language_model", "decoder")])
    wrapped.save_pretrained(tmp_path / "a")
    model = ours(oracle())
    checkpoint.load_adapter(model, tmp_path / "a")
    theirs = transformers_logits(wrapped.eval())
    assert images and (our_logits(model) - theirs).abs().max() < 1e-5
    assert (theirs - our_logits(ours(oracle()))).abs().max() > 0.01
    assert any("router" in name for name in adapters_of(model))
    checkpoint.save(ours(oracle()), tmp_path / "base")
    checkpoint.export(tmp_path / "base", tmp_path / "merged", tmp_path / "a", dtype="float64")
    merged = checkpoint.load(tmp_path / "merged", dtype="float64")
    beside = checkpoint.load(tmp_path / "base", dtype="float64", adapter=tmp_path / "a")
    assert (our_logits(merged) - our_logits(beside)).abs().max() < 1e-10
    with torch.no_grad():
        state[images[0]].fill_(0.1)
    wrapped.save_pretrained(tmp_path / "b")
    seeing = checkpoint.load(tmp_path / "base", dtype="float64", adapter=tmp_path / "b")
    assert any(name.startswith("image_side.") for name in adapters_of(seeing))


def test_copies_that_differ_are_refused(tmp_path):
    checkpoint.save_adapter(adapted({"attention": LowRank(4, 8)}), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "encoder" in key)
    save_file({**tensors, key: tensors[key] + 1}, file)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: .*encoder.*differs"):
        checkpoint.load_adapter(ours(oracle()), tmp_path / "a")
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    with pytest.raises(CheckpointError, match="one of two modules"):
        checkpoint.load_adapter(ours(oracle()), tmp_path / "a")


@pytest.mark.parametrize(
    "change,message",
    [
        ({"peft_type": "IA3"}, "peft_type.*LORA"),
        ({"lora_alpha": None}, "no alpha.*lora_alpha"),
        ({"bias": "all"}, "^[^ ]* bias .*'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights .*'pissa_niter_4'"),
        ({"init_lora_weights": "eva"}, "init_lora_weights .*'eva'"),
        ({"new_kind": {"scale": 2}}, "new_kind .*'scale'"),
        ({"alpha_pattern": {"q_proj(": 4}}, r"'q_proj\('"),
        ({"target_modules": "q_proj("}, r"'q_proj\('"),
        ({"target_modules": -1}, "target_modules .*-1"),
        ({"target_modules": r"(.+)\1"}, "target_modules: .*groupref"),
        ({"target_modules": "((.*a)*b|(.*c)*)*" * 1000}, "target_modules: .*more than 0.5 seconds"),
        ({"exclude_modules": "(" * 5000 + ")" * 5000}, "exclude_modules: "),
        ({"alpha_pattern": {"q" * 30_000: 4}}, "alpha_pattern: .*30,000 characters"),
        ({"r": 10**9}, f"r is {10**9}; .*from 1 to 65536"),
        ({"r": -1}, "r is -1"),
        ({"r": True}, "r is True"),
        ({"r": 4.0}, "r is 4.0"),
        ({"lora_alpha": []}, r"lora_alpha .*\[\]"),
        ({"lora_dropout": "x"}, "lora_dropout .*'x'"),
        ({"alpha_pattern": -1}, "alpha_pattern"),
        ({"trainable_token_indices": {"embed_tokens": ["x"]}}, "trainable_token_indices"),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(adapter_patterns, "SECONDS", 0.5)
    checkpoint.save_adapter(adapted({"attention": LowRank(4, 8)}), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_adapter(ours(oracle()), tmp_path / "a")


@pytest.mark.parametrize(
    "pattern",
    ["(.+)+!", "(a|a)*!", "(.*)" * 20 + "!", ".?" * 60 + "." * 60 + "!", "x{100000000}", "(((((.+)+)+)+)+)+!"],
)
def test_patterns_that_have_no_end_elsewhere_match_names_at_once(pattern):
    with time_limit(2):
        assert not adapter_patterns.NamePatterns(Path("file")).matches("target_modules", pattern, "model.layers." * 9)


def _drawn_pattern(draw: random.Random, depth: int) -> str:
    """A pattern of all that patterns may have."""
    inner = [_drawn_pattern(draw, depth - 1) for _ in range(2)] if depth else []
    leaves = [
        "a",
        "b",
        ".",
        "1",
        r"\.",
        r"\d",
        r"\w",
        r"\W",
        "[ab]",
        "[^a]",
        "[a-c1]",
        r"[^\d]",
        "^",
        "$",
        r"\b",
        r"\B",
    ]
    if not depth or draw.random() < 0.3:
        return draw.choice(leaves)
    ends = draw.choice(["*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}?", "{2,}"])
    return draw.choice(
        [
            "".join(inner),
            f"(?:{'|'.join(inner)})",
            f"({inner[0]}){ends}",
            f"(?={inner[0]})",
            f"(?!{inner[0]})",
            "(?<=[ab])",
        ]
    )


def test_patterns_match_what_re_matches():
    draw, patterns, count = random.Random(0), adapter_patterns.NamePatterns(Path("file")), 0
    for _ in range(600):
        pattern = _drawn_pattern(draw, 4)
        with contextlib.suppress(re.error):
            for name in ("a", "ab", "a1.b", "aab.ba1", "b.b"):
                assert patterns.matches("target_modules", pattern, name) == bool(re.fullmatch(pattern, name)), pattern
                count += 1
    assert count > 2000


def test_every_setting_of_peft_is_read_without_effect_or_refused_by_its_name(tmp_path):
    """A new setting of PEFT whose default is not neutral fails here until somebody has decided what it is."""
    from peft import LoraConfig

    defaults = LoraConfig().to_dict()
    known = {*adapter_config.READ, *adapter_config.INERT}
    assert {*known, *adapter_config.NEUTRAL} <= {field.name for field in dataclasses.fields(LoraConfig)}
    patterns = adapter_patterns.NamePatterns(tmp_path)
    adapter_config.require_plain(defaults, tmp_path, patterns)
    foreign = defaults.keys() - known
    assert "use_dora" in foreign
    for name in foreign:
        with pytest.raises(CheckpointError, match=f": {name} .*'foreign'"):
            adapter_config.require_plain(defaults | {name: "foreign"}, tmp_path, patterns)


def test_one_rank_alone_writes_the_adapter_of_a_split_model_whose_adapters_are_whole(tmp_path, monkeypatch):
    model = adapted({"attention": LowRank(4, 8)})
    split = next(weight for name, weight in model.named_parameters() if "lora" not in name)
    split.device_mesh = SimpleNamespace(device_type="cpu")
    monkeypatch.setattr(gathering, "is_spread", lambda tensor: tensor is split)
    monkeypatch.setattr(gathering, "from_all", lambda said, device: [None, said])
    for rank, is_there in ((1, False), (0, True)):
        monkeypatch.setattr(gathering.dist, "get_rank", lambda rank=rank: rank)
        checkpoint.save_adapter(model, tmp_path / "a")
        assert (tmp_path / "a").exists() == is_there


def test_a_matrix_without_its_partner_or_a_rank_and_what_is_no_matrix_are_refused(tmp_path):
    checkpoint.save_adapter(adapted({"experts": LowRank(2, 4)}), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if "base_layer.lora_B" not in name}, file)
    (tmp_path / "a" / "digests.json").unlink()
    with pytest.raises(CheckpointError, match="gate_up_lora_B"):
        checkpoint.load_adapter(ours(oracle()), tmp_path / "a")
    save_file({name: x[:0] if "lora_A" in name else x[:, :0].clone() for name, x in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="rank 0"):
        checkpoint.load_adapter(ours(oracle()), tmp_path / "a")
    for odd in (lambda x: x.flatten(), lambda x: x.long()):
        save_file({name: odd(x) if "lora_A" in name else x for name, x in tensors.items()}, file)
        with pytest.raises(CheckpointError, match=r"lora_A.weight is"):
            checkpoint.load_adapter(ours(oracle()), tmp_path / "a")


def test_a_refused_adapter_leaves_the_model_as_it_was(tmp_path):
    checkpoint.save_adapter(adapted({"attention": LowRank(4, 8)}), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "encoder" in key)
    save_file({**tensors, key: tensors[key] + 1}, file)
    model = ours(oracle())
    with pytest.raises(CheckpointError, match="differs"):
        checkpoint.load_adapter(model, tmp_path / "a")
    assert not adapters_of(model) and torch.equal(our_logits(model), our_logits(ours(oracle())))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_merge_reads_and_holds_one_tensor_after_the_other_and_gives_what_a_whole_model_gives(
    tmp_path, monkeypatch, dtype
):
    checkpoint.save(ours(oracle()), tmp_path / "base", dtype=torch.float32)
    source = adapted(MIXED, (5, 17, 250), torch.float32)
    source.carried = checkpoint.Carried(origin=tmp_path / "base")
    adapter = checkpoint.save_adapter(source, tmp_path / "adapter", base=str(tmp_path / "base"))
    model = checkpoint.load(tmp_path / "base", "float32", "cpu", adapter=adapter)
    merge(model)
    checkpoint.save(model, tmp_path / "whole", dtype=None if dtype == "auto" else dtype)
    alive: list[weakref.ref[Tensor]] = []
    peak, sums = 0, blockdiff.checkpoint.merging.merged

    def watched(*args: Any) -> Tensor:
        nonlocal peak
        made = sums(*args)
        alive.append(weakref.ref(made))
        peak = max(peak, sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(blockdiff.checkpoint.merging, "merged", watched)
    monkeypatch.setattr(blockdiff.checkpoint.read, "load_weights", None)
    checkpoint.export(adapter, tmp_path / "out", dtype=dtype)
    assert len(alive) == sum(2 if "experts" in name else 1 for name in adapters_of(source)) and peak <= 2
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    checkpoint.export(adapter, tmp_path / "alone", peft=True)
    assert (tmp_path / "alone" / "adapter_model.safetensors").read_bytes() == (
        adapter / "adapter_model.safetensors"
    ).read_bytes()


def test_an_adapter_that_does_not_fit_its_base_is_not_merged(tmp_path):
    checkpoint.save(ours(oracle()), tmp_path / "base")
    checkpoint.save_adapter(adapted({"experts": LowRank(2, 4)}), tmp_path / "a", base=str(tmp_path / "base"))
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if "base_layer.lora_B" not in name}, file)
    (tmp_path / "a" / "digests.json").unlink()
    with pytest.raises(CheckpointError, match="gate_up_lora_B"):
        checkpoint.export(tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def shallow(layers: int, canvas_length: int = 16) -> Any:
    """A small model with an adapter of its attention."""
    kinds = ("sliding_attention", "full_attention")
    config = tiny_config(canvas_length, num_hidden_layers=layers, layer_types=[kinds[n % 2] for n in range(layers)])
    return checkpoint.init(config, seed=1, device="cpu", kernels="torch")


def test_an_adapter_of_a_model_of_another_depth_is_refused_wherever_it_is_used(tmp_path):
    """Every tensor of an adapter of two layers has its place in a model of four."""
    for layers in (2, 4):
        checkpoint.save(shallow(layers), tmp_path / f"{layers}")
    model = checkpoint.load(tmp_path / "2", device="cpu", kernels="torch")
    adapt(model, targets(model, {"attention": LowRank(4, 6.0)}))
    draw_adapters(model, 0, CPU, torch.float32)
    checkpoint.save_adapter(model, tmp_path / "adapter", str(tmp_path / "2"))
    said = r"adapter: was trained on another model \(diffusion_gemma, 2 layers, .*\) than this one \(.* 4 layers"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path / "4", device="cpu", kernels="torch", adapter=tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.export(tmp_path / "4", tmp_path / "merged", adapter=tmp_path / "adapter")
    assert not (tmp_path / "merged").exists()
    # without what our own file says of its base, as PEFT alone writes it
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})
    (tmp_path / "adapter" / "digests.json").unlink()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for chosen in (config["target_modules"], ["q_proj", "k_proj", "v_proj", "o_proj"]):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"target_modules": chosen}))
        with pytest.raises(CheckpointError, match=r"adapts \d+ modules.*no tensors"):
            checkpoint.export(tmp_path / "4", tmp_path / "merged", adapter=tmp_path / "adapter")
    two = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "layers_to_transform": [0, 1]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | two))
    checkpoint.export(tmp_path / "4", tmp_path / "merged", adapter=tmp_path / "adapter")  # it says so itself


def test_an_adapter_over_other_weights_of_the_same_shape_is_told_in_one_line(tmp_path):
    other = checkpoint.init("tiny", seed=1, device="cpu")
    checkpoint.save(other, tmp_path / "1")
    with torch.no_grad():
        other.layers[1].mlp.up_proj.weight *= 1.5  # one of many tensors
    checkpoint.save(other, tmp_path / "2")
    model = checkpoint.load(tmp_path / "1", device="cpu", kernels="torch")
    adapt(model, targets(model, {"attention": LowRank(4, 6.0)}))
    draw_adapters(model, 0, CPU, torch.float32)
    checkpoint.save_adapter(model, tmp_path / "adapter", str(tmp_path / "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.export(tmp_path / "adapter", tmp_path / "again", peft=True)
        checkpoint.load(tmp_path / "again", device="cpu", kernels="torch")
    with pytest.warns(UserWarning, match=r"again: was trained on other weights than those of .*2, of the same shape"):
        other = checkpoint.load(tmp_path / "2", device="cpu", kernels="torch")
        with_adapter(other, tmp_path / "again")
    with pytest.warns(UserWarning, match=r"again: was trained on other weights than those of .*2, of the same shape"):
        checkpoint.load(tmp_path / "2", device="cpu", kernels="torch", adapter=tmp_path / "again")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: .*already"):
        checkpoint.save_adapter(model, tmp_path / "file")


def test_a_model_with_adapters_is_not_saved_as_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="merge"):
        checkpoint.save(adapted({"attention": LowRank(4, 8)}), tmp_path / "model")
