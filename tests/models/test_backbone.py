"""The backbone against transformers: both passes, caches, geometries, precisions, what a canvas may see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import blockdiff
from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.errors import BlockdiffError
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.family import LayerKind
from blockdiff.models.prefix import Prefix
from blockdiff.spans import Spans
from tests.closeness import relative_error, require_close
from tests.oracle import TWO_LAYERS, oracle, ours, tiny_config

L = 16  # canvas length; the window is 16 as well
PAD = 0
EXACT = 1e-12  # what two orders of the same fp64 sums may differ by
PARITY = 1e-8


class Truth(NamedTuple):
    """What transformers computes: encoder [B, S, D], hidden [B, L, D], logits [B, L, V]."""

    encoder: Tensor
    hidden: Tensor
    logits: Tensor


@pytest.fixture(scope="module")
def pair() -> tuple[DiffusionGemmaForBlockDiffusion, DiffusionGemma]:
    model = oracle()
    return model, ours(model)


@pytest.fixture(scope="module")
def mine(pair) -> DiffusionGemma:
    return pair[1]


@pytest.fixture(autouse=True)
def without_gradients(request):
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 380, shape, generator=torch.Generator().manual_seed(seed))


def transformers_run(model: DiffusionGemmaForBlockDiffusion, prompt: Tensor, canvas: Tensor, **signal: Any) -> Truth:
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        out = model(input_ids=prompt, decoder_input_ids=canvas, **signal)
    finally:
        hook.remove()
    return Truth(out.encoder_last_hidden_state, seen[0], out.logits)


def close(found: Tensor, truth: Tensor, tolerance: float = PARITY) -> None:
    require_close(found, truth, tolerance)


def differs(a: Tensor, b: Tensor) -> None:
    assert relative_error(a, b) > 1e-4


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
    assert mine.unembed(hidden).dtype == torch.float32
    close(mine.unembed(hidden), truth.logits, 1e-6)  # logits are fp32 by definition


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


@pytest.mark.parametrize("canvas_length", [1, 5, 33])
def test_a_canvas_may_have_any_length(pair, canvas_length):
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
    vocabulary = Vocabulary(4, 2816, 30.0, blockdiff.kernels.NATIVE)
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

LENGTHS = (40, 1, 17, 9)


def padded(lengths: tuple[int, ...] = LENGTHS, fill: int | None = None, seed: int = 0) -> Tensor:
    rows = tokens(len(lengths), max(lengths), seed=seed)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = fill if fill is not None else tokens(1, max(lengths), seed=99)[0, length:]
    return rows


@pytest.mark.quick
def test_unequal_prompts_match_transformers_row_by_row(pair):
    model, mine = pair
    prompt, canvas = padded(fill=PAD), tokens(4, L, seed=1)
    prefix = mine.encode(prompt, torch.tensor(LENGTHS))
    hidden = mine.denoise(canvas, prefix)
    for row, length in enumerate(LENGTHS):
        truth = transformers_run(model, prompt[row : row + 1, :length], canvas[row : row + 1])
        close(prefix.hidden[row : row + 1, :length], truth.encoder)
        close(hidden[row : row + 1], truth.hidden)


@pytest.mark.quick
def test_padding_does_not_change_a_row(mine):
    canvas, lengths = tokens(4, L, seed=1), torch.tensor(LENGTHS)
    a, b = mine.encode(padded(fill=PAD), lengths), mine.encode(padded(), lengths)
    same_cache(a, b, EXACT)
    for row, length in enumerate(LENGTHS):
        close(a.hidden[row, :length], b.hidden[row, :length], EXACT)
    close(mine.denoise(canvas, a), mine.denoise(canvas, b), EXACT)


def same_cache(a: Prefix, b: Prefix, tolerance: float) -> None:
    assert torch.equal(a.lengths_B, b.lengths_B)
    for one, other in zip(a.layers(), b.layers(), strict=True):
        for x, y in zip(one, other, strict=True):
            for row, length in enumerate(a.lengths_B.tolist()):
                close(x[row, :length], y[row, :length], tolerance)


@pytest.mark.parametrize("split", [(40,), (1, 39), (17, 23), (39, 1), (7, 7, 7, 7, 7, 5), (1,) * 40])
def test_any_split_of_a_prompt_gives_the_same_cache_and_logits(pair, split):
    model, mine = pair
    prompt, canvas = tokens(2, 40), tokens(2, L, seed=1)
    truth = transformers_run(model, prompt, canvas)
    prefix, hidden = None, []
    for chunk in prompt.split(split, 1):
        prefix = mine.encode(chunk, prefix=prefix)
        hidden.append(prefix.hidden)
    assert prefix is not None
    close(torch.cat(hidden, 1), truth.encoder)
    same_cache(prefix, mine.encode(prompt), PARITY)
    close(mine.denoise(canvas, prefix), truth.hidden)


def test_chunks_of_unequal_lengths_match_transformers_row_by_row(pair):
    model, mine = pair
    calls = [(20, 1, 3, 18), (0, 16, 5, 1), (17, 2, 16, 0)]  # a row may get nothing in a call
    parts = [(padded(lengths, seed=i), torch.tensor(lengths)) for i, lengths in enumerate(calls)]
    prefix = mine.encode(*parts[0])
    for part, lengths in parts[1:]:
        prefix = mine.encode(part, lengths, prefix)
    canvas = tokens(4, L, seed=9)
    hidden = mine.denoise(canvas, prefix)
    for row in range(4):
        prompt = torch.cat([part[row, : lengths[row]] for part, lengths in parts])[None]
        truth = transformers_run(model, prompt, canvas[row : row + 1])
        close(hidden[row : row + 1], truth.hidden)
        last = int(parts[-1][1][row])
        if last:
            close(prefix.hidden[row, :last], truth.encoder[0, -last:])


@pytest.mark.parametrize("lengths", [LENGTHS, (20, 20, 20, 20)])
def test_committed_canvases_are_appended_at_each_rows_own_length(pair, lengths):
    model, mine = pair
    prompt = padded(lengths)
    given = None if len(set(lengths)) == 1 else torch.tensor(lengths)
    prefix = mine.encode(prompt, given)
    committed: list[Tensor] = []
    for n in range(3):
        canvas = tokens(4, L, seed=10 + n)
        hidden = mine.denoise(canvas, prefix)
        for row, length in enumerate(lengths):
            row_tokens = torch.cat([prompt[row, :length], *(c[row] for c in committed)])[None]
            close(hidden[row : row + 1], transformers_run(model, row_tokens, canvas[row : row + 1]).hidden)
        prefix = mine.encode(canvas, prefix=prefix)
        committed.append(canvas)
    assert prefix.lengths_B.tolist() == [length + 3 * L for length in lengths]


@pytest.mark.parametrize("lengths", [LENGTHS, (20, 20, 20, 20)])
def test_denoise_leaves_the_prefix_as_it_is(mine, lengths):
    prefix = mine.encode(padded(lengths), torch.tensor(lengths))
    before = [tuple(x.clone() for x in layer) for layer in prefix.layers()]
    first = mine.denoise(tokens(4, L, seed=1), prefix)
    mine.denoise(tokens(4, 5, seed=2), prefix)
    for old, new in zip(before, prefix.layers(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))
    assert torch.equal(mine.denoise(tokens(4, L, seed=1), prefix), first)


def test_a_prefix_that_was_consumed_says_so_in_one_line(mine):
    prefix = mine.encode(tokens(2, 5))
    mine.encode(tokens(2, L, seed=1), prefix=prefix)
    for use in (
        lambda: mine.denoise(tokens(2, L), prefix),
        lambda: mine.encode(tokens(2, L), prefix=prefix),
        lambda: prefix.select(torch.tensor([0])),
    ):
        with pytest.raises(BlockdiffError, match="use the prefix that encode returned") as error:
            use()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [[2], [3, 0], [1, 1, 2]])
@pytest.mark.parametrize("lengths", [LENGTHS, (20, 20, 20, 20)])
def test_selected_rows_of_a_prefix_go_on_as_alone(mine, rows, lengths):
    prompt, given = padded(lengths), None if len(set(lengths)) == 1 else torch.tensor(lengths)
    prefix = mine.encode(prompt, given)
    canvas, index = tokens(4, L, seed=1), torch.tensor(rows)
    whole = mine.denoise(canvas, prefix)
    chosen = prefix.select(index)
    assert len(chosen) == len(rows)
    assert torch.equal(chosen.hidden, prefix.hidden[index])
    close(mine.denoise(canvas[index], chosen), whole[index], EXACT)
    chosen = mine.encode(canvas[index], prefix=chosen)  # may not write into the rows it was chosen from
    close(mine.denoise(canvas, prefix), whole, EXACT)
    whole_committed = mine.encode(canvas, prefix=prefix)
    again = tokens(4, L, seed=2)
    close(mine.denoise(again[index], chosen), mine.denoise(again, whole_committed)[index], EXACT)


@pytest.mark.parametrize("lengths", [LENGTHS, (40, 40, 40, 40)])
def test_gradients_flow_through_a_prefix_made_in_chunks(mine, lengths):
    prompt, canvas = padded(lengths), tokens(4, L, seed=1)
    direction = torch.randn(4, L, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = None if len(set(lengths)) == 1 else torch.tensor(lengths)

    def gradients(prefix: Prefix) -> dict[str, Tensor]:
        mine.zero_grad()
        (mine.denoise(canvas, prefix) * direction).sum().backward()
        return {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}

    truth = gradients(mine.encode(prompt, given))
    first = mine.encode(prompt[:, :18], None if given is None else given.clamp(max=18))
    rest = None if given is None else (given - 18).clamp(min=0)
    got = gradients(mine.encode(prompt[:, 18:], rest, first))
    mine.zero_grad()
    assert truth.keys() == got.keys()
    for name in truth:
        assert relative_error(got[name], truth[name]) < 1e-6, name  # the norms sum in fp32


# -- several canvases per row, packed documents --------------------------------------------------------------


def packed_batch() -> Batch:
    """Three rows: three canvases of one document, two packed documents, one canvas near the start."""
    document = tokens(20 + 3 * L, seed=1).tolist()
    first = [Canvas(tokens(L, seed=30 + n).tolist(), start, 0) for n, start in enumerate((5, 5 + L, 5 + 3 * L))]
    packed = tokens(30 + 45, seed=2).tolist()
    second = [
        Canvas(tokens(L, seed=40).tolist(), 3, 0),
        Canvas(tokens(L, seed=41).tolist(), 19, 0),
        Canvas(tokens(L, seed=42).tolist(), 31, 30),
        Canvas(tokens(L, seed=43).tolist(), 58, 30),
    ]
    third = [Canvas(tokens(L, seed=50).tolist(), 1, 0)]
    rows = [
        CleanRow(document, first),
        CleanRow(packed, second, doc_starts=(0, 30)),
        CleanRow(tokens(18, seed=3).tolist(), third),
    ]
    return lay_out(rows, L, PAD)


def run_packed(model: DiffusionGemma, batch: Batch, soft_BTD: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encoder hidden [B, S, D] and canvas hidden [B, C, L, D] of a batch, each in one call."""
    kinds = model.kinds.values()
    encoder, kv = model(
        batch.tokens_BS, batch.positions_BS, {kind.name: kind.encode_spans(batch.doc_start_BS) for kind in kinds}
    )
    canvases = batch.start_BC, batch.doc_start_BC, batch.length_BC, L
    spans = {kind.name: kind.denoise_spans(*canvases) for kind in kinds}
    positions = (batch.start_BC - batch.doc_start_BC)[..., None] + torch.arange(L)
    hidden, _ = model(batch.canvas_BCL.flatten(1), positions.flatten(1), spans, kv, True, soft_BTD)
    return encoder, hidden.unflatten(1, (*batch.start_BC.shape[1:], L))


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
def test_clean_and_noisy_tokens_in_one_call_have_the_values_and_gradients_of_two_calls(mine, past, S, monkeypatch):
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # norms compute in fp32; in fp64 nothing is left to rounding
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


