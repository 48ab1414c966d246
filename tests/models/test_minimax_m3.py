"""MiniMax M3 against transformers: hidden states, logits, gradients, files; and NeMo's rules where it is silent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLRMSNorm,
)

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.errors import CheckpointError
from blockdiff.kernels.block_sparse.torch import seen_keys, select_blocks
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.objective import Objective
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.closeness import require_close
from tests.support.families import m3_config, m3_text_config, small_model

pytestmark = pytest.mark.quick
PARITY = 1e-8
CASES: dict[str, Any] = {
    "sparse": {},
    "dense": {"topk": 99},
    "another limit": {"swiglu_limit": 0.5, "swiglu_alpha": 1.1},
    "tied": {"tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def without_gradients(request) -> Iterator[None]:
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def oracle(config: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' model with norms away from 0, routers with wide margins and biases that matter."""
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"  # eager takes the softmax in fp32
    model = MiniMaxM3SparseForConditionalGeneration(config).to(dtype).eval()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if "vision" in name or "projector" in name or not x.is_floating_point():
                continue
            if x.dim() == 1:
                x.copy_(torch.rand(x.shape) * 0.6 - 0.3)
            else:
                wide = 1.0 if "gate.weight" in name or "indexer" in name else 0.3 if "embed" in name else 0.15
                x.copy_(torch.randn(x.shape) * wide)
    model.set_experts_implementation("eager")
    for module in model.modules():
        if isinstance(module, MiniMaxM3VLRMSNorm):  # as our norm has it: fp32's rsqrt rounds another way
            module._norm = lambda x, eps=module.eps: x * (x.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> tuple[Any, BlockDiffusionModel]:
    text = dict(CASES[request.param])
    model = oracle(m3_config(**text))
    directory = tmp_path_factory.mktemp("m3")
    model.save_pretrained(directory)
    return model, blockdiff.load(directory, dtype="float64", device="cpu", kernels="torch")


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, truth: Tensor, tolerance: float = PARITY) -> None:
    require_close(found, truth, tolerance)


def theirs(model: Any, prompt: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=prompt, output_hidden_states=True)
    return out.hidden_states[-1], out.logits


def test_hidden_states_and_logits_are_those_of_transformers(pair):
    model, mine = pair
    prompt = tokens(2, 37)
    hidden, logits = theirs(model, prompt)
    found = mine.encode(prompt).hidden
    close(found, hidden)
    close(mine.unembed(found), logits, 1e-6)


def test_padded_rows_and_chunks_are_those_of_transformers(pair):
    model, mine = pair
    rows, lengths = tokens(3, 37), (37, 9, 22)
    prefix, parts = None, []
    for lo, hi in ((0, 5), (5, 20), (20, 37)):
        prefix = mine.encode(rows[:, lo:hi], torch.tensor([min(max(n - lo, 0), hi - lo) for n in lengths]), prefix)
        parts.append(prefix.hidden)
    for row, length in enumerate(lengths):
        found = torch.cat(parts, 1)[row : row + 1, :length]
        close(found, theirs(model, rows[row : row + 1, :length])[0])


def test_every_gradient_is_that_of_transformers(pair):
    model, mine = pair
    prompt = tokens(2, 37)
    hidden, logits = theirs(model, prompt)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), prompt[:, 1:].flatten()).backward()
    hidden = mine.encode(prompt).hidden
    mine.vocabulary.cross_entropy(hidden[:, :-1].flatten(0, 1), prompt[:, 1:].flatten()).mean().backward()
    grads = {re.sub(r"^model\.language_model\.", "", name): p.grad for name, p in model.named_parameters()}
    for name, p in mine.named_parameters():
        if ".indexer." in name:
            assert p.grad is None and grads[name.replace("attention", "self_attn")] is None
            continue
        close(p.grad, gradient_of(name, grads), 1e-6)
    model.zero_grad()
    mine.zero_grad()


def gradient_of(name: str, grads: dict[str, Tensor]) -> Tensor:
    """transformers' gradient of one of our parameters; it has gate and up as one matrix."""
    name = {"vocabulary.table": "embed_tokens.weight", "vocabulary.head": "lm_head.weight"}.get(name, name)
    name = name.replace("attention.", "self_attn.").replace("input_norm", "input_layernorm")
    name = name.replace("post_attention_norm", "post_attention_layernorm").replace(".shared.", ".mlp.shared_experts.")
    name = name.replace(".router.proj.", ".mlp.gate.").replace(".experts.", ".mlp.experts.")
    for which, half in (("gate_proj", 0), ("up_proj", 1)):
        if f".{which}.weight" in name:
            return grads[name.replace(which, "gate_up_proj")].chunk(2)[half]
    return grads[name]


