"""The backbone against transformers: both passes, caches, geometries, precisions, what a canvas may see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import blockdiff
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.layer_kind import LayerKind
from blockdiff.spans import Spans
from tests.support.backbone import (
    EXACT,
    L,
    close,
    differs,
    packed_batch,
    run_packed,
    tokens,
    transformers_run,
)
from tests.support.oracle import oracle, ours, tiny_config

pytestmark = pytest.mark.usefixtures("without_gradients")

# -- both passes ---------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 40])
def test_both_passes_match_transformers(pair, length):
    model, mine = pair
    prompt, canvas = tokens(2, length), tokens(2, L, seed=1)
    truth = transformers_run(model, prompt, canvas)
    prefix = mine.encode(prompt)
    hidden = mine.denoise(canvas, prefix)
    close(prefix.hidden, truth.encoder)
    close(hidden, truth.hidden)
    assert mine.unembed(hidden).dtype == torch.float64
    close(mine.unembed(hidden), truth.logits)


@pytest.mark.parametrize("length", [7, 40])
def test_fp32_matches_transformers_as_closely_as_transformers_itself(length):
    """Which (batched, chunked, eager) differs by 5e-5 to 2e-4 in the logits, 1e-3 in a second pass."""
    model = oracle(dtype=torch.float32)
    mine = ours(model)
    prompt, canvas = tokens(3, length), tokens(3, L, seed=1)
    prefix = mine.encode(prompt)
    signal, tolerance = {}, 2e-4
    soft = None
    for _ in range(2):
        truth = transformers_run(model, prompt, canvas, **signal)
        hidden = mine.denoise(canvas, prefix, soft)
        logits = mine.unembed(hidden)
        assert (logits - truth.logits).abs().max() < tolerance
        close(prefix.hidden, truth.encoder, 1e-5)
        close(hidden, truth.hidden, 1e-5)
        signal, soft, tolerance = {"self_conditioning_logits": logits}, mine.soft_embedding(logits), 1e-3


@pytest.mark.parametrize("canvas_length", [1, 5, 16])
def test_a_canvas_may_be_shorter_than_the_model_s(pair, canvas_length):
    model, mine = pair
    prompt, canvas = tokens(2, 20), tokens(2, canvas_length, seed=1)
    close(mine.denoise(canvas, mine.encode(prompt)), transformers_run(model, prompt, canvas).hidden)


@pytest.mark.parametrize("full_layers", [1, 2, 3, 4])
def test_any_number_of_full_layers(full_layers):
    kinds = ["sliding_attention"] * (4 - full_layers) + ["full_attention"] * full_layers
    kinds[:3] = kinds[2::-1]  # sliding layers after full ones; the last one is always full
    model = oracle(tiny_config(layer_types=kinds))
    mine = ours(model)
    assert [layer.attention.v_proj is None for layer in mine.layers] == [k == "full_attention" for k in kinds]
    prompt, canvas = tokens(2, 40), tokens(2, L, seed=1)
    truth = transformers_run(model, prompt, canvas)
    prefix = mine.encode(prompt)
    close(prefix.hidden, truth.encoder)
    close(mine.denoise(canvas, prefix), truth.hidden)


def test_a_single_layer():
    model = oracle(tiny_config(num_hidden_layers=1, layer_types=["full_attention"]))
    mine = ours(model)
    prompt, canvas = tokens(2, 40), tokens(2, L, seed=1)
    close(mine.denoise(canvas, mine.encode(prompt)), transformers_run(model, prompt, canvas).hidden)


@pytest.mark.parametrize("form", ["global fields", "per_layer_config"])
def test_both_forms_of_the_global_head_fields(form):
    values = tiny_config(global_head_dim=48, num_global_key_value_heads=2).to_dict()
    text = values["text_config"]
    if form == "global fields":
        text.pop("per_layer_config")
        text.update(global_head_dim=48, num_global_key_value_heads=2)
    assert ("per_layer_config" in text) == (form == "per_layer_config")
    assert ("global_head_dim" in text) == (form == "global fields")
    model = oracle(DiffusionGemmaConfig.from_dict(values))
    mine = ours(model)
    assert mine.layers[3].attention.k_proj.weight.shape == (2 * 48, 64)
    assert mine.layers[0].attention.k_proj.weight.shape == (2 * 16, 64)
    prompt, canvas = tokens(2, 40), tokens(2, L, seed=1)
    close(mine.denoise(canvas, mine.encode(prompt)), transformers_run(model, prompt, canvas).hidden)


def rope(sliding: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **full}
    sliding = {"rope_type": "default", "rope_theta": 1e4, **sliding}
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}


CONFIGS = {
    "silu": {"hidden_activation": "silu"},
    "linear RoPE": rope({"rope_type": "linear", "factor": 3.0}, {}),
    "a factor of the proportional RoPE": rope({}, {"factor": 8.0, "partial_rotary_factor": 0.5}),
    "both kinds proportional": rope({"rope_type": "proportional", "factor": 2.0}, {"rope_theta": 3e5}),
    "another eps": {"rms_norm_eps": 1e-2},
    "only full layers": {"layer_types": ["full_attention"] * 4},
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_says_is_computed_as_transformers_does(name):
    model = oracle(tiny_config(**CONFIGS[name]))
    mine = ours(model)
    prompt, canvas = tokens(2, 40), tokens(2, L, seed=1)
    logits = torch.randn(2, L, 384, generator=torch.Generator().manual_seed(6)) * 3
    truth = transformers_run(model, prompt, canvas, self_conditioning_logits=logits)
    prefix = mine.encode(prompt)
    hidden = mine.denoise(canvas, prefix, mine.soft_embedding(logits))
    close(prefix.hidden, truth.encoder)
    close(hidden, truth.hidden, 1e-7)
    close(mine.unembed(hidden), truth.logits, 1e-6)


def test_logits_are_soft_capped():
    model = oracle(tiny_config(final_logit_softcapping=2.0))
    mine = ours(model)
    prompt, canvas = tokens(2, 9), tokens(2, L, seed=1)
    logits = mine.unembed(mine.denoise(canvas, mine.encode(prompt)))
    close(logits, transformers_run(model, prompt, canvas).logits, 1e-6)
    assert 1.9 < logits.abs().max() <= 2.0


def test_the_embedding_scale_is_rounded_to_the_weights_dtype():
    vocabulary = Vocabulary(4, 2816, 30.0, blockdiff.kernels.IN_TORCH)
    ones = torch.ones(4, 2816)
    vocabulary.table.copy_(ones)
    assert vocabulary.embed(torch.tensor([1]))[0, 0] == torch.tensor(2816.0).sqrt()
    vocabulary = vocabulary.bfloat16()
    assert vocabulary.embed(torch.tensor([1]))[0, 0] == 53.0
    uniform = torch.zeros(1, 4)  # every row of the table is ones, so the soft embedding is the scale
    assert vocabulary.soft_embedding_of(uniform)[0, 0] == 53.0
    assert vocabulary.soft_embedding(torch.zeros(1, 2816, dtype=torch.bfloat16))[0, 0] == 53.0


# -- self-conditioning ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("is_on", [(True, True, True), (False, False, False), (True, False, True)])
def test_self_conditioning_on_off_and_mixed_per_row(pair, is_on):
    model, mine = pair
    prompt, canvas = tokens(3, 20), tokens(3, L, seed=1)
    logits = transformers_run(model, prompt, tokens(3, L, seed=2)).logits
    mask = torch.tensor(is_on)
    truth = transformers_run(model, prompt, canvas, self_conditioning_logits=logits, self_conditioning_mask=mask)
    prefix = mine.encode(prompt)
    soft = mine.soft_embedding(logits) * mask[:, None, None]
    hidden = mine.denoise(canvas, prefix, soft)
    close(hidden, truth.hidden, 1e-7)  # the signal's softmax is fp32
    without = mine.denoise(canvas, prefix)
    for row, on in enumerate(is_on):
        if on:
            differs(hidden[row], without[row])
        else:
            close(hidden[row], without[row], EXACT)


def test_no_signal_is_a_zero_vector_and_not_uniform_logits(mine):
    prompt, canvas = tokens(1, 20), tokens(1, L, seed=1)
    prefix = mine.encode(prompt)
    uniform = mine.soft_embedding(torch.zeros(1, L, mine.vocab_size))
    differs(mine.denoise(canvas, prefix, uniform), mine.denoise(canvas, prefix))


def test_the_soft_embedding_of_hidden_states_is_that_of_their_logits(mine):
    hidden = mine.denoise(tokens(2, L, seed=1), mine.encode(tokens(2, 20)))
    truth = mine.soft_embedding(mine.unembed(hidden))
    close(mine.vocabulary.soft_embedding(hidden), truth, 1e-7)
    close(mine.vocabulary.stats(hidden, 1.0, torch.zeros(2, L)).soft_embedding, truth, 1e-6)


# -- unequal lengths and chunks ------------------------------------------------------------------------------


# -- several canvases per row, packed documents --------------------------------------------------------------


@pytest.mark.quick
def test_several_canvases_and_packed_documents_match_one_by_one(pair):
    model, mine = pair
    batch = packed_batch()
    B, C = batch.start_BC.shape
    soft = torch.randn(B, C, L, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits = torch.randn(B, C, L, 384, generator=torch.Generator().manual_seed(6)) * 3
    soft = mine.soft_embedding(logits)
    soft[:, 1] = 0.0
    encoder, hidden = run_packed(mine, batch, soft.flatten(1, 2))
    compared = 0
    for row in range(B):
        for document in set(batch.doc_start_BS[row].tolist()) - {-1}:
            columns = batch.doc_start_BS[row] == document
            truth = transformers_run(model, batch.tokens_BS[row, columns][None], tokens(1, L))
            close(encoder[row, columns], truth.encoder[0])
        for c in range(C):
            if batch.length_BC[row, c]:
                before = slice(int(batch.doc_start_BC[row, c]), int(batch.start_BC[row, c]))
                signal = {} if c == 1 else {"self_conditioning_logits": logits[row, c][None]}
                truth = transformers_run(
                    model, batch.tokens_BS[row, before][None], batch.canvas_BCL[row, c][None], **signal
                )
                close(hidden[row, c], truth.hidden[0], 1e-7)
                compared += 1
    assert compared == 8


# -- clean and noisy tokens in one call ----------------------------------------------------------------------


def beside(kind: LayerKind, past: int, S: int, B: int = 2) -> Spans:
    """`past` cached tokens, then S clean tokens and a canvas after them in one call: [clean | canvas].

    With past 2, S 3, L 2 on a full layer, and where a query sees two tokens before it (window 3):

        cached | clean | canvas        cached | clean | canvas
         x x   | x . . | . .            x x   | x . . | . .
         x x   | x x . | . .            . x   | x x . | . .
         x x   | x x x | . .            . .   | x x x | . .
         x x   | x x x | x x            . .   | . x x | x x
         x x   | x x x | x x            . .   | . x x | x x
    """
    clean = kind.encode_spans(torch.zeros(B, S, dtype=torch.int64), torch.full((B,), past)).bounds_BT4
    oldest = 0 if kind.window is None else max(0, past + S - kind.window + 1)
    noisy = torch.tensor([min(oldest, past), past, max(0, oldest - past), S + L], dtype=torch.int32)
    return Spans(torch.cat([clean, noisy.expand(B, L, 4)], 1))


def in_one_call(mine: DiffusionGemma, prompt: Tensor, clean: Tensor, canvas: Tensor, soft: Tensor) -> Tensor:
    (B, past), S = prompt.shape, clean.shape[1]
    spans = {name: beside(kind, past, S) for name, kind in mine.kinds.items()}
    cached = None
    if past:
        before = mine.encode(prompt)
        spans, cached = {name: before.held(mine.kinds[name], each) for name, each in spans.items()}, before.layers()
    is_noisy = (torch.arange(S + L) >= S).expand(B, -1)
    positions = torch.arange(past, past + S + L).expand(B, -1)
    signal = torch.cat([torch.zeros(B, S, 64, dtype=torch.float64), soft], 1)
    return mine(torch.cat([clean, canvas], 1), positions, spans, cached, is_noisy, signal)[0]


def in_two_calls(mine: DiffusionGemma, prompt: Tensor, clean: Tensor, canvas: Tensor, soft: Tensor) -> Tensor:
    prefix = mine.encode(clean, prefix=mine.encode(prompt) if prompt.shape[1] else None)
    return torch.cat([prefix.hidden, mine.denoise(canvas, prefix, soft)], 1)


@pytest.mark.parametrize("past,S", [(0, 5), (0, 30), (7, 3), (25, 1), (25, 20)])
def test_clean_and_noisy_tokens_in_one_call_have_the_values_and_gradients_of_two_calls(mine, past, S):
    given = tokens(2, past), tokens(2, S, seed=1), tokens(2, L, seed=2)
    found = []
    for run in (in_one_call, in_two_calls):
        draw = torch.Generator().manual_seed(3)
        soft = torch.randn(2, L, 64, generator=draw, dtype=torch.float64).requires_grad_()
        mine.zero_grad(set_to_none=True)
        hidden = run(mine, *given, soft)
        (torch.randn(hidden.shape, generator=draw, dtype=torch.float64) * hidden).sum().backward()
        found.append([hidden.detach(), soft.grad, *(p.grad for p in mine.parameters() if p.grad is not None)])
    mine.zero_grad(set_to_none=True)
    assert len(found[0]) == len(found[1]) > 50
    for one, two in zip(*found, strict=True):
        close(one, two, EXACT)


# -- what a canvas sees: changing what it must not see changes nothing, changing what it sees does -----------


# -- bf16 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts,slack", [(2, 1.03), (8, 1.1)])
def test_bfloat16_errs_no_more_than_transformers_does(tmp_path, experts, slack):
    """Mean errors against transformers in fp32 on the same rounded weights.

    The ratio of the errors scatters by 3 % from batch to batch where all experts are used, by 12 % where
    rounding can flip the choice of experts: the slack is three standard errors. Scores in bf16 give 1.1.
    """
    errors = []
    for seed in range(2 if experts == 2 else 4):
        config = tiny_config(num_experts=experts, top_k_experts=2)
        oracle(config, seed, torch.float32).to(torch.bfloat16).save_pretrained(tmp_path)
        load = DiffusionGemmaForBlockDiffusion.from_pretrained
        theirs, full = load(tmp_path, dtype=torch.bfloat16).eval(), load(tmp_path, dtype=torch.float32).eval()
        for model in (theirs, full):
            model.set_experts_implementation("eager")
        mine = blockdiff.load(str(tmp_path), dtype="bfloat16", device="cpu")
        assert mine.dtype == torch.bfloat16
        for batch in range(4):
            prompt, canvas = tokens(8, 30, seed=batch), tokens(8, L, seed=100 + batch)
            truth, other = transformers_run(full, prompt, canvas), transformers_run(theirs, prompt, canvas)
            prefix = mine.encode(prompt)
            logits = mine.unembed(mine.denoise(canvas, prefix))
            pairs = [(prefix.hidden, truth.encoder), (other.encoder, truth.encoder)]
            pairs += [(logits, truth.logits), (other.logits, truth.logits)]
            errors.append([float((x.float() - y).abs().mean()) for x, y in pairs])
    ours_encoder, theirs_encoder, ours_logits, theirs_logits = torch.tensor(errors).mean(0)
    assert ours_encoder <= slack * theirs_encoder
    assert ours_logits <= slack * theirs_logits


@pytest.mark.parametrize("lengths", [None, [40, 9, 23]])
def test_a_sliding_layer_keeps_only_the_keys_that_a_canvas_sees(pair, lengths):
    _, mine = pair
    window = mine.kinds["sliding"].window
    given = None if lengths is None else torch.tensor(lengths)
    with torch.no_grad():
        prefix = mine.encode(tokens(3, 40), given)
        for _ in range(2):
            for kind, (keys, _) in zip(mine.layer_kinds, prefix.layers(), strict=True):
                assert keys.shape[1] == (prefix.columns if kind == "full" else window - 1)
            prefix = mine.encode(tokens(3, L, seed=3), prefix=prefix)
