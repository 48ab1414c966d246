"""Nemotron-Labs-Diffusion against what its own code gave (`tests/data/families/nemotron`) and transformers' layers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Ministral3Config, Ministral3ForCausalLM

import blockdiff
from blockdiff import checkpoint
from blockdiff.canvas import Canvas, CleanRow, joined, lay_out
from blockdiff.checkpoint.config import config_from
from blockdiff.diffusion.schedule import Linear
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.errors import CheckpointError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, targets
from blockdiff.models.pages import Pages
from blockdiff.objective import Objective
from tests.support.closeness import require_close

pytestmark = pytest.mark.quick
EXACT = 1e-12
GOLDEN = Path(__file__).parents[1] / "data/families/nemotron"
CASES, MASK = ("yarn", "short"), 100
CONFIG: dict[str, Any] = json.loads((GOLDEN / "yarn/config.json").read_text())


def loaded(name: str, dtype: str = "float64") -> Any:
    return blockdiff.load(GOLDEN / name, dtype=dtype, device="cpu", kernels="torch")


@pytest.fixture(scope="module", params=CASES)
def case(request) -> tuple[Any, dict[str, Tensor], str]:
    """A model and what its own code gave."""
    return loaded(request.param), load_file(GOLDEN / request.param / "outputs_fp64.safetensors"), request.param


def starts(truth: dict[str, Tensor]) -> list[int]:
    return sorted(int(name.rpartition("_")[2]) for name in truth if name.startswith("denoise_logits_"))


@torch.no_grad()
def test_hidden_states_and_logits_of_a_clean_row_are_those_of_its_own_code(case):
    model, truth, _ = case
    hidden = model.encode(truth["tokens"]).hidden
    require_close(hidden, truth["encode_hidden"], EXACT)
    require_close(hidden @ model.vocabulary.head.T, truth["encode_logits"], EXACT)


@torch.no_grad()
def test_a_row_in_chunks_padded_packed_or_in_pages_is_as_alone(case):
    model, truth, _ = case
    tokens, expected, width = truth["tokens"], truth["encode_hidden"], truth["tokens"].shape[1]
    prefix, parts = None, []
    for chunk in tokens.split([5, width - 8, 3], 1):
        prefix = model.encode(chunk, prefix=prefix)
        parts.append(prefix.hidden)
    require_close(torch.cat(parts, 1), expected, EXACT)
    padded = model.encode(torch.cat([tokens, tokens.flip(1)]), torch.tensor([width - 3, width]))
    require_close(padded.hidden[:1, : width - 3], expected[:, : width - 3], EXACT)
    batch = lay_out([joined([CleanRow(tokens[0, :7].tolist(), []), CleanRow(tokens[0].tolist(), [])])], 8, 0)
    spans = {"full": model.kinds["full"].encode_spans(batch.doc_start_BS)}
    packed, _ = model(batch.tokens_BS, batch.positions_BS, spans)
    require_close(packed[:, 7 : 7 + width], expected, EXACT)
    pages = Pages(model, 4, capacity=200)
    row, start = pages.open(), starts(truth)[-1]
    require_close(pages.encode([row], tokens[:, :start], [start]), expected[:, :start], EXACT)
    hidden = pages.denoise([row], holed(truth, start, model.canvas_length))
    require_close(hidden @ model.vocabulary.head.T, truth[f"denoise_logits_{start}"], EXACT)


def holed(truth: dict[str, Tensor], start: int, length: int) -> Tensor:
    """The block from a column on, with masks in some places."""
    return torch.where(truth["holes"].bool(), MASK, truth["tokens"][:, start : start + length])


@torch.no_grad()
def test_logits_of_a_block_over_any_prefix_are_those_of_its_own_code(case):
    model, truth, _ = case
    assert len(starts(truth)) == 3
    for start in starts(truth):
        block = holed(truth, start, model.canvas_length)
        hidden = model.denoise(block, model.encode(truth["tokens"][:, :start]))
        require_close(hidden @ model.vocabulary.head.T, truth[f"denoise_logits_{start}"], EXACT)


def test_losses_and_every_gradient_of_a_row_of_blocks_are_those_of_its_own_code(case):
    _, truth, name = case
    model, tokens, is_masked = loaded(name), truth["tokens"], truth["is_masked"].bool()
    L, prefix = model.canvas_length, model.encode(tokens)
    start = torch.arange(0, tokens.shape[1], L)[None]
    spans = {"full": model.kinds["full"].denoise_spans(start, 0 * start, torch.full_like(start, L), L)}
    noisy, positions = torch.where(is_masked, MASK, tokens), torch.arange(tokens.shape[1])[None]
    hidden, _ = model(noisy, positions, spans, prefix.layers(), True)
    require_close(hidden @ model.vocabulary.head.T, truth["train_noisy_logits"], EXACT)
    diffusion = (
        model.vocabulary.cross_entropy(hidden[is_masked], tokens[is_masked]) / truth["p_mask"][is_masked]
    ).sum()
    next_token = model.vocabulary.cross_entropy(prefix.hidden[0, :-1], tokens[0, 1:]).sum()
    require_close(diffusion, truth["train_diffusion_sum"], EXACT)
    require_close(next_token, truth["train_ar_sum"], EXACT)
    loss = 0.3 * diffusion + next_token
    require_close(loss, truth["train_loss"], EXACT)
    loss.backward()
    found = {str(model.config.names.to_hub(ours)): p.grad for ours, p in model.named_parameters()}
    norms = torch.stack([found[each].norm() for each in sorted(found)])
    require_close(norms, truth["train_gradient_norms"], EXACT)
    named = {each.removeprefix("train_gradient."): x for each, x in truth.items() if each.startswith("train_gradient.")}
    assert len(named) == 3
    for each, gradient in named.items():
        require_close(found[each], gradient, EXACT)


@dataclass(frozen=True)
class Marks:
    """Corrupts the given places of the canvases of one document, with masks, and no place of others."""

    is_masked_S: Tensor
    length: int

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        _, sample_BC, index_BC = address_BC3.unbind(-1)
        is_masked_BCL = self.is_masked_S.view(-1, self.length)[index_BC] & (sample_BC == 1)[..., None]
        return torch.where(is_masked_BCL, MASK, canvas_BCL), is_masked_BCL


@pytest.mark.parametrize("sweep", [False, True])
def test_the_objective_has_the_losses_and_gradient_norms_of_its_own_code(case, sweep):
    """All tokens have p = 0.5: t is 0.5, and `elbo` weighs a masked token by 1 / t; next tokens of the whole row."""
    _, truth, name = case
    model, tokens = loaded(name).train(), truth["tokens"][0].tolist()
    L = model.canvas_length
    canvases = [Canvas(tokens[n : n + L], n, t=0.5, address=(0, 1, n // L)) for n in range(0, len(tokens), L)]
    batch = lay_out([CleanRow(tokens, canvases, sample_id=1)], L, pad_id=0)
    marks = Marks(truth["is_masked"][0].bool(), L)
    objective = Objective(model, Linear(), marks, weight=ElboWeight(), positions="corrupted", sweep=sweep)
    losses = objective(batch)
    require_close(losses["canvas"], truth["train_diffusion_sum"], EXACT)
    require_close(losses["ar"], truth["train_ar_sum"], EXACT)
    (0.3 * losses["canvas"] + losses["ar"]).backward()
    found = {str(model.config.names.to_hub(ours)): p.grad for ours, p in model.named_parameters()}
    require_close(torch.stack([found[each].norm() for each in sorted(found)]), truth["train_gradient_norms"], EXACT)


@torch.no_grad()
def test_the_released_adapter_acts_on_noisy_tokens_only(case):
    _, truth, name = case
    model, start = loaded(name), starts(truth)[-1]
    checkpoint.load_adapter(model, GOLDEN / name / "linear_spec_lora")
    assert {module.low_rank for module in adapters_of(model).values()} == {LowRank(2, 8.0, noisy_only=True)}
    require_close(model.encode(truth["tokens"]).hidden, truth["encode_hidden"], EXACT)
    block, prefix = holed(truth, start, model.canvas_length), model.encode(truth["tokens"][:, :start])
    positions = torch.arange(start, start + model.canvas_length)[None]
    # the files have this pass under the causal mask, in which the loop before it had left its flags
    spans = {"full": model.kinds["full"].encode_spans(torch.zeros_like(positions), torch.tensor([start]))}
    hidden, _ = model(block, positions, spans, prefix.layers(), True)
    require_close(hidden @ model.vocabulary.head.T, truth["lora_denoise_logits"], EXACT)
    merged, plain = loaded(name), model.denoise(block, prefix)
    for layer, adapted in zip(merged.layers, model.layers, strict=True):
        o_proj = adapted.attention.o_proj
        layer.attention.o_proj.weight += 4 * o_proj.lora_B @ o_proj.lora_A
    require_close(merged.denoise(block, prefix), plain, EXACT)


# -- transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_layers_and_whole_gradients_are_those_of_ministral3(seed):
    draw, original = random.Random(seed), 2 ** random.Random(seed).randint(3, 6)
    heads = draw.choice([1, 2, 4])
    rope = {"rope_type": "yarn", "rope_theta": draw.choice([1e3, 1e4, 1e6]), "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"factor": [0.25, 16.0, 3.0][seed % 3], "original_max_position_embeddings": original}
    rope |= {"beta_fast": draw.choice([4.0, 32.0]), "beta_slow": 1.0, "llama_4_scaling_beta": draw.choice([0.1, 0.5])}
    values: dict[str, Any] = dict(
        vocab_size=draw.randint(20, 60),
        hidden_size=8 * draw.randint(1, 4),
        intermediate_size=draw.randint(5, 40),
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads * draw.choice([1, 2]),
        num_key_value_heads=heads,
        head_dim=draw.choice([4, 8, 16]),
        rms_norm_eps=draw.choice([1e-5, 1e-2]),
        max_position_embeddings=4 * original,
        rope_parameters=rope,
    )
    torch.manual_seed(seed)
    theirs = Ministral3ForCausalLM(Ministral3Config(**values, pad_token_id=None, attn_implementation="eager"))
    frequencies = theirs.model.rotary_emb.inv_freq.clone()
    theirs.double()
    theirs.model.rotary_emb.inv_freq = frequencies
    config = config_from(
        {"model_type": "nemotron_labs_diffusion", "mask_token_id": 7, "block_size": 4} | values, "here"
    )
    ours: Any = config.model_class(config, kernels="torch").double()
    weights = {name.replace("model.", "encoder.", 1): x for name, x in theirs.named_parameters()}
    weights["diffusion_head.weight"] = weights.pop("lm_head.weight")
    ours.load_state_dict({name: weights[str(config.names.to_hub(name))].detach() for name in ours.state_dict()})
    tokens = torch.randint(0, values["vocab_size"], (2, 3 * original if original < 64 else 80))
    logits = ours.encode(tokens).hidden @ ours.vocabulary.head.T
    torch.set_default_dtype(torch.float64)  # of the scales of their queries
    try:
        truth = theirs(tokens).logits
    finally:
        torch.set_default_dtype(torch.float32)
    require_close(logits, truth, EXACT)
    slope = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape)
    (logits * slope).sum().backward()
    (truth * slope).sum().backward()
    for name, parameter in ours.named_parameters():
        require_close(parameter.grad, weights[str(config.names.to_hub(name))].grad, EXACT)


# -- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_is_read_and_written_is_equal_in_tensors_and_in_config(name, tmp_path):
    blockdiff.save(loaded(name, "auto"), tmp_path / "again")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", GOLDEN / name))
    assert again.keys() == before.keys()
    for tensor, x in before.items():
        assert x.dtype == again[tensor].dtype and torch.equal(x, again[tensor]), tensor
    config = json.loads((GOLDEN / name / "config.json").read_text())
    assert json.loads((tmp_path / "again/config.json").read_text()) == config


def test_a_config_says_blocks_mask_positions_and_how_the_model_is_trained():
    config = config_from(CONFIG, "here")
    assert (config.canvas_length, config.mask, config.prefix, config.eos_token_id) == (8, 100, "causal", 11)
    assert config.predicts_next_tokens and config.answer_length == 512
    assert config.trained_with["ar_loss"] == {"weight": 1 / 0.3, "scope": "response"}
    both = config_from(CONFIG | {"dlm_loss_weight": 0.5}, "here")
    assert both.trained_with["ar_loss"]["weight"] == 2.0 and both.trained_with["corruption"] == "mask"
    assert config_from(CONFIG | {"ar_loss_weight": 0.0}, "here").trained_with["ar_loss"] == "none"
    assert config.with_canvases(4).canvas_length == 4 and config.with_canvases(4).to_dict()["block_size"] == 4
    bare = config_from({"model_type": "nemotron_labs_diffusion", "mask_token_id": 100}, "here")
    assert (bare.canvas_length, bare.hidden_size, bare.pad_token_id) == (32, 4096, None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask_token_id": -1}, "mask_token_id is -1"),
    "mask": ({"mask_token_id": 128}, "mask_token_id is 128"),
    "block": ({"block_size": 0}, "block_size is 0"),
    "two blocks": ({"canvas_length": 4}, "canvas_length 4"),
    "windows": ({"sliding_window": 4096}, "sliding_window is 4096"),
    "paradigm": ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm is 'autoregressive'"),
    "prefix": ({"prefix": "blocks"}, "prefix is 'blocks'"),
    "bias": ({"attention_bias": True}, "attention_bias is True"),
    "rope": ({"rope_parameters": CONFIG["rope_parameters"] | {"mscale": 0.5}}, "cos and sin would be multiplied"),
    "factor": ({"rope_parameters": CONFIG["rope_parameters"] | {"factor": 0.0}}, "factor is 0.0"),
    "llama": ({"model_type": "llama"}, "rope_type 'yarn' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_computed_is_refused_by_the_name_of_its_field(name):
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"here: .*{message}"):
        config_from(CONFIG | changes, "here")


def test_adapters_of_every_part_are_written_by_the_names_of_the_release(tmp_path):
    model = loaded("yarn", "float32")
    adapt(model, targets(model, {part: LowRank(2, 4.0) for part in ("attention", "mlp")}))
    for module in adapters_of(model).values():
        for each, parameter in module.named_parameters(recurse=False):
            if each.startswith("lora"):
                torch.nn.init.normal_(parameter)
    checkpoint.save_adapter(model, tmp_path / "adapter")
    named = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert "base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight" in named and len(named) == 2 * 7 * 3
    again = loaded("yarn", "float32")
    checkpoint.load_adapter(again, tmp_path / "adapter")
    tokens = torch.arange(9)[None]
    assert torch.equal(again.encode(tokens).hidden, model.encode(tokens).hidden)
