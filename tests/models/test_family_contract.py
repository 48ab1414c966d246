"""The contract of the families: one suite for all models, written against `models/family.py` and `models/model.py`."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

import blockdiff
from blockdiff.canvas import Canvas, CleanRow, joined, lay_out
from blockdiff.checkpoint.added import added_to
from blockdiff.errors import BlockdiffError, CheckpointError
from blockdiff.models.family import families
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.pages import Pages
from tests.support.closeness import require_close
from tests.support.families import CONFIGS, small_model
from tests.support.oracle import our_config

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("without_gradients")]
CLOSE = 1e-6  # final norms round to fp32, whatever the weights are
DENOISING = [name for name, config in CONFIGS.items() if our_config(config()).denoises]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request) -> BlockDiffusionModel:
    return small_model(request.param)


@pytest.fixture(scope="module", params=DENOISING)
def denoiser(request) -> BlockDiffusionModel:
    return small_model(request.param)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def whole(model: BlockDiffusionModel, count: int) -> int:
    """At most `count` tokens, behind which a canvas or more clean tokens can follow."""
    return count // (model.config.block or 1) * (model.config.block or 1)


def close(found: Tensor, truth: Tensor, tolerance: float = CLOSE) -> None:
    require_close(found, truth, tolerance)


def test_every_family_has_a_model_here():
    drafters = {"dflash", "eagle3", "speculators_eagle3"}  # which are nothing without a target
    assert {our_config(config()).model_type for config in CONFIGS.values()} == families().keys() - drafters


# -- names, parts, files ---------------------------------------------------------------------------------------


def test_every_tensor_has_a_part_and_a_name_on_the_hub_or_in_the_file_beside(model):
    family, added = model.config, added_to(model)
    for name in model.state_dict():
        assert family.part_of(name) != "other", name
        hub = family.names.to_hub(name)
        assert (hub is None) == (name in added), name
        assert hub is None or family.names.ours_among(hub, model.state_dict()) == name
    assert not added or model.denoises


def test_sharding_units_are_modules_inner_ones_first_and_cover_the_model(model):
    units = model.config.units(model)
    assert units[-1] is model and len({id(unit) for unit in units}) == len(units) > len(model.layers)
    seen: set[nn.Module] = set()
    for unit in units:
        assert unit not in seen, "a unit inside one that came before"
        seen |= set(unit.modules())


def test_the_config_is_that_of_the_model(model):
    config = model.config
    assert (config.vocab_size, config.canvas_length) == (model.vocab_size, model.canvas_length)
    assert config.denoises == model.denoises and (model.denoises or model.canvas_length == 1)
    kv = model.encode(tokens(1, 5)).layers()
    held = [x for kind, layer in zip(model.layer_kinds, kv, strict=True) for x in layer if model.kinds[kind]]
    assert config.cached_per_token == sum(x[0, 0].numel() for x in held)
    bigger = config.with_tokens(128, {"eos_token_id": 5})
    assert bigger.vocab_size == 128 and bigger.eos_token_id == 5


def test_a_saved_model_loads_as_it_was(model, tmp_path):
    blockdiff.save(model, tmp_path / "a")
    again = blockdiff.load(tmp_path / "a", dtype="float64", device="cpu", kernels="torch")
    assert (again.denoises, again.canvas_length) == (model.denoises, model.canvas_length)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("older", [False, True])
def test_config_json_is_written_as_it_was_read_with_the_keys_that_nothing_reads(model, older, tmp_path):
    blockdiff.save(model, tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    values = json.loads(file.read_text()) | {"auto_map": {"AutoModel": "modeling.Model"}, "a note": [1, {"b": None}]}
    if older:  # as transformers wrote it before version 5
        values["torch_dtype"] = values.pop("dtype")
    for name in ("use_cache", "transformers_version"):
        values.pop(name, None)
    file.write_text(json.dumps(values))
    blockdiff.save(blockdiff.load(tmp_path / "a", device="cpu", kernels="torch"), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == values


def test_what_the_file_beside_has_is_missed_where_it_is_gone(denoiser, tmp_path):
    if not added_to(denoiser):
        return  # all of this family's tensors have a name on the Hub
    blockdiff.save(denoiser, tmp_path / "a")
    (tmp_path / "a" / "blockdiff.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"blockdiff\.safetensors.*init --from"):
        blockdiff.load(tmp_path / "a")


# -- encoding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [(1, 29), (17, 13), (7, 7, 7, 9)])
def test_any_split_of_a_prompt_gives_the_same(model, split):
    prompt = tokens(2, 30)
    at_once, prefix, parts = model.encode(prompt), None, []
    ends = [whole(model, end) for end in accumulate(split[:-1])]
    for chunk in prompt.tensor_split(ends, 1):
        if chunk.shape[1]:
            prefix = model.encode(chunk, prefix=prefix)
            parts.append(prefix.hidden)
    close(torch.cat(parts, 1), at_once.hidden)
    for one, other in zip(prefix.layers(), at_once.layers(), strict=True):
        for x, y in zip(one, other, strict=True):
            close(x, y)


def test_padding_does_not_change_a_row(model):
    lengths = (30, 1, 17)
    rows = tokens(3, 30)
    prefix = model.encode(rows, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        close(prefix.hidden[row : row + 1, :length], model.encode(rows[row : row + 1, :length]).hidden)


def packed(model: BlockDiffusionModel, documents: list[Tensor]) -> Tensor:
    rows = [CleanRow(each.tolist(), []) for each in documents]
    batch = lay_out([joined(rows)], model.canvas_length, 0)
    spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in model.kinds.items()}
    return model(batch.tokens_BS, batch.positions_BS, spans)[0]


def test_packed_documents_do_not_see_each_other(model):
    documents = [tokens(13), tokens(9, seed=1), tokens(21, seed=2)]
    hidden = packed(model, documents)[0].split([len(each) for each in documents])
    for each, found in zip(documents, hidden, strict=True):
        close(found, model.encode(each[None]).hidden[0])


def test_later_tokens_change_nothing_before_them(model):
    prompt, same = tokens(1, 30), whole(model, 20)
    other = torch.cat([prompt[:, :same], tokens(1, 30 - same, seed=5)], 1)
    close(model.encode(prompt).hidden[:, :same], model.encode(other).hidden[:, :same])


def test_pages_hold_what_a_prefix_holds(model):
    prompt, pages = tokens(2, 30), Pages(model, page_tokens=8, capacity=160)
    rows = [pages.open(), pages.open()]
    cut, short, long = (whole(model, count) for count in (19, 23, 30))
    first = pages.encode(rows, prompt[:, :cut], [cut, cut])
    second = pages.encode(rows, prompt[:, cut:long], [long - cut, short - cut])
    at_once = model.encode(prompt[:, :long]).hidden
    close(torch.cat([first[0], second[0]]), at_once[0])
    close(torch.cat([first[1], second[1, : short - cut]]), at_once[1, :short])
    if model.denoises:
        canvas = tokens(2, model.canvas_length, seed=3)
        found = pages.denoise(rows, canvas)
        close(found[:1], model.denoise(canvas[:1], model.encode(prompt[:1, :long])))
        close(found[1:], model.denoise(canvas[1:], model.encode(prompt[1:, :short])))
    pages.check()


def test_several_query_tokens_at_once_over_pages_are_as_one_at_a_time(model):
    """Decoding steps of any number of query tokens, in rows of other lengths, of which one ends with a page."""
    one, lengths = model.config.block or 1, [24, whole(model, 9), whole(model, 14)]
    prompts, more = tokens(3, 24), tokens(3, 6 * one, seed=1)
    found = []
    for steps in ((1, 1, 1, 1, 1, 1), (2, 3, 1), (6,)):
        pages = Pages(model, page_tokens=8, capacity=480)
        rows = [pages.open() for _ in lengths]
        pages.encode(rows, prompts, lengths)
        parts = more.split([one * count for count in steps], 1)
        hidden = [pages.encode(rows, some, [some.shape[1]] * 3) for some in parts]
        found.append(torch.cat([*hidden, pages.encode(rows, more[:, :one], [one] * 3)], 1))
        pages.check()
    close(found[1], found[0])
    close(found[2], found[0])
    alone = model.encode(torch.cat([prompts[1:2, : lengths[1]], more[1:2]], 1)).hidden[:, lengths[1] :]
    close(found[0][1:2, : 6 * one], alone)


def test_a_gradient_reaches_every_parameter(model):
    count = whole(model, 30)
    encoded = model.encode(tokens(2, count))
    loss = model.vocabulary.cross_entropy(encoded.hidden.flatten(0, 1), tokens(2 * count, seed=4)).sum()
    if model.denoises:
        L = model.canvas_length
        soft = model.vocabulary.soft_embedding(torch.randn(2, L, encoded.hidden.shape[2], dtype=torch.float64))
        hidden = model.denoise(tokens(2, L, seed=1), encoded, soft)
        loss = loss + model.vocabulary.cross_entropy(hidden.flatten(0, 1), tokens(2 * L, seed=2)).sum()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    unused = [name for name, grad in zip(named, grads, strict=True) if grad is None or not bool(grad.abs().sum() > 0)]
    of_part = {name: model.config.part_of(name) for name in named}
    assert {of_part[name] for name in unused} == {*model.config.selecting_parts} & {*of_part.values()}
    assert all(of_part[name] in model.config.selecting_parts for name in unused)


# -- denoising -------------------------------------------------------------------------------------------------


def test_a_causal_model_says_that_it_denoises_nothing():
    model = small_model("llama")
    with pytest.raises(BlockdiffError, match="causal"):
        model.denoise(tokens(1, 4), model.encode(tokens(1, 5)))


def test_a_canvas_sees_all_of_itself_and_changes_nothing_of_the_prefix(denoiser):
    prompt, L = tokens(1, whole(denoiser, 20)), denoiser.canvas_length
    prefix = denoiser.encode(prompt)
    before = [x.clone() for layer in prefix.layers() for x in layer]
    canvas = tokens(1, L, seed=1)
    changed = canvas.clone()
    changed[0, -1] = 3 if int(canvas[0, -1]) != 3 else 4
    a, b = denoiser.denoise(canvas, prefix), denoiser.denoise(changed, prefix)
    assert float((a - b)[0, 0].norm()) > 1e-4, "the first token does not see the last"
    assert all(torch.equal(x, y) for x, y in zip(before, [x for la in prefix.layers() for x in la], strict=True))
    positions, spans, _ = prefix.canvas(L, denoiser.rope)
    assert denoiser(canvas, positions, spans, prefix.layers(), True)[1] == []


def test_canvases_side_by_side_are_as_alone_in_packed_rows_too(denoiser):
    L, documents = denoiser.canvas_length, [tokens(20), tokens(15, seed=1)]
    starts = [[whole(denoiser, start) for start in of] for of in ([9, 17], [11])]
    noisy = [[tokens(L, seed=10 + n).tolist() for n in range(len(of))] for of in starts]
    rows = [
        CleanRow(document.tolist(), [Canvas(canvas, start) for canvas, start in zip(of, at, strict=True)])
        for document, of, at in zip(documents, noisy, starts, strict=True)
    ]
    batch = lay_out([joined(rows)], L, 0)
    spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in denoiser.kinds.items()}
    _, kv = denoiser(batch.tokens_BS, batch.positions_BS, spans)
    spans = {
        name: kind.denoise_spans(batch.start_BC, batch.doc_start_BC, batch.length_BC, L)
        for name, kind in denoiser.kinds.items()
    }
    positions = ((batch.start_BC - batch.doc_start_BC)[..., None] + torch.arange(L)).flatten(1)
    hidden, _ = denoiser(batch.canvas_BCL.flatten(1), positions, spans, kv, True)
    alone = [
        denoiser.denoise(torch.tensor([canvas]), denoiser.encode(document[None, :start]))
        for document, of, at in zip(documents, noisy, starts, strict=True)
        for canvas, start in zip(of, at, strict=True)
    ]
    close(hidden, torch.cat(alone, 1))


def test_clean_and_noisy_tokens_in_one_call_are_as_in_two(denoiser):
    L, prefix = denoiser.canvas_length, denoiser.encode(tokens(1, whole(denoiser, 12)))
    canvas, soft = tokens(1, L, seed=1), torch.randn(1, L, prefix.hidden.shape[2], dtype=torch.float64)
    positions, spans, _ = prefix.canvas(L, denoiser.rope)
    alone = denoiser(canvas, positions, spans, prefix.layers(), True, soft)[0]
    marks = torch.ones(1, L, dtype=torch.bool)
    together = denoiser(canvas, positions, spans, prefix.layers(), marks, soft)[0]
    close(together, alone)


def test_no_signal_is_a_signal_of_zeros(denoiser):
    L, prefix = denoiser.canvas_length, denoiser.encode(tokens(2, whole(denoiser, 12)))
    canvas, width = tokens(2, L, seed=1), prefix.hidden.shape[2]
    nothing = torch.zeros(2, L, width, dtype=torch.float64)
    close(denoiser.denoise(canvas, prefix, nothing), denoiser.denoise(canvas, prefix))
    signal = torch.randn(2, L, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = denoiser.denoise(canvas, prefix, signal) - denoiser.denoise(canvas, prefix)
    assert (float(changed.norm()) > 1e-4) == denoiser.config.has_self_conditioning


# -- what a family can do --------------------------------------------------------------------------------------


def test_what_a_family_cannot_do_is_refused_in_one_line(model):
    family = model.config
    for name in ("predictions", "corruptions", "meshes"):
        for choice in getattr(family, name):
            family.require(**{name: choice})
        with pytest.raises(CheckpointError, match=rf"{family.model_type} .*sideways \({name}: "):
            family.require(**{name: "sideways"})


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in DENOISING])
def test_a_converted_causal_model_encodes_as_before_to_the_bit(name, tmp_path):
    from blockdiff.checkpoint import convert

    causal = small_model(name, dtype=torch.float32)
    blockdiff.save(causal, tmp_path / "causal")
    model = convert(tmp_path / "causal", canvas_length=8, kernels="torch", device="cpu")
    assert model.denoises and model.canvas_length == 8
    prompt = tokens(2, 30)
    a, b = causal.encode(prompt), model.encode(prompt)
    assert torch.equal(a.hidden, b.hidden)
    # What is added changes nothing yet: a canvas of one token sees what the next clean token sees.
    signal = torch.randn(2, 1, a.hidden.shape[2])
    canvas = tokens(2, 1, seed=3)
    close(model.denoise(canvas, b, signal), causal.encode(canvas, prefix=a).hidden)
    blockdiff.save(model, tmp_path / "converted")
    again = blockdiff.load(tmp_path / "converted", dtype="float32", device="cpu", kernels="torch")
    assert torch.equal(model.denoise(canvas, b, signal), again.denoise(canvas, b, signal))
    with pytest.raises(CheckpointError, match="canvas_length 1000000000"):
        convert(tmp_path / "causal", canvas_length=10**9)
    with pytest.raises(CheckpointError, match="with canvases already"):
        convert(tmp_path / "converted")
