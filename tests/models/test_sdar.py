"""SDAR against what its own code gave (`tests/data/families/sdar`): passes, gradients, greedy answers, files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import blockdiff
from blockdiff.canvas import Canvas, CleanRow, joined, lay_out
from blockdiff.checkpoint import export, read_config
from blockdiff.checkpoint.config import config_from
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation, default_generation
from blockdiff.diffusion.schedule import Linear
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.errors import CheckpointError
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.sdar import SDAR
from blockdiff.objective import Objective
from blockdiff.sampling import Recorder, Request, Sampler
from blockdiff.sampling.strategies import adjusted, as_strategy
from tests.support.closeness import require_close

pytestmark = pytest.mark.quick
EXACT = 1e-12
GOLDEN = Path(__file__).parents[1] / "data/families/sdar"
CONFIGS: dict[str, Any] = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in ("dense", "moe")}
PROMPT, L = {"dense": 10, "moe": 6}, 4


def loaded(name: str, dtype: str = "float64", kernels: str = "torch") -> Any:
    return blockdiff.load(GOLDEN / name, dtype=dtype, device="cpu", kernels=kernels)


@pytest.fixture(scope="module", params=CONFIGS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def truth(name) -> dict[str, Tensor]:
    return load_file(GOLDEN / name / "outputs_fp64.safetensors")


@pytest.fixture(scope="module")
def model(name) -> SDAR:
    return loaded(name)


def hub_gradients(model: BlockDiffusionModel) -> dict[str, Tensor]:
    """The gradients by the names of the files, where each expert's matrices are alone."""
    found, names = {}, model.config.names
    for ours, p in model.named_parameters():
        assert p.grad is not None, ours
        hub = str(names.to_hub(ours))
        pieces = names.pieces_of(hub)
        for n, piece in enumerate(pieces):
            for expert, grad in enumerate(p.grad):
                found[piece.replace("[]", str(expert))] = grad.chunk(len(pieces))[n]
        if not pieces:
            found[hub] = p.grad
    return found


@torch.no_grad()
def test_hidden_states_and_logits_of_a_clean_row_are_those_of_its_own_code(model, truth):
    hidden = model.encode(truth["tokens"]).hidden
    require_close(hidden, truth["encode_hidden"], EXACT)
    require_close(model.vocabulary.logits(hidden), truth["encode_logits"], EXACT)


@torch.no_grad()
def test_a_row_in_chunks_padded_or_packed_is_as_alone(model, truth):
    tokens, expected = truth["tokens"], truth["encode_hidden"]
    S, prefix, parts = tokens.shape[1], None, []
    for chunk in tokens.split([4, S - 12, 8], 1):
        prefix = model.encode(chunk, prefix=prefix)
        parts.append(prefix.hidden)
    require_close(torch.cat(parts, 1), expected, EXACT)
    padded = model.encode(torch.cat([tokens, tokens.flip(1)]), torch.tensor([S - 4, S]))
    require_close(padded.hidden[:1, : S - 4], expected[:, : S - 4], EXACT)
    batch = lay_out([joined([CleanRow(tokens[0, :13].tolist(), []), CleanRow(tokens[0].tolist(), [])])], L, 0)
    spans = {"full": model.kinds["full"].encode_spans(batch.doc_start_BS)}
    packed, _ = model(batch.tokens_BS, batch.positions_BS, spans)
    require_close(packed[:, 13 : 13 + S], expected, EXACT)


@torch.no_grad()
def test_logits_of_a_block_over_the_blocks_before_it_are_those_of_its_own_code(model, truth):
    tokens, starts = truth["tokens"], [int(key.rpartition("_")[2]) for key in truth if key.startswith("denoise_")]
    assert 0 in starts and len(starts) >= 3
    for start in starts:
        block = torch.where(truth["holes"].bool(), model.config.mask, tokens[:, start : start + L])
        hidden = model.denoise(block, model.encode(tokens[:, :start])) if start else model.encode(block).hidden
        require_close(model.vocabulary.logits(hidden), truth[f"denoise_logits_{start}"], EXACT)


