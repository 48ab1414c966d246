"""Prefixes of unequal lengths, in chunks, committed to and selected from, against transformers and against one call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.models.prefix import Prefix
from tests.support.backbone import (
    EXACT,
    PAD,
    PARITY,
    L,
    close,
    tokens,
    transformers_run,
)
from tests.support.closeness import relative_error

pytestmark = pytest.mark.usefixtures("without_gradients")

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


@pytest.mark.parametrize("lengths", [[19, 11], [18, -1], [18], [[18, 11]]], ids=str)
def test_lengths_that_the_rows_do_not_have_are_refused(mine, lengths):
    with pytest.raises(BlockdiffError, match=r"^encode: lengths have"):
        mine.encode(tokens(2, 18), torch.tensor(lengths))
    with pytest.raises(BlockdiffError, match=r"^encode: lengths have"):
        mine.encode(tokens(2, 18), torch.tensor(lengths), mine.encode(tokens(2, 3)))
    assert mine.encode(tokens(2, 18), torch.tensor([18, 0])).hidden.isfinite().all()


def test_a_canvas_longer_than_the_model_s_is_refused(mine):
    prefix = mine.encode(tokens(2, 5))
    with pytest.raises(BlockdiffError, match=f"a canvas of {L + 1} tokens.* {L} at most"):
        mine.denoise(tokens(2, L + 1), prefix)


def test_a_prefix_that_was_consumed_says_so_in_one_line(mine):
    prefix = mine.encode(tokens(2, 5))
    mine.encode(tokens(2, L, seed=1), prefix=prefix)
    for use in (
        lambda: mine.denoise(tokens(2, L), prefix),
        lambda: mine.encode(tokens(2, L), prefix=prefix),
        lambda: prefix.select(torch.tensor([0])),
    ):
        with pytest.raises(BlockdiffError, match="encode") as error:
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
