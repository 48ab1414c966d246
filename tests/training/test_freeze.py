"""Freezing by pattern, and the table of what trains."""

from __future__ import annotations

import pytest

from blockdiff.checkpoint import init
from blockdiff.errors import RunError
from blockdiff.training.freeze import count_parts, freeze
from tests.support.oracle import tiny_config

pytestmark = pytest.mark.quick


@pytest.fixture
def model():
    return init(tiny_config(), seed=0, device="cpu", kernels="torch")


def still(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_what_matches_a_pattern_stands_still_and_nothing_else(model):
    counts = freeze(model, ["vocabulary.*", "layers.[01].attention.*"])
    expected = {n for n, _ in model.named_parameters() if n.startswith(("layers.0.attention.", "layers.1.attention."))}
    assert still(model) == expected | {"vocabulary.table"}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert counts == {
        "vocabulary.*": sizes["vocabulary.table"],
        "layers.[01].attention.*": sum(sizes[name] for name in expected),
    }


def test_no_patterns_freeze_nothing(model):
    assert freeze(model, []) == {} and not still(model)


def test_a_pattern_that_matches_nothing_is_refused_naming_close_ones_and_freezes_nothing(model):
    with pytest.raises(RunError, match=r"'layers\.\*\.atention\.q_proj\.\*' .*attention"):
        freeze(model, ["vocabulary.*", "layers.*.atention.q_proj.*"])
    assert not still(model)


def test_letters_are_told_apart_as_in_names(model):
    with pytest.raises(RunError, match="no parameter"):
        freeze(model, ["Vocabulary.*"])


def test_freezing_everything_is_refused(model):
    with pytest.raises(RunError, match=r"^optim\.freeze: layers\.\*, \[!l\]\*"):
        freeze(model, ["layers.*", "[!l]*"])
    assert not still(model)


def test_what_stood_still_before_does_not_count_as_something_left_to_train(model):
    freeze(model, ["layers.*"])
    with pytest.raises(RunError, match="nothing to train"):
        freeze(model, ["[!l]*"])


def test_routers_stand_still_unless_they_train(model):
    freeze(model, ["norm.*"], trains_routers=False)
    assert still(model) == {"norm.weight"} | {name for name, _ in model.named_parameters() if ".router." in name}


def test_the_table_counts_every_parameter_once_and_shows_parts_that_train_by_half(model):
    freeze(model, ["layers.0.*", "norm.*"])
    rows = {row.part: row for row in count_parts(model)}
    assert sum(row.tensors for row in rows.values()) == len(list(model.parameters()))
    assert sum(row.trained + row.frozen for row in rows.values()) == sum(p.numel() for p in model.parameters())
    assert rows["experts"].frozen * 3 == rows["experts"].trained > 0
    assert rows["norms"].trained > rows["norms"].frozen > 64
    assert rows["embedding"].frozen == 0
