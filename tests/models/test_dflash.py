"""Drafters: parity with the oracle, what a target shows, their files, and what of a config is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.errors import BlockdiffError, CheckpointError
from blockdiff.models.dflash import DFlashFamily
from blockdiff.models.dflash.family import ids_for
from blockdiff.models.drafted import Drafted
from blockdiff.models.pages import Pages
from tests.models.test_llama import oracle, ours
from tests.oracles import dflash as plain
from tests.support.closeness import require_close
from tests.support.drafters import drafted, drafter_for, drafter_values, hub_weights
from tests.support.families import CONFIGS, SMALL, small_model
from tests.support.oracle import our_config

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("without_gradients")]
EXACT = 1e-10
SHAPES = range(20)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(6, 90, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' target, from which every drafter here reads."""
    from transformers import Qwen3Config

    return oracle(Qwen3Config(**SMALL))


@pytest.mark.parametrize("number", SHAPES)
def test_hidden_states_keys_and_greedy_tokens_are_those_of_the_oracle(theirs, number):
    rng, target = random.Random(number), ours(theirs)
    drafter = drafter_for(target, drafter_values(target.config, rng), seed=number)
    model, weights, config = Drafted(target, drafter), hub_weights(drafter), drafter.config
    prompt, length = tokens(1, rng.randint(1, 24), seed=number), drafter.canvas_length
    prefix = model.encode(prompt)
    shown = theirs(prompt, output_hidden_states=True).hidden_states
    features = plain.features_of(shown, list(drafter.target_layers))
    context = plain.context_of(weights, config, features)
    for n, layer in enumerate(prefix.layers()[-config.num_hidden_layers :]):
        for found, truth in zip(layer, plain.keys_and_values(weights, config, n, context, 0), strict=True):
            require_close(found[0], truth[len(truth) - found.shape[1] :], EXACT) if found.shape[1] else None
    block = torch.tensor([[7, *[5] * (length - 1)]])
    truth = plain.block_hidden(weights, config, features, F.embedding(block[0], theirs.get_input_embeddings().weight))
    require_close(model.denoise(block, prefix)[0], truth, EXACT)


def test_blocks_over_pages_and_side_by_side_are_as_alone():
    """Chunks, padding, windows whose pages are given back, and the blocks of a row that training runs at once."""
    for number in range(6):
        model = drafted(small_model("qwen3"), random.Random(number))
        L, prompt = model.canvas_length, tokens(2, 30)
        pages = Pages(model, page_tokens=4, capacity=160)
        rows = [pages.open(), pages.open()]
        for chunk, counts in zip(prompt.split([19, 11], 1), ([19, 19], [11, 4]), strict=True):
            pages.encode(rows, chunk, counts)
        blocks = torch.cat([tokens(2, 1, seed=3), torch.full((2, L - 1), 5)], 1)
        found = pages.denoise(rows, blocks)
        alone = [
            model.denoise(blocks[n : n + 1], model.encode(prompt[n : n + 1, :end])) for n, end in ((0, 30), (1, 23))
        ]
        require_close(found, torch.cat(alone), EXACT)
        pages.check()
        starts = torch.tensor([[23, 9, 23]])
        nothing, lengths = torch.zeros_like(starts), torch.tensor([[L, L, 0]])
        spans = {
            name: (kind.denoise_spans(starts, nothing, lengths, L) if "drafter" in name else None)
            for name, kind in model.kinds.items()
        }
        positions = (starts[..., None] + torch.arange(L)).flatten(1)
        past = model.encode(prompt[1:]).layers()
        if any(kind.window is not None for kind in model.drafter.kinds.values()):
            continue  # a prefix holds no more than the last block sees
        hidden, _ = model(blocks[1:].repeat(1, 3), positions, spans, past, True)
        require_close(hidden[:, :L], alone[1], EXACT)
        require_close(hidden[:, L : 2 * L], model.denoise(blocks[1:], model.encode(prompt[1:, :9])), EXACT)
        assert not hidden[:, 2 * L :].isnan().any()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_target_shows_what_is_asked_of_it_and_nothing_else_changes(name):
    model, prompt, outputs = small_model(name), tokens(2, 9), []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2][0])) for layer in model.layers]
    spans = {kind: each.encode_spans(torch.zeros_like(prompt)) for kind, each in model.kinds.items()}
    given = prompt, torch.arange(9).expand(2, 9), spans
    alone, kv = model(*given)
    ids = (0, len(model.layers) - 2, 0)
    both, again = model(*given, shown=ids)
    assert torch.equal(both, torch.cat([alone, *(outputs[n] for n in ids)], -1))
    assert all(torch.equal(x, y) for a, b in zip(kv, again, strict=True) for x, y in zip(a, b, strict=True))
    for hook in hooks:
        hook.remove()
    if model.vocab_size == 96 and model.config.predicts_next_tokens:  # and the drafter of each reads it
        Drafted(model, drafter_for(model, drafter_values(model.config))).encode(prompt)