def canvas_hidden(mine: DiffusionGemma, **changes: Tensor) -> Tensor:
    return run_packed(mine, replace(packed_batch(), **changes))[1]


def changed(tokens_BS: Tensor, row: int, columns: slice) -> Tensor:
    out = tokens_BS.clone()
    out[row, columns] = 3 + (out[row, columns] + 5) % 370
    return out


@pytest.mark.quick
@pytest.mark.parametrize(
    "what,row,canvas,columns",
    [
        ("its own clean tokens", 0, 0, slice(5, 5 + L)),
        ("its own clean tokens", 0, 1, slice(5 + L, 5 + 2 * L)),
        ("its own clean tokens", 0, 2, slice(5 + 3 * L, None)),
        ("everything after its start", 0, 1, slice(5 + L, None)),
        ("the document before", 1, 2, slice(0, 30)),
        ("the document before", 1, 3, slice(0, 30)),
        ("the document after", 1, 0, slice(30, None)),
        ("the document after", 1, 1, slice(30, None)),
        ("padding", 2, 0, slice(18, None)),
        ("another row", 0, 1, slice(0, 0)),
    ],
)
def test_a_canvas_never_sees(mine, what, row, canvas, columns):
    batch = packed_batch()
    others = changed(batch.tokens_BS, row, columns)
    if what == "another row":
        others[1:] = changed(changed(batch.tokens_BS, 1, slice(None)), 2, slice(None))[1:]
    before, after = canvas_hidden(mine), canvas_hidden(mine, tokens_BS=others)
    close(after[row, canvas], before[row, canvas], EXACT)