def test_transformers_as_it_is_differs_by_the_rounding_of_its_norms(pair):
    model, mine = pair
    prompt, norms = tokens(2, 37), {}
    for module in model.modules():
        norms[module] = module.__dict__.pop("_norm", None)
    close(mine.encode(prompt).hidden, theirs(model, prompt)[0], 1e-6)
    for module, norm in norms.items():
        if norm is not None:
            module._norm = norm


def test_enough_blocks_are_dense_attention():
    prompt = tokens(2, 37)
    close(*(small(topk).encode(prompt).hidden for topk in (10, 99)), 1e-12)
    apart = (small(2).encode(prompt).hidden - small(99).encode(prompt).hidden).norm()
    assert float(apart) > 1e-3


def small(topk: int) -> BlockDiffusionModel:
    model = small_model("minimax_m3")
    for layer in model.layers:
        layer.attention.selection = replace(layer.attention.selection, topk=topk)
    return model


def test_greedy_decoding_is_that_of_transformers(pair):
    model, mine = pair
    sampler = Sampler(mine, generation=Generation(max_new_tokens=12, eos_ids=(2,), pad_id=0))
    for prompt in (tokens(5), tokens(26, seed=1)):
        (found,) = sampler.generate([Request("a", tokens=prompt.tolist())])
        truth = model.generate(prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert found.tokens == truth[0, len(prompt) :].tolist()


# -- files -----------------------------------------------------------------------------------------------------


def test_files_go_from_transformers_to_us_and_back(tmp_path):
    model = oracle(m3_config(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "hub")
    mine = blockdiff.load(tmp_path / "hub", dtype="auto", device="cpu", kernels="torch")
    blockdiff.save(mine, tmp_path / "ours")
    hub, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "ours"))
    assert hub.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in hub.items())
    _, said = MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values())


def test_a_text_only_model_goes_from_transformers_to_us_and_back_and_computes_the_same(tmp_path):
    torch.manual_seed(0)
    config = m3_config().text_config
    config._attn_implementation = "sdpa"
    model = MiniMaxM3VLForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    mine = blockdiff.load(tmp_path / "theirs", dtype="auto", device="cpu", kernels="torch")
    blockdiff.save(mine, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in theirs.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")]
    assert configs[0] == configs[1]
    _, said = MiniMaxM3VLForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values())
    prompt = tokens(2, 37)
    close(mine.unembed(mine.encode(prompt).hidden), model(input_ids=prompt).logits, 1e-5)


def test_a_text_only_model_in_fp8_is_read_as_it_was_written(tmp_path):
    blockdiff.save(blockdiff.init(m3_text_config(), seed=1), tmp_path / "m")
    rounded = blockdiff.load(tmp_path / "m", dtype="float32", device="cpu", kernels="torch", quantize="fp8")
    blockdiff.save(rounded, tmp_path / "rounded")
    again = blockdiff.load(tmp_path / "rounded", dtype="float32", device="cpu", kernels="torch").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in rounded.state_dict().items())


def test_a_text_only_model_is_refused_by_the_name_of_its_own_field(tmp_path):
    with pytest.raises(CheckpointError, match=r"here: num_experts_per_tok .*5.* 4"):
        config_from(m3_config().text_config.to_dict() | {"num_experts_per_tok": 5}, "here")


def test_fresh_weights_have_everything_that_transformers_wants(tmp_path):
    blockdiff.save(blockdiff.init(m3_config(), seed=1), tmp_path / "m")
    _, said = MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(said.values())