def test_the_loss_and_every_gradient_of_a_row_of_blocks_are_those_of_its_own_code(name, truth):
    model, tokens, is_masked = loaded(name), truth["tokens"], truth["is_masked"].bool()
    prefix, noisy = model.encode(tokens), torch.where(is_masked, CONFIGS[name]["mask_token_id"], tokens)
    start = torch.arange(0, tokens.shape[1], L)[None]
    spans = {"full": model.kinds["full"].denoise_spans(start, torch.zeros_like(start), torch.full_like(start, L), L)}
    positions = torch.arange(tokens.shape[1])[None]
    hidden, _ = model(noisy, positions, spans, prefix.layers(), True)
    losses = model.vocabulary.cross_entropy(hidden[is_masked], tokens[is_masked])
    loss = (losses / truth["p_mask"][is_masked]).sum() / (tokens.shape[1] - PROMPT[name])
    require_close(loss, truth["train_loss"], EXACT)
    loss.backward()
    found = hub_gradients(model)
    require_close(torch.stack([found[each].norm() for each in sorted(found)]), truth["train_gradient_norms"], EXACT)
    named = {key.removeprefix("train_gradient."): x for key, x in truth.items() if key.startswith("train_gradient.")}
    assert len(named) == 3
    for each, gradient in named.items():
        require_close(found[each], gradient, EXACT)


