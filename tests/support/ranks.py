"""The ranks of `test_distributed.py`, one process and two: the same batches through the same loop.

`python -m tests.support.ranks DIR OTHER` prints how far two runs are apart.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockdiff.canvas import PADDING_ROW, Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.cli.main import main
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import RunError
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_content import FOLDER
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.run import hold_run
from tests.support.closeness import relative_error
from tests.support.oracle import tiny_config, widen_routers
from tests.support.toy_objective import ToyObjective, slots, toy_batch, toy_batches, toy_row
from tests.support.toy_trainer import Options, train

BATCH, STEPS = 6, 3
Tensors = dict[str, Tensor]


def train_plainly(
    objective: nn.Module, batches: Callable[[int], list[Batch]], ranks: Ranks, rate: float
) -> tuple[list[dict], Tensors]:
    """Plain SGD steps: the records, and the gradients of steps 1 and 2 and the last weights by name."""
    records: list[dict] = []
    kept: Tensors = {}
    optimiser = torch.optim.SGD(objective.parameters(), lr=rate)

    def keep_gradients(*_: Any) -> None:
        step = 1 + len(kept) // len(list(objective.parameters()))
        if step <= 2:
            for name, parameter in objective.named_parameters():
                assert parameter.grad is not None
                kept[f"gradient {step} {name}"] = parameter.grad.clone()

    optimiser.register_step_pre_hook(keep_gradients)
    options = Options(STEPS, ar_weight=0.5, clip=0.0, log_every=1)
    train(objective, optimiser, lambda _: rate, batches, options, ranks, log=records.append)
    return records, kept | {f"weight {name}": p.detach() for name, p in objective.named_parameters()}


def toy(ranks: Ranks) -> tuple[list[dict], Tensors]:
    """Uneven micro-batches, with accumulation on both ranks."""
    return train_plainly(ToyObjective(), toy_batches(slots(ranks, BATCH, 2), BATCH), ranks, 0.1)


def lopsided(ranks: Ranks) -> tuple[list[dict], Tensors]:
    """Only the first slot of a step has a canvas, only in even steps a coin: the other rank has neither."""

    def batches(step: int) -> list[Batch]:
        rows = [toy_row(slot, epoch=step, canvases=slot == 0, coin=step % 2 == 0) for slot in range(BATCH)]
        return [lay_out([rows[slot] for slot in part], 4, pad_id=0) for part in slots(ranks, BATCH, 2)]

    return train_plainly(ToyObjective(), batches, ranks, 0.1)


def short(ranks: Ranks) -> tuple[list[dict], Tensors]:
    """Three rows in odd steps, of which one rank has twice as many as the other, and one in even steps."""

    def batches(step: int) -> list[Batch]:
        parts = slots(ranks, 3 if step % 2 else 1, 2) or [range(0)]
        return [toy_batch([3 * step + slot for slot in part], canvases=bool(part)) for part in parts]

    return train_plainly(ToyObjective(), batches, ranks, 0.1)


def real(ranks: Ranks, rows: int = BATCH, is_double: bool = False) -> tuple[list[dict], Tensors]:
    """The model and the objective themselves, several canvases per row, routers trained."""
    return train_plainly(real_objective(is_double), real_batches(ranks, rows), ranks, 5e-4)


def real_objective(is_double: bool = False) -> Objective:
    """Of a tiny model."""
    model = init(tiny_config(canvas_length=8), seed=3, device="cpu", kernels="torch")
    if is_double:
        model.double()
    widen_routers(model)
    return Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)


def real_batches(ranks: Ranks, rows: int = BATCH) -> Callable[[int], list[Batch]]:
    """Its batches by step: rows with one canvas or two."""

    def row(sample: int) -> CleanRow:
        tokens = [2, *((7 * sample + 3 * i) % 300 + 3 for i in range(19 + sample))]
        canvases = [
            Canvas(
                tokens[start : start + 8],
                start,
                t=0.1 + sample / 10,
                coin=sample % 2 == 0,
                address=(0, sample, k),
            )
            for k, start in enumerate((3, 11)[: 1 + sample % 2])
        ]
        return CleanRow(tokens, canvases, sample_id=sample)

    def batches(step: int) -> list[Batch]:
        parts = slots(ranks, rows, 2) or [range(0)]
        return [lay_out([row(slot) for slot in part] or [PADDING_ROW], 8, pad_id=0) for part in parts]

    return batches


def real_short(ranks: Ranks) -> tuple[list[dict], Tensors]:
    """The same with one row a step: of two ranks one has none."""
    return real(ranks, rows=1)


def real_double(ranks: Ranks) -> tuple[list[dict], Tensors]:
    """The same in fp64, where rounding does not hide a mistake."""
    return real(ranks, rows=3, is_double=True)


def failing(ranks: Ranks) -> str:
    """The error of a run whose last slot goes wrong: sample 5, which only one of two ranks has."""

    class Broken(ToyObjective):
        def forward(self, batch: Batch) -> Any:
            losses = super().forward(batch)
            return losses | {"ar": losses["ar"] * (float("nan") if 5 in batch.sample_id_B else 1.0)}

    try:
        train_plainly(Broken(), toy_batches(slots(ranks, BATCH, 1), BATCH), ranks, 0.1)
    except RunError as error:
        return str(error)
    return "finished"


def enter(run: Path, resume: bool, ranks: Ranks) -> Path | None:
    with hold_run(run, resume, ranks) as checkpoint:
        return checkpoint


def resumed(ranks: Ranks, run: Path) -> list[str]:
    """Save on every rank, be refused, resume; returns what each rank saw."""
    objective = ToyObjective(ranks.rank)
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1)
    seen = [str(enter(run, False, ranks))]
    options = Options(2, save_every=1, keep=1)
    batches = toy_batches(slots(ranks, BATCH), BATCH)
    train(objective, optimiser, lambda _: 0.1, batches, options, ranks, output=run)
    try:
        enter(run, False, ranks)
    except RunError:
        seen.append("refused")
    checkpoint = enter(run, True, ranks)
    assert checkpoint is not None
    again = ToyObjective(5)
    seen.append(str(restore(checkpoint, again, torch.optim.SGD(again.parameters(), lr=0.1), {})))
    same = all(torch.equal(a, b) for a, b in zip(again.parameters(), objective.parameters(), strict=True))
    return [*seen, f"same weights {same}"]


def gone_on(ranks: Ranks, run: Path) -> list[bool]:
    """True where the weights after four steps are, to the bit, those of a run that goes on after the second step."""

    def trained(start: int, steps: int) -> Tensors:
        objective = real_objective()
        optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-2)
        if start:
            restore(run / FOLDER / f"step-{start}", objective, optimiser, {}, ranks=ranks)
        options = Options(steps, save_every=2)
        train(objective, optimiser, lambda _: 1e-2, real_batches(ranks), options, ranks, output=run, start=start)
        return {name: p.detach().clone() for name, p in objective.named_parameters()}

    whole, rest = trained(0, 4), trained(2, 4)
    return [torch.equal(whole[name], rest[name]) for name in whole]


def told(ranks: Ranks) -> list[Any]:
    """The values that ranks have heard of one another: unequal lengths, odd letters, numbers that are not finite."""
    own = [{"ids": [ranks.rank] * 1000 ** (ranks.rank % 2)}, 'a "ü" \ud800 \0', 0.1 + ranks.rank, 5e-324, None, True]
    heard = ranks.gather([*own, float("inf"), float("nan")])
    endless, missing = heard[ranks.world - 1][-2:]
    said = [[each[0]["ids"] == [rank] * len(each[0]["ids"]), *each[1:-2]] for rank, each in enumerate(heard)]
    answers = ranks.any(ranks.rank == ranks.world - 1, False, True)
    numbers = [len(heard[-1][0]["ids"]), endless > 1e308, missing != missing]
    return [*said, *numbers, ranks.gather(None), ranks.agree(""), answers]


SCENARIOS = (toy, lopsided, short, real, real_short, real_double)


def differences(one: Path, other: Path) -> dict[str, dict[str, float]]:
    """By scenario the relative differences: losses (largest of any step), first gradient, its worst tensor, weights."""
    records = [json.loads((directory / "found-0.json").read_text()) for directory in (one, other)]
    table = {}
    for name in (scenario.__name__ for scenario in SCENARIOS):
        losses = [
            abs(after[key] / before[key] - 1)
            for before, after in zip(*(record[name] for record in records), strict=True)
            for key in ("loss", "canvas_loss", "ar_loss")
        ]
        expected, got = (load_file(directory / f"{name}-0.safetensors") for directory in (one, other))
        assert expected.keys() == got.keys()
        gradient, weights = ([key for key in expected if key.startswith(kind)] for kind in ("gradient 1", "weight"))

        def together(tensors: Tensors, keys: list[str]) -> Tensor:
            return torch.cat([tensors[key].flatten() for key in keys])

        table[name] = {
            "loss": max(losses),
            "gradient": relative_error(together(got, gradient), together(expected, gradient)),
            "tensor": max(relative_error(got[key], expected[key]) for key in gradient),
            "weight": relative_error(together(got, weights), together(expected, weights)),
        }
    return table


def leaving(ranks: Ranks, directory: Path) -> None:
    """Let the command end this rank with an error; what is left to do at the end is done, and nothing after it."""
    atexit.register((directory / f"done-{ranks.rank}").touch)
    sys.argv = ["blockdiff", "init", "no-such-preset", str(directory / "model")]
    ranks.gather(ranks.rank)
    try:
        main()
    finally:
        (directory / f"back-{ranks.rank}").touch()


def everything(ranks: Ranks, directory: Path) -> None:
    """Run all of it and write what this rank found to `directory`."""
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        torch.manual_seed(ranks.rank)
        found[scenario.__name__], tensors = scenario(ranks)
        save_file(
            {name: t.contiguous() for name, t in tensors.items()},
            directory / f"{scenario.__name__}-{ranks.rank}.safetensors",
        )
    found["failing"] = failing(ranks)
    found["resumed"] = resumed(ranks, directory / "run")
    found["gone_on"] = gone_on(ranks, directory / "other")
    found["told"] = told(ranks)
    found["world"], found["device"] = ranks.world, str(ranks.device)
    (directory / f"found-{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name, figures in differences(Path(sys.argv[1]), Path(sys.argv[2])).items():
        print(f"{name:12}", *(f"{kind} {value:.1e}" for kind, value in figures.items()))
