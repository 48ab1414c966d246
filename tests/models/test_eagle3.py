"""EAGLE3 heads: parity with the oracle in any calls, both layouts of their files, and what is refused."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.checkpoint.merging import export
from blockdiff.errors import BlockdiffError, CheckpointError
from blockdiff.models.drafted import Drafted, Drafter
from blockdiff.models.eagle3.family import Eagle3Family
from blockdiff.models.pages import Pages
from tests.models.test_llama import oracle, ours
from tests.oracles import eagle3 as plain
from tests.support.closeness import require_close
from tests.support.drafters import head_for, head_values, head_weights, write_head
from tests.support.families import CONFIGS, SMALL, small_model

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("without_gradients")]
EXACT = 1e-10


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(6, 90, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' target, from which every head here reads."""
    from transformers import Qwen3Config

    return oracle(Qwen3Config(**SMALL | {"num_hidden_layers": 4}))


@pytest.mark.parametrize("number", range(10))
def test_logits_and_drafted_tokens_are_those_of_the_oracle_in_whatever_calls(theirs, number):
    rng, target = random.Random(number), ours(theirs)
    values = head_values(target.config, rng)
    weights = head_weights(values, number, embeds=bool(number % 2))
    lends_head = not number % 2 and values["draft_vocab_size"] == target.vocab_size
    if lends_head:
        del weights["lm_head.weight"]
    model, table = head_for(target, values, weights), theirs.get_input_embeddings().weight
    if lends_head:
        weights["lm_head.weight"] = theirs.lm_head.weight
    head, config = model.drafter, model.drafter.config
    assert (
        isinstance(head, Drafter)
        and (head.head.table is None) == lends_head
        and (head.table is None) == (not number % 2)
    )
    prompt, length, count = tokens(2, 12, seed=number), rng.randint(1, 9), rng.randint(1, head.canvas_length - 1)
    pages = Pages(model, page_tokens=4, capacity=64)
    rows = [pages.open(), pages.open()]
    parts = rng.randint(0, length), rng.randint(0, 12)
    for ends in (parts, (length, 12)):  # in chunks that end within pages or with them, one of the rows perhaps alone
        firsts = [row.length for row in rows]
        added = [end - first for end, first in zip(ends, firsts, strict=True)]
        chunk = torch.zeros(2, max(1, *added), dtype=torch.int64)
        for n, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            chunk[n, : end - first] = prompt[n, first:end]
        pages.encode(rows, chunk, added)
    steps, anchors, seen = pages.step_buffers(2, head.canvas_length), tokens(2, seed=99), list[Tensor]()
    steps.load(rows)
    ids = config.layer_ids
    offset = int(config.model_type == "eagle3" and ids[0] == 1)
    whole = [model.encode(prompt[n : n + 1, :end]) for n, end in enumerate((length, 12))]

    def denoise(blocks: Tensor, outputs: Tensor | None = None) -> Tensor:
        seen.append(steps.denoise(blocks, outputs))
        of_rows = [None] * 2 if outputs is None else outputs.split(1)
        alone = [model.denoise(blocks[n : n + 1], whole[n], of_rows[n]) for n in range(2)]
        require_close(seen[-1], torch.cat(alone), EXACT)
        return seen[-1]

    found = head.draft(anchors, count, denoise)
    for n, end in enumerate((length, 12)):
        states = theirs(prompt[n : n + 1, :end], output_hidden_states=True).hidden_states
        shown = [states[each + offset][0] for each in ids]
        features = plain.features_of(weights, values, config.layer.rms_norm_eps, shown)
        of_row = [*prompt[n, :end].tolist(), int(anchors[n])]
        drafted, logits = plain.draft(weights, config.layer, values, table, features, of_row, count)
        assert found[n].tolist() == drafted
        for truth, hidden in zip(logits, seen, strict=True):
            require_close(F.linear(head.norm(hidden[n, -1]), weights["lm_head.weight"]), truth, EXACT)
    for row in rows:  # what is cut away leaves no trace
        pages.truncate(row, 1)
    pages.encode(rows, prompt[:, 1:], [length - 1, 11])
    steps.load(rows)
    require_close(steps.denoise(anchors[:, None]), seen[0], EXACT)