@pytest.mark.quick
@pytest.mark.parametrize("row,canvas", [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0)])
def test_a_canvas_never_sees_another_canvas(mine, row, canvas):
    batch = packed_batch()
    noisy = tokens(*batch.canvas_BCL.shape, seed=77)
    noisy[row, canvas] = batch.canvas_BCL[row, canvas]
    before, after = canvas_hidden(mine), canvas_hidden(mine, canvas_BCL=noisy)
    close(after[row, canvas], before[row, canvas], EXACT)
    others = torch.ones(before.shape[:2], dtype=torch.bool)
    others[row, canvas] = False
    differs(after[others], before[others])


@pytest.mark.parametrize("row,canvas", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)])
def test_a_canvas_sees_all_of_its_document_before_it_and_all_of_itself(mine, row, canvas):
    batch = packed_batch()
    before = canvas_hidden(mine)[row, canvas]
    first, start = int(batch.doc_start_BC[row, canvas]), int(batch.start_BC[row, canvas])
    for column in {first, start - 1}:
        after = canvas_hidden(mine, tokens_BS=changed(batch.tokens_BS, row, slice(column, column + 1)))
        assert all(relative_error(after[row, canvas, j], before[j]) > 1e-6 for j in (0, L - 1))
    for j in (0, L - 1):
        noisy = batch.canvas_BCL.clone()
        noisy[row, canvas, j] = 3 + (noisy[row, canvas, j] + 5) % 370
        after = canvas_hidden(mine, canvas_BCL=noisy)[row, canvas]
        assert all(relative_error(after[i], before[i]) > 1e-6 for i in (0, L - 1))


