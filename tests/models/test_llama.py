"""Llama and Qwen3 against transformers: logits, every gradient, RoPE, files in and out, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.checkpoint.generation import Generation, default_generation
from blockdiff.errors import CheckpointError
from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.norm_rope.torch import turned
from blockdiff.layers.attention import Attention
from blockdiff.layers.rope import default_frequencies, llama3_frequencies, yarn_attention_factor, yarn_frequencies
from blockdiff.models.layer_kind import LayerKind
from blockdiff.models.llama import LlamaFamily
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling.prepare import sampling_settings
from blockdiff.sampling.strategies import as_strategy
from tests.support.closeness import require_close
from tests.support.families import LLAMA3, SLIDING, SMALL
from tests.support.oracle import our_config

pytestmark = pytest.mark.quick
PARITY = 1e-8

CASES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama3 RoPE": lambda: LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "linear RoPE": lambda: LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}
    ),
    "tied, gelu, another eps": lambda: LlamaConfig(
        **SMALL, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-2
    ),
    "one key head": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 1}),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen3 with a window": lambda: Qwen3Config(**SMALL, **SLIDING, tie_word_embeddings=True),
}


def oracle(config: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """transformers' model with norms away from 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.rand(p.shape) * 0.8 + 0.6 if "norm" in name else torch.randn(p.shape) * 0.2)
    return model


def ours(model: PreTrainedModel) -> BlockDiffusionModel:
    """Our model with the oracle's weights."""
    config, state = our_config(model.config), model.state_dict()
    mine = config.model_class(config, kernels="torch").to(model.dtype)
    mine.load_state_dict({name: state[config.names.to_hub(name)] for name in mine.state_dict()})
    return mine.eval()


@pytest.fixture(params=CASES)
def pair(request) -> tuple[PreTrainedModel, BlockDiffusionModel]:
    model = oracle(CASES[request.param]())
    return model, ours(model)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, truth: Tensor, tolerance: float = PARITY) -> None:
    require_close(found, truth, tolerance)


def test_hidden_states_logits_and_every_gradient_are_those_of_transformers(pair):
    model, mine = pair
    prompt = tokens(2, 40)
    truth = model(prompt, output_hidden_states=True)
    hidden = mine.encode(prompt).hidden
    close(hidden, truth.hidden_states[-1])
    close(mine.unembed(hidden), truth.logits)
    theirs = torch.nn.functional.cross_entropy(truth.logits[:, :-1].flatten(0, 1), prompt[:, 1:].flatten())
    loss = mine.vocabulary.cross_entropy(hidden[:, :-1].flatten(0, 1), prompt[:, 1:].flatten()).mean()
    close(loss, theirs)
    theirs.backward()
    loss.backward()
    names, grads = mine.config.names, dict(model.named_parameters())
    for name, p in mine.named_parameters():
        assert p.grad is not None
        close(p.grad, grads[names.to_hub(name)].grad)


@torch.no_grad()
def test_padded_rows_and_chunks_are_those_of_transformers(pair):
    model, mine = pair
    rows, lengths = tokens(3, 40), (40, 9, 23)
    prefix = mine.encode(rows[:, :20], torch.tensor([min(20, n) for n in lengths]))
    first = prefix.hidden
    prefix = mine.encode(rows[:, 20:], torch.tensor([max(0, n - 20) for n in lengths]), prefix)
    for row, length in enumerate(lengths):
        found = torch.cat([first, prefix.hidden], 1)[row : row + 1, :length]
        close(found, model(rows[row : row + 1, :length], output_hidden_states=True).hidden_states[-1])


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_precisions_are_close_to_transformers(dtype, tolerance):
    model = oracle(CASES["qwen3"](), dtype=dtype)
    prompt = tokens(2, 40)
    truth = model(prompt, output_hidden_states=True).hidden_states[-1]
    close(ours(model).encode(prompt).hidden, truth, tolerance)