def test_a_head_in_bfloat16_keeps_the_numbers_of_its_tokens_and_its_config(tmp_path):
    values = head_values(CONFIGS["qwen3"](), random.Random(3), draft_vocab_size=48)
    weights = {
        name: x.bfloat16() if x.dim() and x.is_floating_point() else x for name, x in head_weights(values).items()
    }
    head = blockdiff.load(write_head(tmp_path, values, weights), device="cpu", kernels="torch")
    assert head.dtype == torch.bfloat16 and head.d2t.dtype == torch.int64 and torch.equal(head.d2t, weights["d2t"])
    assert head.config.values == values and head.table is not None
    for write in (partial(blockdiff.save, head), partial(export, tmp_path)):
        with pytest.raises(CheckpointError, match="not written"):
            write(tmp_path / "out")
    with pytest.raises(BlockdiffError, match="vocabulary"):
        head.unembed(torch.zeros(1, 32))


def test_a_head_in_fp8_drafts(tmp_path):
    target, values = small_model("qwen3", dtype=torch.float32), head_values(CONFIGS["qwen3"]())
    weights = {name: x.float() if x.is_floating_point() else x for name, x in head_weights(values).items()}
    of = partial(blockdiff.load, write_head(tmp_path, values, weights), device="cpu", kernels="torch")
    block, prompt = torch.tensor([[7]]), tokens(1, 9)
    both = (Drafted(target, of(quantize=how)) for how in ("fp8", None))
    found, truth = (model.denoise(block, model.encode(prompt)) for model in both)
    assert 1e-4 < float((found - truth).norm() / truth.norm()) < 0.2


def test_the_layers_that_are_read_are_those_of_the_layout():
    of = partial(head_values, CONFIGS["qwen3"]())
    flat, nested = (
        next(v for n in range(20) if ("transformer_layer_config" in (v := of(random.Random(n)))) is is_nested)
        for is_nested in (False, True)
    )

    def read(values: dict[str, Any], ids: list[int] | None, depth: int = 36) -> tuple[int, ...]:
        config = config_from(values | {"eagle_aux_hidden_state_layer_ids": ids}, "here")
        assert isinstance(config, Eagle3Family)
        return config.target_layers(depth)

    assert read(flat, None) == read(nested, None) == (1, 17, 32)
    assert read(flat, [2, 18, 33]) == read(nested, [2, 18, 33]) == read(flat, [1, 17, 32]) == (1, 17, 32)
    assert read(nested, [1, 17, 32]) == (0, 16, 31)
    listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}}
    assert read(flat | listed, None) == (1, 4, 6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers .*2"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc.*fc_norm"),
        ({"draft_vocab_size": 97}, "draft_vocab_size .*97.*96"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"eagle_aux_hidden_state_layer_ids .*\[0, 1\]"),
        ({"attention_bias": True}, "attention_bias .*True"),
        (
            {"transformer_layer_config": {"model_type": "qwen3_5"}, "speculators_model_type": "eagle3"},
            "'qwen3_5'",
        ),
        ({"speculators_model_type": "peagle"}, "model_type .*'speculators_peagle'"),
    ],
)
def test_what_a_head_does_not_compute_is_refused(change, said):
    values = head_values(CONFIGS["qwen3"](), random.Random(1)) | change
    if "transformer_layer_config" in values and change.keys() & {"num_hidden_layers", "attention_bias"}:
        values["transformer_layer_config"] |= change
    with pytest.raises(CheckpointError, match=f"here: .*{said}"):
        config_from(values, "here")


def test_a_target_of_another_shape_is_refused():
    values = head_values(CONFIGS["qwen3"](), eagle_aux_hidden_state_layer_ids=[2, 2, 9])
    with pytest.raises(BlockdiffError, match="layers 1, 1, 8"):
        head_for(small_model("llama"), values, head_weights(values))
    values |= {"eagle_aux_hidden_state_layer_ids": [2, 2, 2], "draft_vocab_size": 48}
    with pytest.raises(BlockdiffError, match=r"d2t.*96"):
        head_for(small_model("llama"), values, head_weights(values) | {"d2t": torch.full((48,), 49)})
    values |= {"target_hidden_size": 64, "norm_before_fc": False, "fc_norm": False}
    weights = head_weights(values) | {"fc.weight": torch.zeros(32, 192, dtype=torch.float64)}
    with pytest.raises(BlockdiffError, match=r"hidden size 64.*32"):
        head_for(small_model("llama"), values, weights)
