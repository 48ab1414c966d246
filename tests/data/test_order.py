"""Which examples a step takes: every order is a function of the step, and a mixture keeps its shares."""

from __future__ import annotations

from collections import Counter

import pytest

from blockdiff.data import order as order_module
from blockdiff.data.order import BLOCK, Order, StreamOrder, mixture_counts
from blockdiff.seeding import Stream, permutation

pytestmark = pytest.mark.quick


def taken(order, steps):
    return [slot for step in steps for slot in order(step)]


def test_an_order_of_one_source_shows_every_example_once_per_epoch():
    order = Order(examples=10, batch_size=4, seed=3)
    slots = taken(order, range(1, 6))
    assert [epoch for epoch, _ in slots] == [0] * 10 + [1] * 10
    assert sorted(index for _, index in slots[:10]) == sorted(index for _, index in slots[10:]) == list(range(10))
    assert slots[:10] != [(0, index) for index in range(10)] and slots[:10] != slots[10:]


def test_a_mixture_of_one_source_is_the_order_of_that_source_whatever_its_weight():
    mixture, order = Order((10,), 5, seed=3, weights=(2.0,)), Order(10, 5, seed=3)
    assert taken(mixture, range(1, 9)) == taken(order, range(1, 9))
    with pytest.raises(ValueError, match=r"2 sources.*1 weights"):
        Order((10, 20), 5, seed=3)


def test_a_mixture_has_every_source_in_its_share_and_each_in_epochs_of_its_own():
    sizes, weights = (700, 50, 3000), (5.0, 3.0, 2.0)
    order = Order(sizes, batch_size=100, seed=1, weights=weights)
    slots = taken(order, range(1, BLOCK // 100 + 1))
    bounds = [0, 700, 750, 3750]
    for source, share in enumerate((0.5, 0.3, 0.2)):
        own = [(epoch, i) for epoch, i in slots if bounds[source] <= i < bounds[source + 1]]
        assert len(own) == share * BLOCK
        size, count = sizes[source], int(share * BLOCK)
        assert [epoch for epoch, _ in own] == [place // size for place in range(count)]
        for first in range(0, count - size + 1, size):
            assert {index for _, index in own[first : first + size]} == set(range(*bounds[source : source + 2]))
    # Within a batch the sources are mixed too, not one after the other.
    batches = [Counter(sum(index >= bound for bound in bounds[1:3]) for _, index in order(step)) for step in (1, 50)]
    assert all(abs(batch[0] - 50) < 20 and abs(batch[1] - 30) < 20 for batch in batches)


def test_sources_of_one_size_are_in_different_orders():
    slots = taken(Order((50, 50), 10, seed=0, weights=(1.0, 1.0)), range(1, 20))
    orders = [[index % 50 for _, index in slots if index // 50 == source][:50] for source in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50)) and orders[0] != orders[1]


def test_a_mixture_goes_on_from_block_to_block_without_looking_back():
    order = Order((300, 70), batch_size=33, seed=0, weights=(1.0, 1.0))
    steps = range(1, 5 * BLOCK // 66)
    slots = taken(order, steps)
    for low, high in ((0, 300), (300, 370)):
        epochs = [epoch for epoch, index in slots if low <= index < high]
        assert epochs == [place // (high - low) for place in range(len(epochs))]
    again = Order((300, 70), batch_size=33, seed=0, weights=(1.0, 1.0))
    assert again(steps[-1]) == slots[-33:] and again(1) == slots[:33]
    assert Order((300, 70), 33, seed=1, weights=(1.0, 1.0))(1) != order(1)


@pytest.mark.parametrize(
    "weights, counts",
    [
        ([1, 1], (5000, 5000)),
        ([1, 1, 1], (3334, 3333, 3333)),
        ([2e-9, 7, 3], (1, 6999, 3000)),
        ([0.2, 0.8], (2000, 8000)),
    ],
)
def test_weights_become_whole_places_and_nobody_is_left_out(weights, counts):
    assert mixture_counts(weights) == counts and sum(counts) == BLOCK


def test_every_order_of_many_sources_is_drawn_once_and_few_are_kept(monkeypatch):
    drawn = []

    def counted(seed, stream, address, size):
        drawn.extend([address] if stream == Stream.ORDER else [])
        return permutation(seed, stream, address, size)

    monkeypatch.setattr(order_module, "permutation", counted)
    order = Order((60,) * 40, batch_size=32, seed=1, weights=(1.0,) * 40)
    slots = taken(order, range(1, 301))
    used = {(epoch, index // 60) for epoch, index in slots}
    assert len(used) > 100 and sorted(drawn) == sorted(used)
    kept = [orders.cache_info() for orders in order._orders]
    assert len(kept) == 40 and all(orders.currsize <= 2 and orders.misses >= 2 for orders in kept)


def test_the_order_of_a_stream_counts():
    assert taken(StreamOrder(3), (1, 2)) == [(0, place) for place in range(6)]