def test_files_are_those_of_the_released_drafters_and_come_back(tmp_path):
    target = small_model("qwen3")
    for place in ("inside", "outside"):
        values = drafter_values(target.config, block_size=4)
        if place == "inside":
            values["dflash_config"]["block_size"] = values.pop("block_size")
        drafter = drafter_for(target, values)
        blockdiff.save(drafter, tmp_path / place)
        with safe_open(tmp_path / place / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert names == hub_weights(drafter).keys() and not any("embed" in name or "head" in name for name in names)
        assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= names
        written = json.loads((tmp_path / place / "config.json").read_text())
        assert written["model_type"] == "qwen3" and written["architectures"] == ["DFlashDraftModel"]
        assert written["dflash_config"] == values["dflash_config"] and written.get("block_size") == values.get(
            "block_size"
        )
        again = blockdiff.load(tmp_path / place, device="cpu", kernels="torch")
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in drafter.state_dict().items())
        assert again.canvas_length == drafter.canvas_length == 4
    with pytest.raises(BlockdiffError, match="vocabulary"):
        again.unembed(torch.zeros(1, 32))


def test_the_layers_read_by_default_are_those_of_the_reference():
    config = config_from(
        drafter_values(CONFIGS["qwen3"]())
        | {"num_target_layers": 36, "num_hidden_layers": 5}
        | {"layer_types": None, "dflash_config": {"mask_token_id": 5}},
        "here",
    )
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    for depth in (2, 3, 5, 6, 9, 36):
        target = CONFIGS["qwen3"]()
        target.num_hidden_layers, target.layer_types = depth, None
        for layers in (1, 2, 5):
            config = DFlashFamily.for_target(our_config(target), layers, 8, 5, 1.0, None)
            assert len(config.target_layer_ids) <= layers and config.num_target_layers == depth


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 1}, "block_size .*1.* 2"),
        ({"mask_token_id": 96}, "mask_token_id .*96.*96"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"target_layer_ids": [2]}, r"target_layer_ids .*\[2\].*0.*1"),
        ({"target_layer_ids": []}, r"target_layer_ids .*\[\]"),
        ({"conv_kernel_size": 3}, "conv_kernel_size .*3"),
        ({"output_multiplier": 0.5}, r"output_multiplier .*0\.5"),
        ({"input_embedding_scale": 0}, "input_embedding_scale .*0"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"use_swa": True}, "dflash_config.use_swa is True"),
        ({"causal": True, "is_causal": False}, "is_causal False and causal True: give one"),
        ({"is_causal": 1}, "is_causal 1"),
    ],
)
def test_what_a_drafter_does_not_compute_is_refused(change, said):
    values = drafter_values(CONFIGS["qwen3"]())
    values.pop("block_size", None)
    values["dflash_config"] |= change
    with pytest.raises(CheckpointError, match=f"here: {said}"):
        config_from(values, "here")


@pytest.mark.parametrize("name", ["is_causal", "causal", "causal_head"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_block_is_causal_by_any_of_the_names_that_trainers_give_it(name, is_causal):
    values = drafter_values(CONFIGS["qwen3"]())
    values.pop("is_causal", None)
    values["dflash_config"] |= {name: is_causal, "sample_from_anchor": False, "use_swa": False, "draft_arch": "x"}
    config = config_from(values, "here")
    assert config.is_causal is is_causal and config.to_dict()["dflash_config"][name] is is_causal


@pytest.mark.parametrize("architecture", ["Qwen3DFlashDraftModel", "DFlash2DraftModel", "Eagle3LlamaForCausalLM"])
def test_a_drafter_of_another_kind_is_called_one(architecture):
    values = drafter_values(CONFIGS["qwen3"]()) | {"architectures": [architecture]}
    with pytest.raises(CheckpointError, match=f"here: '{architecture}' is a drafter .* DFlashDraftModel, "):
        config_from(values, "here")


def test_a_drafter_in_fp8_drafts(tmp_path):
    target = small_model("qwen3", dtype=torch.float32)
    drafter = drafter_for(target, drafter_values(target.config))
    blockdiff.save(drafter, tmp_path / "a")
    rounded = blockdiff.load(tmp_path / "a", device="cpu", kernels="torch", quantize="fp8")
    block, prompt = torch.tensor([[7, *[5] * (drafter.canvas_length - 1)]]), tokens(1, 9)
    found, truth = (
        Drafted(target, each).denoise(block, Drafted(target, each).encode(prompt)) for each in (rounded, drafter)
    )
    assert 1e-4 < float((found - truth).norm() / truth.norm()) < 0.2


def test_a_target_of_another_shape_is_refused():
    drafter = drafter_for(small_model("qwen3"), drafter_values(CONFIGS["qwen3"]()) | {"num_target_layers": 8})
    with pytest.raises(BlockdiffError, match=r"hidden size 32.*8 layers.*32.* 3"):
        Drafted(small_model("llama"), drafter)


def test_a_new_drafter_reads_each_layer_once_and_never_the_last():
    assert ids_for(36, 5) == [1, 9, 17, 25, 33]  # those of the released drafter of Qwen3-8B
    for depth in range(2, 12):
        for layers in range(1, 15):
            ids = ids_for(depth, layers)
            assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= depth - 2