def test_llama3_frequencies_are_those_of_transformers():
    scaling = {key: value for key, value in LLAMA3.items() if not key.startswith("rope")}
    scaling |= {"factor": 32.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    config = LlamaConfig(head_dim=128, rope_parameters=rope, max_position_embeddings=131072)
    truth, factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert factor == 1.0 and torch.equal(llama3_frequencies(128, 5e5, scaling), truth)
    assert (truth < llama3_frequencies(128, 5e5, {**scaling, "factor": 1.0})).any()


@pytest.mark.parametrize("factor", [0.25, 3.0, 16.0])
@pytest.mark.parametrize("more", [{}, {"beta_fast": 4.0, "beta_slow": 2.0}, {"truncate": False}])
def test_yarn_frequencies_are_those_of_transformers(factor, more):
    scaling = {"factor": factor, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0, **more}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **scaling}
    config = LlamaConfig(head_dim=64, rope_parameters=rope, max_position_embeddings=131072)
    truth, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.equal(yarn_frequencies(64, 1e4, scaling), truth)
    assert attention_factor == yarn_attention_factor(scaling) == 1.0
    assert (truth != default_frequencies(64, 1e4)).any()
    other = {**scaling, "mscale": 0.5}
    config = LlamaConfig(head_dim=64, rope_parameters=rope | other, max_position_embeddings=131072)
    assert ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1] == yarn_attention_factor(other)


def test_queries_at_far_positions_are_scaled_and_keys_are_not():
    torch.manual_seed(0)
    attention = Attention(8, 2, 1, 4, True, 1e-6, IN_TORCH, qk_norm=None, norms_values=False).double()
    kind = LayerKind("full", None, default_frequencies(4, 1e4), query_scale=(0.3, 5))
    column, x = torch.arange(12)[None], torch.randn(1, 12, 8, dtype=torch.float64)
    cos, sin, scale = kind.rope(column, torch.float64)
    truth = 1 + 0.3 * torch.log(1 + torch.floor(column.double() / 5))
    assert torch.equal(scale[..., 0], truth) and (truth[:, :5] == 1).all() and (truth[:, 5:] > 1.2).all()
    spans = kind.encode_spans(torch.zeros_like(column))
    got, kv = attention(x, (cos, sin, scale), spans, None)
    plain, plain_kv = attention(x, (cos, sin), spans, None)
    assert all(torch.equal(one, other) for one, other in zip(kv, plain_kv, strict=True))
    for n in range(12):  # one row at a time, by a factor of all scores
        attention.scale = float(truth[0, n])
        assert (attention(x, (cos, sin), spans, None)[0][0, n] - got[0, n]).abs().max() < 1e-14
    assert torch.equal(got[:, :5], plain[:, :5]) and not torch.equal(got[:, 5:], plain[:, 5:])


def test_rows_that_lie_one_after_the_other_turn_as_rows_of_a_batch():
    """Flat [1, tokens] and batched [B, T] layouts: RoPE goes by positions alone."""
    from blockdiff.kernels import IN_C, IN_TORCH

    model = ours(oracle(CASES["llama3 RoPE"](), dtype=torch.float32))
    positions, x = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]), torch.randn(2, 5, 4, 16)
    cos, sin = model.kinds["full"].rope(positions, torch.float32)
    flat = model.kinds["full"].rope(positions.view(1, -1), torch.float32)
    assert torch.equal(flat[0], cos.view(1, 10, -1)) and torch.equal(flat[1], sin.view(1, 10, -1))
    for turn in (IN_TORCH.norm_rope, IN_C.norm_rope):
        of_batch = turn(x, torch.ones(16), cos, sin, 1e-6)
        assert torch.equal(turn(x.view(1, 10, 4, 16), torch.ones(16), *flat, 1e-6), of_batch.reshape(1, 10, 4, 16))
    assert torch.equal(turned(x.view(1, 10, 4, 16), *flat), turned(x, cos, sin).view(1, 10, 4, 16))


@pytest.mark.parametrize("name", ["llama3 RoPE", "tied, gelu, another eps", "qwen3 with a window"])
def test_files_go_from_transformers_to_us_and_back(name, tmp_path):
    model = oracle(CASES[name](), dtype=torch.float32)
    model.save_pretrained(tmp_path / "hub")
    mine = blockdiff.load(tmp_path / "hub", dtype="auto", device="cpu", kernels="torch")
    assert mine.dtype == torch.float32 and not mine.denoises
    blockdiff.save(mine, tmp_path / "ours")
    assert not (tmp_path / "ours" / "blockdiff.safetensors").exists()
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again) is type(model) and not any(said.values())
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())