@dataclass(frozen=True)
class Marks:
    """Corrupts the given places of the canvases of one document, with masks, and no place of others."""

    is_masked_S: Tensor
    mask_id: int

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        _, sample_BC, index_BC = address_BC3.unbind(-1)
        is_masked_BCL = self.is_masked_S.view(-1, L)[index_BC] & (sample_BC == 1)[..., None]
        return torch.where(is_masked_BCL, self.mask_id, canvas_BCL), is_masked_BCL


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_objective_has_the_loss_and_gradient_norms_of_its_own_code(name, truth, sweep, packed):
    """All tokens have p = 0.5: t is 0.5, and `elbo` weighs a masked token by 1 / t."""
    model, tokens, prompt = loaded(name).train(), truth["tokens"][0].tolist(), PROMPT[name]
    first = prompt // L
    pinned = {first: range(prompt - first * L)}
    canvases = [
        Canvas(tokens[n * L : n * L + L], n * L, t=0.5, address=(0, 1, n), pinned=pinned.get(n, ()))
        for n in range(first, len(tokens) // L)
    ]
    row = CleanRow(tokens, canvases, sample_id=1)
    other = CleanRow(tokens[:15], [Canvas(tokens[8:12], 8, t=0.5, address=(0, 2, 1))], sample_id=2)
    batch = lay_out([joined([other, row])] if packed else [row, other], L, pad_id=5)
    marks, options = Marks(truth["is_masked"][0].bool(), CONFIGS[name]["mask_token_id"]), {"sweep": sweep}
    objective = Objective(model, Linear(), marks, weight=ElboWeight(), positions="corrupted", **options)
    loss = objective(batch)["canvas"] / (len(tokens) - prompt)
    require_close(loss, truth["train_loss"], EXACT)
    assert objective.canvas_count(batch) == len(tokens) - prompt + L  # of the other document, too
    loss.backward()
    found = hub_gradients(model)
    require_close(torch.stack([found[each].norm() for each in sorted(found)]), truth["train_gradient_norms"], EXACT)


# -- greedy answers ----------------------------------------------------------------------------------------------

LOOPS: dict[str, dict[str, tuple[str, int]]] = {  # strategies, and steps of a block
    "dense": {
        "dynamic": ("confident:threshold=0.5", L),
        "static": ("quota", L),
        "static2": ("quota", L // 2),
        "sequential": ("sequential", L),
    },
    "moe": {"dynamic": ("confident:threshold=0.4", L), "static": ("quota", L)},
}


def answered(model: SDAR, text: str, steps: int, row: list[int], prompt: int, eos_ids: tuple[int, ...] = ()) -> Any:
    """The answer to the prompt of a row, as long as the row, with the records of its steps."""
    generation = Generation(max_steps=steps, max_new_tokens=len(row) - prompt, eos_ids=eos_ids)
    strategy = as_strategy(f"{text}{',' if ':' in text else ':'}confidence=0,greedy=true", generation)
    recorder = Recorder()
    sampler = Sampler(model, None, generation, DiffusionSettings.of_family(model.config), strategy=strategy)
    [result] = sampler.generate([Request(0, tokens=row[:prompt])], on_step=recorder.step)
    return result, recorder.traces[0].steps


@pytest.mark.parametrize(("of", "loop"), [(of, loop) for of, loops in LOOPS.items() for loop in loops])
def test_greedy_answers_are_those_of_its_own_loop_token_for_token_and_place_for_place(of, loop):
    truth, prompt = load_file(GOLDEN / of / "outputs_fp64.safetensors"), PROMPT[of]
    row, (text, steps) = truth[f"{loop}_tokens"][0].tolist(), LOOPS[of][loop]
    result, records = answered(loaded(of), text, steps, row, prompt)
    assert result.tokens == row[prompt:]
    filled, tail = [], prompt % L
    for record in records:
        first = tail if record.canvas == 0 else 0  # a record has what is behind the prompt's tail
        seen = [place for place, token in enumerate(record.tokens) if token == CONFIGS[of]["mask_token_id"]]
        filled.append([place + first for place in seen if record.is_accepted[place]])
    theirs = [[place for place in places if place >= 0] for places in truth[f"{loop}_filled"].tolist()]
    assert filled == theirs
    starts = [prompt // L * L + record.canvas * L for record in records]
    assert starts == truth[f"{loop}_start"].tolist()
    # theirs run the prompt, and each block once more; ours leave out the last block's
    assert result.forwards.total + 1 == int(truth[f"{loop}_calls"])


def test_an_answer_ends_with_the_token_that_ends_it():
    truth = load_file(GOLDEN / "dense/outputs_fp64.safetensors")
    row, eos = truth["dynamic_tokens"][0].tolist(), int(truth["ends_eos"])
    result, _ = answered(loaded("dense"), "confident:threshold=0.5", L, row, 10, (eos,))
    theirs = truth["ends_tokens"][0].tolist()[10:]
    assert result.tokens == theirs[: theirs.index(eos) + 1] and result.finish_reason == "eos"
    assert result.forwards.total < int(truth["ends_calls"])


def test_the_one_likeliest_token_is_certain_so_that_a_block_takes_one_step():
    """The way in which greedy answers are asked of its own code: with top_k 1 every confidence is 1."""
    truth, model = load_file(GOLDEN / "dense/outputs_fp64.safetensors"), loaded("dense")
    row, settings = truth["topk1_tokens"][0].tolist(), Generation(max_steps=L, max_new_tokens=26)
    sampler = Sampler(model, None, settings, strategy="confident:threshold=0.5,confidence=0,top_k=1")
    [result] = sampler.generate([Request(0, tokens=row[:10])])
    assert result.tokens == row[10:] and set(result.steps) == {1}
    assert result.forwards.total + 1 == int(truth["topk1_calls"])


def test_blocks_of_more_places_than_steps_by_default_have_a_step_for_each():
    for block, steps in ((4, 48), (64, 64)):
        config = config_from(CONFIGS["dense"] | {"block_size": block}, "here")
        assert default_generation(config).max_steps == steps
        assert Generation.from_pretrained(GOLDEN / "dense", config).max_steps == steps


def test_without_settings_a_checkpoint_is_sampled_by_its_own_rule(model):
    sampler = Sampler(model)
    text = "confident:threshold=0.85,confidence=0,t_min=1,t_max=1"
    assert sampler.strategy == as_strategy(text, sampler.generation)
    assert sampler.settings.diffusion.mask_id == model.config.mask and sampler.settings.canvas_length == L
    assert adjusted(sampler.strategy, 0.0) == as_strategy(f"{text},greedy=true", sampler.generation)


# -- layers beside transformers' ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("experts", [False, True])
def test_layers_and_gradients_are_those_of_transformers_on_random_configs(experts, seed):
    """transformers' models are causal: with blocks of one token ours are, too."""
    draw = torch.Generator().manual_seed(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    keys = one_of(1, 2)
    sizes = dict(
        vocab_size=one_of(40, 61), hidden_size=one_of(16, 24, 40), intermediate_size=one_of(20, 48),
        num_hidden_layers=one_of(1, 2, 3), num_key_value_heads=keys, num_attention_heads=keys * one_of(1, 2, 3),
        head_dim=one_of(8, 16), max_position_embeddings=64, rms_norm_eps=one_of(1e-6, 1e-3),
        rope_parameters={"rope_type": "default", "rope_theta": one_of(1e4, 1e6)},
        tie_word_embeddings=one_of(True, False),
    )  # fmt: skip
    count = one_of(3, 6)
    of_experts = dict(
        num_experts=count, num_experts_per_tok=one_of(2, count), moe_intermediate_size=one_of(6, 12),
        norm_topk_prob=True,
    )  # fmt: skip
    config: Any = Qwen3MoeConfig(**sizes, **of_experts) if experts else Qwen3Config(**sizes)
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the one in fp64
    theirs = AutoModelForCausalLM.from_config(config).to(torch.float64).train()
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            p.copy_(torch.rand(p.shape) * 0.8 + 0.6 if "norm" in key else torch.randn(p.shape) * 0.4)
    named = "sdar_moe" if experts else one_of("sdar", "a2d-qwen3")
    ours = config_from(config.to_dict() | {"model_type": named, "block_size": 1, "mask_token_id": 3}, "here")
    model = ours.model_class(ours, kernels="torch").to(torch.float64)
    state = theirs.state_dict()
    model.load_state_dict({key: state[ours.names.to_hub(key)] for key in model.state_dict()})
    tokens = torch.randint(0, sizes["vocab_size"], (2, 11), generator=draw)
    logits, expected = model.vocabulary.logits(model.encode(tokens).hidden), theirs(tokens).logits
    require_close(logits, expected, 1e-8)
    for each in (logits, expected):
        each.square().sum().backward()
    for key, p in model.named_parameters():
        truth = dict(theirs.named_parameters())[ours.names.to_hub(key)]
        require_close(p.grad, truth.grad, 1e-8)


# -- files -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_read_and_written_is_equal_in_tensors_and_in_config(name, tmp_path):
    blockdiff.save(loaded(name, "auto"), tmp_path / "again")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", GOLDEN / name))
    assert again.keys() == before.keys()
    for key, x in before.items():
        assert x.dtype == again[key].dtype and torch.equal(x, again[key]), key
    assert json.loads((tmp_path / "again/config.json").read_text()) == CONFIGS[name]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no block": ("dense", {"block_size": None}, "no block_size"),
    "two blocks": ("dense", {"canvas_length": 8}, "block_size is 4, and canvas_length 8"),
    "block": ("dense", {"block_size": "4"}, "block_size is '4'"),
    "no mask": ("dense", {"mask_token_id": None}, "no mask_token_id"),
    "mask": ("dense", {"mask_token_id": 128}, "mask_token_id is 128"),
    "causal": ("dense", {"prefix": "causal"}, "prefix is 'causal'"),
    "bias": ("dense", {"attention_bias": True}, "attention_bias is True"),
    "weights": ("moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    "steps": ("moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "dense layers": ("moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
    "experts": ("moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, of 6"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_is_not_computed_is_refused_by_the_name_of_its_field(case):
    of, changes, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=f"here: .*{message}"):
        config_from(CONFIGS[of] | changes, "here")


def test_an_early_config_has_the_released_mask_and_gets_its_block():
    early = {key: value for key, value in CONFIGS["dense"].items() if key not in ("block_size", "mask_token_id")}
    config = config_from(early | {"vocab_size": 151936, "pad_token_id": 151643, "canvas_length": 4}, "here")
    assert (config.mask, config.canvas_length, config.fill, config.answer_length) == (151669, 4, 151643, 512)
    assert config.denoises and config.prefix == "blocks" and not config.predicts_next_tokens
    opdlm = config_from({**early, "vocab_size": 151936, "block_size": 4, "model_type": "a2d-qwen3"}, "here")
    assert (opdlm.mask, opdlm.architecture) == (151669, "A2DQwen3LMHeadModel")


def test_the_length_of_blocks_that_an_early_config_leaves_out_is_given_beside_it_or_when_it_is_exported(tmp_path):
    early = tmp_path / "early"
    shutil.copytree(GOLDEN / "dense", early)
    (early / "config.json").write_text(json.dumps(CONFIGS["dense"] | {"block_size": None}))
    with pytest.raises(CheckpointError, match=r"export MODEL --canvas-length 4.*blockdiff\.json"):
        blockdiff.load(early)
    export(early, tmp_path / "whole", canvas_length=L)
    assert json.loads((tmp_path / "whole" / "config.json").read_text()) == CONFIGS["dense"]
    (early / "blockdiff.json").write_text(json.dumps({"canvas_length": L}))
    ours, whole = blockdiff.load(early), blockdiff.load(tmp_path / "whole")
    assert ours.config == whole.config and ours.canvas_length == L
    assert all(torch.equal(x, whole.state_dict()[key]) for key, x in ours.state_dict().items())
    settings = DiffusionSettings.from_pretrained(early, ours.config)
    assert (settings.mask_id, settings.corruption) == (ours.config.mask, "mask")
    with pytest.raises(CheckpointError, match="block_size is 4; leave canvas_length"):
        read_config(tmp_path / "whole", canvas_length=8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="canvas_length"):
        read_config(tmp_path, canvas_length=8)
