"""Pages of rows with images: what is encoded in parts and what is shared is what the whole row gives, in fp64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from blockdiff.images import PlacedImage, images_between, run_end
from blockdiff.models.image_features import ImageFeatures
from blockdiff.models.page_keys import identities
from blockdiff.models.pages import PagedRow, Pages
from tests.support.paged import close
from tests.support.pictures import Row, gemma_config, image_row, pair, picture

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model in fp64 whose window is shorter than its images, which see one another whole."""
    config = gemma_config(random.Random(1), sliding_window=3, use_bidirectional_attention="vision")
    return pair(config, 3, tmp_path_factory.mktemp("gemma"))[1]


def encoded(pages: Pages, row: Row, chunk: int = 5) -> tuple[PagedRow, int, torch.Tensor]:
    """A row in pages, how many of its tokens others had encoded, and the hidden states of the rest."""
    paged, hidden = pages.open(), []
    at = shared = pages.reuse(paged, identities(row.tokens, row.images))
    while at < len(row.tokens):
        end = run_end(row.images, min(at + chunk, len(row.tokens)))
        images = [images_between(row.images, at, end)]
        hidden.append(pages.encode([paged], torch.tensor([row.tokens[at:end]]), [end - at], images)[0])
        pages.accept(paged)
        at = end
    return paged, shared, torch.cat(hidden)


def test_rows_with_common_beginnings_share_pages_of_the_same_pictures_alone(model):
    draw, pages = random.Random(3), Pages(model, page_tokens=3, capacity=600)
    first = image_row(model.config, draw, parts=3)
    longer = Row([*first.tokens, *range(3, 20)], first.images)
    last = first.images[-1]
    other = picture(model.config, draw)
    while other.tokens != last.image.tokens:
        other = picture(model.config, draw)
    changed = Row(longer.tokens, [*first.images[:-1], PlacedImage(other, last.column)])
    short = Row(first.tokens[: last.end + (2 - last.end) % 3], first.images)  # its last full page ends in a run
    for row in (first, longer, changed, short):
        _, shared, hidden = encoded(pages, row)
        whole = model.encode(torch.tensor([row.tokens]), images=[row.images]).hidden[0]
        close(hidden, whole[shared:])
        assert run_end(row.images, shared) == shared
        assert (shared >= last.end) == (row is longer) and (shared > 0 or row is first)


def test_a_picture_is_seen_once_while_it_is_kept_and_the_weights_stay(model, monkeypatch):
    draw, calls, whole = random.Random(3), [], model.image_features
    monkeypatch.setattr(model, "image_features", lambda inputs: calls.append(len(inputs)) or whole(inputs))
    one, two, three = (picture(model.config, draw) for _ in range(3))
    pages = Pages(model, page_tokens=3, capacity=600)
    alone = [whole([each]) for each in (one, two)]
    for found, truth in zip(pages.images.of([one, two, one])[:2], alone, strict=True):
        close(found, truth)
    pages.images.of([replace(two), one])
    assert calls == [2]
    monkeypatch.setattr("blockdiff.models.image_features.MOST_TOKENS", one.tokens + three.tokens)
    pages.images.of([three])  # `two` was asked for before `one`
    pages.images.of([one, three])
    assert calls == [2, 1]
    pages.images.of([two])
    with torch.no_grad():
        model.norm.weight.add_(0)
    pages.follow_weights()
    pages.images.of([two])
    assert calls == [2, 1, 1, 1] and isinstance(pages.images, ImageFeatures)
