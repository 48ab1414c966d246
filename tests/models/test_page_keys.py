"""Pages of rows with pictures: the same identities are the same pictures, and none is shared up to half of one."""

from __future__ import annotations

import pytest

from blockdiff.images import ImageInput, PlacedImage
from blockdiff.models.page_keys import identities, is_in_run

pytestmark = pytest.mark.quick
ONE, OTHER = ImageInput({}, 3, b"one"), ImageInput({}, 3, b"other")


def placed(*parts: list[int] | ImageInput) -> tuple[list[int], list[PlacedImage]]:
    """The tokens of a row of texts and pictures, and where its pictures stand."""
    tokens, images = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, ImageInput):
            images.append(PlacedImage(part, len(tokens)))
        tokens += [92] * part.tokens if isinstance(part, ImageInput) else part
    return tokens, images


def keys(*parts: list[int] | ImageInput) -> list[int]:
    return identities(*placed(*parts))


def test_a_placeholder_is_known_by_the_pictures_of_its_whole_run_and_its_place():
    assert keys([5, 6], []) == [5, 6] and keys([5], ONE, [6]) == keys([5], ONE, [6])
    first, second = keys([5], ONE, ONE, [6]), keys([5], ONE, OTHER, [6])
    assert first[0] == 5 and first[-1] == 6 and all(key < 0 for key in first[1:-1]) and len(set(first)) == 8
    assert not set(first[1:-1]) & set(second[1:-1])  # its first picture sees the second one
    assert keys([5], ONE, [6], OTHER)[:5] == keys([5], ONE, [6], ONE)[:5]  # these two are apart
    assert keys([5], [92] * 3) == [5, 92, 92, 92]  # a placeholder without a picture is a token


def test_images_are_taken_in_the_order_of_their_columns():
    tokens, images = placed(ONE, OTHER)
    assert identities(tokens, images) == identities(tokens, images[::-1])
    assert identities(tokens, images) != identities(tokens, [PlacedImage(OTHER, 0), PlacedImage(ONE, 3)])


def test_a_beginning_must_not_end_within_a_run():
    found = keys([5], ONE, OTHER, [6, 7])
    assert [is_in_run(found, column) for column in range(1, len(found))] == [False] + [True] * 5 + [False] * 2