def test_a_tied_head_that_a_file_has_all_the_same_is_read_over(tmp_path):
    from safetensors.torch import load_file, save_file

    model = oracle(CASES["tied, gelu, another eps"](), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(file := tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert blockdiff.load(tmp_path, dtype="auto", kernels="torch").vocabulary.head is None


def test_soft_embeddings_of_a_head_of_its_own_are_means_of_embeddings_and_train_those_alone():
    vocabulary = ours(oracle(CASES["llama"]())).vocabulary
    hidden = torch.randn(7, 32, dtype=torch.float64)
    truth = vocabulary.logits(hidden).softmax(-1).double() @ vocabulary.table
    assert vocabulary.head is not None
    close(vocabulary.soft_embedding(hidden), truth, 1e-6)
    close(vocabulary.soft_embedding_of(vocabulary.logits(hidden)), truth, 1e-6)
    close(vocabulary.stats(hidden[None], 1.0, torch.zeros(1, 7)).soft_embedding[0], truth, 1e-6)
    weight = torch.randn_like(truth)
    (vocabulary.soft_embedding(hidden) * weight).sum().backward()
    assert vocabulary.head.grad is None
    close(vocabulary.table.grad, torch.autograd.grad((truth * weight).sum(), vocabulary.table)[0], 1e-6)


REFUSED = {
    "attention_bias": ({"attention_bias": True}, "attention_bias is True"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    "layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be .* at most 1000"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn' is not supported"),
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x'"),
    "no factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "Missing required keys .*'factor'"),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 is not supported",
    ),
    "canvas": ({"canvas_length": -3}, "canvas_length is -3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_computed_is_refused_by_the_name_of_its_field(name):
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"here: .*{message}"):
        config_from({"model_type": "llama", **SMALL, **changes}, "here")


def test_a_config_in_the_older_form_of_rope_is_read_and_written_as_it_was():
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    values = {"model_type": "llama", **SMALL, "rope_theta": 1e4, "rope_scaling": scaling}
    old = config_from(values, "here")
    assert old.rope_parameters == CASES["llama3 RoPE"]().rope_parameters
    assert old.to_dict() == values


class PlainFamily(LlamaFamily):
    """Llama, whose denoisers read nothing of their last prediction, and start from masks."""

    model_type = "plain"
    has_self_conditioning = False
    default_strategy = "confident"

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        return super().own_fields(theirs) | {"mask": theirs.mask_token_id}

    @property
    def answer_length(self) -> int:
        return 40


@torch.no_grad()
def test_a_family_says_whether_its_denoisers_read_their_last_prediction():
    config = PlainFamily.read(LlamaConfig(**SMALL, canvas_length=8, mask_token_id=5).to_dict())
    model = blockdiff.init(config, seed=1, device="cpu", kernels="torch")
    assert model.denoises and not any("self_conditioning" in name for name in model.state_dict())
    prefix, canvas, signal = model.encode(tokens(1, 9)), tokens(1, 8, seed=1), torch.randn(1, 8, 32)
    assert torch.equal(model.denoise(canvas, prefix, signal), model.denoise(canvas, prefix))


def test_a_family_says_by_what_noise_strategy_and_length_its_models_are_sampled_without_files():
    config = PlainFamily.read(LlamaConfig(**SMALL, canvas_length=8, mask_token_id=5).to_dict())
    settings = sampling_settings(blockdiff.init(config, device="cpu", kernels="torch"))
    assert (settings.diffusion.corruption, settings.diffusion.mask_id) == ("mask", 5)
    assert settings.strategy == as_strategy("confident", settings.generation) != as_strategy(None, settings.generation)
    assert default_generation(config).max_new_tokens == 40


def test_a_family_says_how_long_answers_are_where_generation_config_does_not(tmp_path):
    config = PlainFamily.read(LlamaConfig(**SMALL, canvas_length=8, mask_token_id=5).to_dict())
    assert Generation.from_pretrained(tmp_path, config).max_new_tokens == 40
    for said, expected in (({"eos_token_id": 3, "max_new_tokens": None}, 40), ({"max_new_tokens": 7}, 7)):
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
        assert Generation.from_pretrained(tmp_path, config).max_new_tokens == expected
