"""The average of the weights: its formula, swapping it in and out, saving and loading it."""

from __future__ import annotations

import pytest
import torch

from blockdiff.errors import RunError
from blockdiff.training.optimiser import Ema
from tests.support.toy_objective import ToyObjective

pytestmark = pytest.mark.quick


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def walk(module, step):
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.add_((step + number) * 0.01)


def test_the_average_follows_its_formula_with_the_warmup_of_the_decay():
    module = ToyObjective()
    ema, expected = Ema(module, 0.5), weights(module)
    for step in range(1, 13):
        walk(module, step)
        ema.update(step)
        d = min(0.5, (1 + step) / (10 + step))
        expected = {name: d * expected[name] + (1 - d) * p for name, p in weights(module).items()}
    for name, average in ema.state().items():
        torch.testing.assert_close(average, expected[name])
    assert (1 + 1) / (10 + 1) < 0.5 < (1 + 12) / (10 + 12)  # both sides of the minimum were met


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_applied_the_module_has_the_average_and_after_it_its_own_bits(dtype):
    module = ToyObjective().to(dtype)
    ema = Ema(module, 0.9)
    walk(module, 1)
    ema.update(1)
    before, places = weights(module), [p.data_ptr() for p in module.parameters()]
    with pytest.raises(KeyboardInterrupt), ema.applied():
        for name, p in module.named_parameters():
            assert torch.equal(p, ema.state()[name].to(dtype)) and not torch.equal(p, before[name])
        raise KeyboardInterrupt  # weights come back whatever ends the evaluation
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert [p.data_ptr() for p in module.parameters()] == places  # DDP and the optimiser hold on to these


def test_the_average_is_fp32_so_that_small_steps_add_up():
    module = ToyObjective().to(torch.bfloat16)
    ema = Ema(module, 0.999)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    start = {name: average.clone() for name, average in ema.state().items()}
    for step in range(20_000, 20_010):
        ema.update(step)
    for name, average in ema.state().items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, start[name] * 0.999**10, rtol=1e-5, atol=0)


def test_only_what_trains_is_averaged():
    module = ToyObjective()
    module.signal.requires_grad_(False)
    assert set(Ema(module, 0.9).state()) == {"norm", "vocabulary.table", "mix.weight"}


def test_a_saved_average_goes_on_to_the_bit():
    module = ToyObjective()
    ema = Ema(module, 0.9)
    walk(module, 1)
    ema.update(1)
    saved = {name: average.clone() for name, average in ema.state().items()}
    walk(module, 2)
    again = Ema(module, 0.9)
    again.load(saved)
    for each in (ema, again):
        each.update(2)
    assert all(torch.equal(average, again.state()[name]) for name, average in ema.state().items())
    assert not any(torch.equal(average, saved[name]) for name, average in again.state().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm"), r"EMA of norm: missing.*torch\.float32 \[8\]"),
        (lambda state: state.update(extra=torch.ones(2)), r"EMA of extra: torch\.float32 \[2\].*missing"),
        (lambda state: state.update(norm=torch.ones(9)), r"EMA of norm: torch\.float32 \[9\]"),
    ],
)
def test_an_average_of_another_model_is_refused_and_nothing_is_loaded(change, message):
    ema = Ema(ToyObjective(), 0.9)
    before = {name: average.clone() for name, average in ema.state().items()}
    state = {name: average + 1 for name, average in before.items()}
    change(state)
    with pytest.raises(RunError, match=message):
        ema.load(state)
    assert all(torch.equal(average, before[name]) for name, average in ema.state().items())