def test_mxfp8_is_read_tensor_by_tensor(tmp_path):
    """e4m3 values with a power of two for each 32 along the input; the expected numbers are made one by one."""
    blockdiff.save(blockdiff.init(m3_config(), seed=1, dtype="bfloat16"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors, truth = load_file(file), {}
    for name in list(tensors):
        if re.search(r"layers.*(q_proj|w1|w2|w3|gate_proj)\.weight$", name) and "vision" not in name:
            out, columns = tensors[name].shape
            values = torch.randn(out, columns, generator=torch.Generator().manual_seed(len(truth)))
            scale = torch.randint(120, 131, (out, -(-columns // 32)), dtype=torch.uint8)
            stored = values.to(torch.float8_e4m3fn)
            powers = [[2.0 ** (int(scale[i, j // 32]) - 127) for j in range(columns)] for i in range(out)]
            truth[name] = stored.float() * torch.tensor(powers)
            tensors |= {name: stored, name + "_scale_inv": scale}
    save_file(tensors, file)
    mine = blockdiff.load(tmp_path / "m", dtype="float32", device="cpu", kernels="torch")
    state = mine.state_dict()
    experts = "language_model.model.layers.1.block_sparse_moe.experts"
    assert torch.equal(state["layers.1.experts.gate_up_proj"][3, :24], truth[f"{experts}.3.w1.weight"])
    assert torch.equal(state["layers.1.experts.gate_up_proj"][3, 24:], truth[f"{experts}.3.w3.weight"])
    assert torch.equal(state["layers.2.experts.down_proj"][0], truth[experts.replace("1", "2") + ".0.w2.weight"])
    q = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(state["layers.0.attention.q_proj.weight"], truth[q])
    tensors[q + "_scale_inv"] = tensors[q + "_scale_inv"][:-1]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="MXFP8"):
        blockdiff.load(tmp_path / "m")


def test_a_missing_expert_is_named(tmp_path):
    blockdiff.save(blockdiff.init(m3_config(), seed=1), tmp_path / "m")
    tensors = load_file(file := tmp_path / "m" / "model.safetensors")
    del tensors["language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="matrix 1 of expert 2"):
        blockdiff.load(tmp_path / "m")
    tensors["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight .*\[3\]"):
        blockdiff.load(tmp_path / "m")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "values in the index": (
        {"sparse_attention_config": {"sparse_disable_index_value": [1, 0, 1]}},
        "index path carries values are refused",
    ),
    "another router": ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "other norms": ({"qk_norm_type": "per_layer"}, "qk_norm_type is 'per_layer'"),
    "experts": ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4"),
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_parameters is .*'x'"),
    "a gate": ({"attention_output_gate": True}, "attention_output_gate is True"),
    "score": ({"index_score_type": "mean"}, "index_score_type is 'mean'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_computed_is_refused_by_the_name_of_its_field(name):
    changes, message = REFUSED[name]
    values = m3_config().to_dict()
    values["text_config"] |= changes
    with pytest.raises(CheckpointError, match=message):
        config_from(values, "here")


# -- as a denoiser -----------------------------------------------------------------------------------------------


def test_a_canvas_selects_in_its_prefix_and_sees_all_of_itself():
    """With as many blocks as the prefix has, that is what dense layers do; fewer change something."""
    sparse, dense = small_model("minimax_m3 denoising"), small_model("minimax_m3 dense, denoising")
    canvas = tokens(2, 8, seed=1)
    short, long = tokens(2, 8), tokens(2, 36)
    close(*(model.denoise(canvas, model.encode(short)) for model in (sparse, dense)), 1e-12)
    prefixes = [model.encode(long) for model in (sparse, dense)]
    apart = sparse.denoise(canvas, prefixes[1]) - dense.denoise(canvas, prefixes[1])
    assert float(apart.norm()) > 1e-3
    page = Pages(sparse, page_tokens=8, capacity=160)
    rows = [page.open(), page.open()]
    page.encode(rows, long, [36, 36])
    close(page.denoise(rows, canvas), sparse.denoise(canvas, prefixes[0]), 1e-7)


def test_one_sweep_has_the_losses_and_gradients_of_several():
    from blockdiff.canvas import Canvas, CleanRow, lay_out
    from blockdiff.diffusion.corruption import UniformCorruption
    from blockdiff.diffusion.schedule import Linear

    model = small_model("minimax_m3 denoising")
    row = CleanRow(tokens(30).tolist(), [Canvas(tokens(8, seed=n).tolist(), 9 + 7 * n, coin=n == 1) for n in range(2)])
    found = []
    for one_sweep in (False, True):
        model.zero_grad()
        losses = Objective(model, Linear(), UniformCorruption(96), sweep=one_sweep)(lay_out([row], 8, 0))
        (losses["canvas"] + losses["ar"]).backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | losses)
    for name, x in found[0].items():
        assert (x is None) == (found[1][name] is None)
        if x is not None and float(x.detach().norm()) > 1e-3:  # of smaller ones rounding to fp32 is a larger part
            close(found[1][name], x, 1e-6)


# -- NeMo's selection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["max", "lse"])
@pytest.mark.parametrize("init, local", [(0, 1), (1, 1), (0, 0)])
def test_blocks_are_selected_as_nemo_does(score, init, local):
    """NeMo's rules, written out: forced blocks lie in the budget, then the best scores."""
    B, T, H, D, block, topk = 2, 23, 2, 8, 4, 3
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, T, H, D, generator=generator), torch.randn(B, T, 1, D, generator=generator)
    visible = torch.arange(1, T + 1).expand(B, T)
    ids = select_blocks(q, k.squeeze(2), visible, block=block, topk=topk, init=init, local=local, score=score)
    is_seen = seen_keys(ids, visible, None, block, T)
    for b in range(B):
        for head in range(H):
            for t in range(T):
                scores = (k[b, : t + 1, 0] @ q[b, t, head]) * D**-0.5
                of_block = [scores[lo : lo + block] for lo in range(0, t + 1, block)]
                values = [float(s.max() if score == "max" else s.logsumexp(0)) for s in of_block]
                forced = [n for n in range(len(values)) if n < init or (local and n == t // block)]
                rest = sorted((n for n in range(len(values)) if n not in forced), key=lambda n: -values[n])
                kept = {*(forced + rest)[:topk]}
                assert is_seen[b, t, head].tolist() == [s <= t and s // block in kept for s in range(T)]