@pytest.mark.parametrize("unseen", [1, 3, 10])
def test_a_sliding_layer_sees_window_minus_one_prefix_tokens_for_every_query(unseen):
    """Two layers: a sliding one, and a full one made blind to the prefix by dropping its attention."""
    mine = ours(oracle(tiny_config(**TWO_LAYERS)))
    mine.layers[1].attention.o_proj.weight.zero_()
    prompt, canvas = tokens(1, 40), tokens(1, L, seed=1)
    before = mine.denoise(canvas, mine.encode(prompt))
    oldest = 40 - 15
    hidden = mine.denoise(canvas, mine.encode(changed(prompt, 0, slice(oldest - unseen, oldest))))
    close(hidden, before, EXACT)
    hidden = mine.denoise(canvas, mine.encode(changed(prompt, 0, slice(oldest, oldest + 1))))
    assert all(relative_error(hidden[0, j], before[0, j]) > 1e-6 for j in range(L))


@pytest.mark.quick
def test_encode_is_causal(mine):
    prompt = tokens(1, 40)
    before = mine.encode(prompt).hidden
    after = mine.encode(changed(prompt, 0, slice(25, 26))).hidden
    close(after[:, :25], before[:, :25], EXACT)
    assert all(relative_error(after[0, i], before[0, i]) > 1e-6 for i in range(25, 40))


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
