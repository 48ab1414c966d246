"""LLaDA2.x against what its own code gave (`tests/data/families/llada2`): passes, losses, gradients, files."""

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

import blockdiff
from blockdiff.canvas import Canvas, CleanRow, joined, lay_out
from blockdiff.checkpoint.config import config_from
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import SigmoidRouter
from blockdiff.models.llada2 import LLaDA2
from blockdiff.objective import Objective
from tests.support.closeness import require_close

pytestmark = pytest.mark.quick
EXACT = 1e-12
GOLDEN = Path(__file__).parents[1] / "data/families/llada2/mini"
CONFIG: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text())
MASK, L = 120, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The golden checkpoint with the length of its blocks and its mask, which its own code had as arguments."""
    directory = tmp_path_factory.mktemp("llada2")
    shutil.copy(GOLDEN / "model.safetensors", directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"canvas_length": L, "mask_token_id": MASK}))
    return directory


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    return load_file(GOLDEN / "outputs_fp64.safetensors")


def loaded(checkpoint: Path, dtype: str = "float64") -> Any:
    return blockdiff.load(checkpoint, dtype=dtype, device="cpu", kernels="torch")


@pytest.fixture(scope="module")
def model(checkpoint) -> LLaDA2:
    return loaded(checkpoint)


def hub_gradients(model: LLaDA2) -> dict[str, Tensor]:
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
def test_hidden_states_logits_and_experts_of_a_clean_row_are_those_of_its_own_code(model, truth):
    chosen: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    hooks = [each.register_forward_hook(lambda _, __, out: chosen.append(out[0].sort(-1).values)) for each in routers]
    hidden = model.encode(truth["tokens"]).hidden
    for hook in hooks:
        hook.remove()
    require_close(hidden, truth["encode_hidden"], EXACT)
    require_close(hidden @ model.vocabulary.head.T, truth["encode_logits"], EXACT)
    assert torch.equal(torch.stack(chosen), truth["encode_experts"])


@torch.no_grad()
def test_a_row_in_chunks_padded_or_packed_is_as_alone(model, truth):
    tokens, expected = truth["tokens"], truth["encode_hidden"]
    prefix, parts = None, []
    for chunk in tokens.split([8, 16, 8], 1):
        prefix = model.encode(chunk, prefix=prefix)
        parts.append(prefix.hidden)
    require_close(torch.cat(parts, 1), expected, EXACT)
    padded = model.encode(torch.cat([tokens, tokens.flip(1)]), torch.tensor([24, 32]))
    require_close(padded.hidden[:1, :24], expected[:, :24], EXACT)
    batch = lay_out([joined([CleanRow(tokens[0, :13].tolist(), []), CleanRow(tokens[0].tolist(), [])])], L, 0)
    spans = {"full": model.kinds["full"].encode_spans(batch.doc_start_BS)}
    packed, _ = model(batch.tokens_BS, batch.positions_BS, spans)
    require_close(packed[:, 13:45], expected, EXACT)


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 8, 24])
def test_logits_of_a_block_over_the_blocks_before_it_are_those_of_its_own_code(model, truth, start):
    tokens = truth["tokens"]
    block = torch.where(truth["holes"].bool(), MASK, tokens[:, start : start + L])
    if start:
        hidden = model.denoise(block, model.encode(tokens[:, :start]))
    else:  # it is alone
        hidden = model.encode(block).hidden
    require_close(hidden @ model.vocabulary.head.T, truth[f"denoise_logits_{start}"], EXACT)


def test_the_loss_and_every_gradient_of_a_row_of_blocks_are_those_of_its_own_code(checkpoint, truth):
    model, tokens, is_masked = loaded(checkpoint), truth["tokens"], truth["is_masked"].bool()
    prefix = model.encode(tokens)
    noisy = torch.where(is_masked, MASK, tokens)
    start = torch.arange(0, tokens.shape[1], L)[None]
    nothing, whole = torch.zeros_like(start), torch.full_like(start, L)
    spans = {"full": model.kinds["full"].denoise_spans(start, nothing, whole, L)}
    positions = torch.arange(tokens.shape[1])[None]
    hidden, _ = model(noisy, positions, spans, prefix.layers(), True)
    require_close(hidden @ model.vocabulary.head.T, truth["train_noisy_logits"], EXACT)
    loss = model.vocabulary.cross_entropy(hidden[is_masked], tokens[is_masked]).mean()
    require_close(loss, truth["train_loss"], EXACT)
    loss.backward()
    found = hub_gradients(model)
    norms = torch.stack([found[name].norm() for name in sorted(found)])
    require_close(norms, truth["train_gradient_norms"], EXACT)
    named = {name.removeprefix("train_gradient."): x for name, x in truth.items() if name.startswith("train_gradient.")}
    assert len(named) == 3
    for name, gradient in named.items():
        require_close(found[name], gradient, EXACT)


@dataclass(frozen=True)
class Marks:
    """Corrupts the given places of the canvases of one document, with masks, and no place of others."""

    is_masked_S: Tensor

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        is_masked_CL = self.is_masked_S.view(-1, L)
        _, sample_BC, index_BC = address_BC3.unbind(-1)
        is_masked_BCL = is_masked_CL[index_BC] & (sample_BC == 1)[..., None]
        return torch.where(is_masked_BCL, MASK, canvas_BCL), is_masked_BCL


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_objective_has_the_loss_and_gradient_norms_of_its_own_code(checkpoint, truth, sweep, packed):
    model, tokens = loaded(checkpoint).train(), truth["tokens"][0].tolist()
    pinned = {1: range(5)}  # the prompt has 13 tokens
    canvases = [
        Canvas(tokens[n * L : n * L + L], n * L, address=(0, 1, n), pinned=pinned.get(n, ())) for n in range(1, 4)
    ]
    row = CleanRow(tokens, canvases, sample_id=1)
    other = CleanRow(tokens[:19], [Canvas(tokens[8:16], 8, address=(0, 2, 1))], sample_id=2)
    batch = lay_out([joined([other, row])] if packed else [row, other], L, pad_id=5)
    marks = Marks(truth["is_masked"][0].bool())
    objective = Objective(model, Linear(), marks, positions="corrupted", divisor="corrupted", sweep=sweep)
    loss = objective(batch)["canvas"] / objective.canvas_count(batch)
    require_close(loss, truth["train_loss"], EXACT)
    loss.backward()
    found = hub_gradients(model)
    norms = torch.stack([found[name].norm() for name in sorted(found)])
    require_close(norms, truth["train_gradient_norms"], EXACT)


def test_kernels_of_the_cpu_have_the_numbers_of_torch(checkpoint, truth):
    tokens, found = truth["tokens"], []
    for kernels in ("torch", "auto"):
        model = blockdiff.load(checkpoint, dtype="float32", device="cpu", kernels=kernels)
        hidden = model.encode(tokens).hidden
        hidden.square().sum().backward()
        found.append([hidden, model.layers[1].attention.qkv_proj.weight.grad])
    for one, other in zip(*found, strict=True):
        require_close(one, other, 1e-5)


# -- files -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_read_and_written_is_equal_in_tensors_and_in_config(checkpoint, tmp_path):
    blockdiff.save(loaded(checkpoint, "auto"), tmp_path / "again")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", GOLDEN))
    assert again.keys() == before.keys()
    for name, x in before.items():
        assert x.dtype == again[name].dtype and torch.equal(x, again[name]), name
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads(
        (checkpoint / "config.json").read_text()
    )


def test_the_bias_by_which_experts_are_chosen_keeps_fp32_in_a_model_of_fewer_bits(checkpoint, tmp_path):
    name, whole = "layers.1.router.bias", torch.linspace(-1, 1, 8) / 3  # digits that bf16 has not
    model = loaded(checkpoint, "float32")
    model.layers[1].router.bias.copy_(whole)
    blockdiff.save(model, tmp_path / "cast", dtype="bfloat16")
    written = load_file(tmp_path / "cast/model.safetensors")
    assert torch.equal(written["model.layers.1.mlp.gate.expert_bias"], whole)
    assert written["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
    for narrow in (loaded(tmp_path / "cast", "auto"), model.to(torch.bfloat16)):
        assert narrow.dtype is torch.bfloat16 and torch.equal(narrow.state_dict()[name], whole)
        assert narrow.double().state_dict()[name].dtype is torch.float64


def test_a_router_of_few_bits_computes_its_scores_in_fp32():
    router = SigmoidRouter(16, 8, 2, 2.5, groups=4, top_groups=2, is_wide=True)
    torch.nn.init.normal_(router.proj.weight)
    router.to(torch.bfloat16)
    x = torch.randn(9, 16).bfloat16()
    index, weight = SigmoidRouter.forward(router, x)
    wide = SigmoidRouter(16, 8, 2, 2.5, groups=4, top_groups=2)
    wide.proj.weight.data = router.proj.weight.float()
    for found, expected in zip((index, weight), wide(x.float()), strict=True):
        assert torch.equal(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x)[1], weight) and not torch.equal(wide(x.float())[1], weight)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"image_token_offset": 157184}, "image_token_offset is of LLaDA2.0-Uni"),
    "bias": ({"use_bias": True}, "use_bias is True"),
    "qkv bias": ({"use_qkv_bias": True}, "use_qkv_bias is True"),
    "softmax": ({"score_function": "softmax"}, "score_function is 'softmax'"),
    "no expert bias": ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is False"),
    "router": ({"router_dtype": "bf16"}, "router_dtype is 'bf16'"),
    "weights": ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    "scaling": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "groups": ({"n_group": 3}, "n_group is 3"),
    "kept": ({"topk_group": 5}, "topk_group 5"),
    "experts": ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4"),
    "turned": ({"rotary_dim": 4}, "rotary_dim is 4"),
    "dense": ({"first_k_dense_replace": 9}, "first_k_dense_replace is 9"),
    "windows": ({"use_sliding_window": True}, "use_sliding_window is True"),
    "mask": ({"mask_token_id": 128}, "mask_token_id is 128"),
    "canvas": ({"canvas_length": -1}, "canvas_length is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_computed_is_refused_by_the_name_of_its_field(name):
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=f"here: .*{message}"):
        config_from(CONFIG | changes, "here")


@pytest.mark.parametrize("name", ["use_bias", "rope_theta", "n_group", "routed_scaling_factor"])
def test_a_field_that_the_released_class_has_another_default_of_must_be_there(name):
    with pytest.raises(CheckpointError, match=f"no {name}"):
        config_from({key: value for key, value in CONFIG.items() if key != name}, "here")


def test_a_released_config_has_the_released_mask_and_blocks_and_ends_with_its_pad():
    config = config_from(CONFIG | {"vocab_size": 157184, "pad_token_id": 156892}, "here")
    assert (config.mask, config.canvas_length, config.eos_token_id, config.fill) == (156895, 32, 156892, 156892)
    assert config.denoises and config.turned == 8 and config.answer_length == 512
    assert config.trained_with | {"corruption": "mask", "coin": 0.0, "ar_loss": "none"} == config.trained_with
