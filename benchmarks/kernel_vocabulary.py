"""The vocabulary ops against transformers' method (all logits at once), Liger's fused loss, and a floor.

The floor is the two products that no path can avoid. Outputs are compared on the first rows, in half precision with
fp32. Peers run as in practice: whole if the logits fit, else in parts of PEER_ROWS tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attempts import attempt
from benchmarks.installed import installed
from benchmarks.kernel_lines import Work, agreement, timed
from benchmarks.models import Size
from benchmarks.result import Agreement, Result
from benchmarks.settings import Settings
from benchmarks.timing import interleaved, once
from blockdiff.kernels import Kernels, resolve

SUITE = "vocabulary"
SOFTCAP = 30.0
TEMPERATURE = 0.6
COMPARED_ROWS = 256
PEER_ROWS = 4096  # transformers' method has several fp32 [rows, V] in memory


@dataclass(frozen=True)
class Shape:
    """N tokens of width D, and a vocabulary of V."""

    name: str
    N: int
    V: int
    D: int

    def __str__(self) -> str:
        return f"N {self.N:,} V {self.V:,} D {self.D:,}"


SHAPES = tuple(Shape("released", N, 262_144, 2816) for N in (256, 2048, 4096, 16_384))


class Inputs(NamedTuple):
    """The tensors that all candidates read."""

    hidden_ND: Tensor
    table_VD: Tensor
    target_N: Tensor
    uniform_N: Tensor

    def first(self, rows: int) -> Inputs:
        """Return the inputs with only the first `rows` tokens."""
        return Inputs(self.hidden_ND[:rows], self.table_VD, self.target_N[:rows], self.uniform_N[:rows])

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the inputs with hidden states and table in another dtype."""
        return self._replace(hidden_ND=self.hidden_ND.to(dtype), table_VD=self.table_VD.to(dtype))


Candidate = Callable[[Inputs], dict[str, Tensor]]  # returns the tensors to compare


def run(sizes: list[Size], settings: Settings, done: Callable[[Result], object]) -> None:
    """Measure every op at every shape on a GPU if `sizes` have the released model; call `done` with each line."""
    if settings.device.type != "cuda":
        print(f"{SUITE}: needs a GPU", file=sys.stderr)
        return
    kernels = resolve(settings.kernels)
    for shape in SHAPES if "released" in {size.name for size in sizes} else ():
        with attempt(f"{SUITE}, {shape}"):
            for result in measure(draw(shape, settings.device, torch.bfloat16), shape, kernels, settings):
                done(result)


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw inputs whose logits have a standard deviation of about 3."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape.N, shape.D, generator=g, device=device).mul_(3 / shape.D**0.5).to(dtype)
    table = torch.randn(shape.V, shape.D, generator=g, device=device).to(dtype)
    target = torch.randint(0, shape.V, (shape.N,), generator=g, device=device)
    return Inputs(hidden, table, target, torch.rand(shape.N, generator=g, device=device))


def measure(inputs: Inputs, shape: Shape, kernels: Kernels, settings: Settings) -> Iterator[Result]:
    """Yield lines: loss and gradients (frozen and trained table), soft embedding, statistics of a denoising step."""
    is_cuda = settings.device.type == "cuda"
    liger, cut = (_liger(), _cut_cross_entropy()) if is_cuda else (None, None)
    for trains_table in (False, True):
        peers = {"transformers": _in_parts(partial(_unfused_loss, trains_table=trains_table))}
        if liger is not None:
            peers["Liger"] = partial(liger, trains_table=trains_table)
        if cut is not None:
            peers["cut-cross-entropy"] = partial(cut, trains_table=trains_table)
        ours = partial(_our_loss, kernels=kernels, trains_table=trains_table)
        case = f"cross-entropy, {'trained' if trains_table else 'frozen'} table"
        with attempt(f"{SUITE}, {shape}, {case}"):
            yield from _compared(case, inputs, shape, ours, peers, settings)
    with torch.no_grad():
        for case, mine, unfused in (
            ("soft embedding", _our_soft_embedding, _unfused_soft_embedding),
            ("statistics", _our_stats, _unfused_stats),
        ):
            peers = {"transformers": _in_parts(unfused)}
            floor = partial(_two_products, inputs)
            with attempt(f"{SUITE}, {shape}, {case}"):
                yield from _compared(case, inputs, shape, partial(mine, kernels=kernels), peers, settings, floor)


def _compared(
    case: str,
    inputs: Inputs,
    shape: Shape,
    ours: Candidate,
    peers: Mapping[str, Candidate],
    settings: Settings,
    floor: Work | None = None,
) -> Iterator[Result]:
    """Yield a line against the peers and, if there is a floor, one against it (a "speed-up" of at most about 1)."""
    device, name = settings.device, str(shape)
    result = Result(SUITE, name, case, _agreement(inputs.first(COMPARED_ROWS), ours, peers["transformers"]))
    if not result.agreement.is_met:
        yield result
        return
    works: dict[str, Work] = {peer: partial(candidate, inputs) for peer, candidate in peers.items()}
    our_work = partial(ours, inputs)
    yield timed(result, our_work, works, settings)
    if floor is not None:
        stopwatches = {"ours": once(our_work, device), "two products": once(floor, device)}
        times = interleaved(stopwatches, settings.repeats)
        yield Result(SUITE, name, f"{case}, floor", result.agreement, times.pop("ours"), times)


def _agreement(inputs: Inputs, ours: Candidate, peer: Candidate) -> Agreement:
    """Return relative errors against the peer in fp32; in half precision the peer's own error is the bound."""
    mine, theirs = ours(inputs), peer(inputs)
    is_fp32 = inputs.hidden_ND.dtype == torch.float32
    return agreement(mine, theirs, theirs if is_fp32 else peer(inputs.to(torch.float32)), is_fp32=is_fp32)


# -- ours ------------------------------------------------------------------------------------------------------


def _leaves(inputs: Inputs, trains_table: bool) -> tuple[Tensor, Tensor]:
    hidden, table = inputs.hidden_ND.detach().requires_grad_(), inputs.table_VD.detach()
    return hidden, table.requires_grad_(trains_table)


def _gradients(hidden: Tensor, table: Tensor) -> dict[str, Tensor]:
    named = {"hidden gradient": hidden.grad, "table gradient": table.grad}
    return {name: grad for name, grad in named.items() if grad is not None}


def _our_loss(inputs: Inputs, kernels: Kernels, trains_table: bool) -> dict[str, Tensor]:
    hidden, table = _leaves(inputs, trains_table)
    loss = kernels.linear_cross_entropy(hidden, table, inputs.target_N, SOFTCAP).sum()
    loss.backward()
    return {"loss": loss.detach(), **_gradients(hidden, table)}


def _our_soft_embedding(inputs: Inputs, kernels: Kernels) -> dict[str, Tensor]:
    soft = kernels.soft_embedding(inputs.hidden_ND, inputs.table_VD, SOFTCAP, TEMPERATURE)
    return {"soft embedding": soft}


def _our_stats(inputs: Inputs, kernels: Kernels) -> dict[str, Tensor]:
    stats = kernels.token_stats(inputs.hidden_ND, inputs.table_VD, SOFTCAP, TEMPERATURE, inputs.uniform_N)
    return {"entropy": stats.entropy, "argmax": stats.argmax, "soft embedding": stats.soft_embedding}


# -- the peers -------------------------------------------------------------------------------------------------


def _logits(hidden: Tensor, table: Tensor) -> Tensor:
    z = F.linear(hidden, table).float()
    return torch.tanh(z / SOFTCAP) * SOFTCAP


def _unfused_loss(inputs: Inputs, trains_table: bool) -> dict[str, Tensor]:
    hidden, table = _leaves(inputs, trains_table)
    loss = F.cross_entropy(_logits(hidden, table), inputs.target_N, reduction="sum")
    loss.backward()
    return {"loss": loss.detach(), **_gradients(hidden, table)}


def _unfused_soft_embedding(inputs: Inputs) -> dict[str, Tensor]:
    p = (_logits(inputs.hidden_ND, inputs.table_VD) / TEMPERATURE).softmax(-1)
    return {"soft embedding": p.to(inputs.table_VD.dtype) @ inputs.table_VD}


def _unfused_stats(inputs: Inputs) -> dict[str, Tensor]:
    z = _logits(inputs.hidden_ND, inputs.table_VD) / TEMPERATURE
    p = z.softmax(-1)
    torch.multinomial(p, 1)
    entropy = torch.distributions.Categorical(logits=z, validate_args=False).entropy()
    return {"entropy": entropy, "argmax": z.argmax(-1), "soft embedding": p.to(inputs.table_VD.dtype) @ inputs.table_VD}


def _in_parts(peer: Candidate) -> Candidate:
    """Run a peer whole if its logits fit, else part by part, as micro-batches do."""

    def in_parts(inputs: Inputs) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for lo in range(0, len(inputs.hidden_ND), PEER_ROWS):
            part = slice(lo, lo + PEER_ROWS)
            out = peer(Inputs(inputs.hidden_ND[part], inputs.table_VD, inputs.target_N[part], inputs.uniform_N[part]))
        return out

    return in_parts


def _liger() -> Callable[..., dict[str, Tensor]] | None:
    """Return Liger's fused linear cross-entropy; None if it is not installed."""
    liger = installed("liger_kernel.transformers", "Liger")
    if liger is None:
        return None
    fused = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=SOFTCAP)

    def loss_and_gradients(inputs: Inputs, trains_table: bool) -> dict[str, Tensor]:
        hidden, table = _leaves(inputs, trains_table)
        loss = fused(table, hidden, inputs.target_N)
        loss.backward()
        return {"loss": loss.detach(), **_gradients(hidden, table)}

    return loss_and_gradients


def _cut_cross_entropy() -> Callable[..., dict[str, Tensor]] | None:
    """Return Apple's cut cross-entropy (arXiv 2411.09009) with its filter of gradients off; None if not installed."""
    cut = installed("cut_cross_entropy", "cut-cross-entropy")
    if cut is None:
        return None

    def loss_and_gradients(inputs: Inputs, trains_table: bool) -> dict[str, Tensor]:
        hidden, table = _leaves(inputs, trains_table)
        options = dict(softcap=SOFTCAP, reduction="sum", filter_eps=None)
        loss = cut.linear_cross_entropy(hidden, table, inputs.target_N, **options)
        loss.backward()
        return {"loss": loss.detach(), **_gradients(hidden, table)}

    return loss_and_gradients


def _two_products(inputs: Inputs) -> Tensor:
    """Compute the two products that no path can avoid, chunk by chunk: the logits, and logits times table."""
    out = torch.empty_like(inputs.hidden_ND)
    for lo in range(0, len(out), 512):
        rows = slice(lo, lo + 512)
        torch.mm(torch.mm(inputs.hidden_ND[rows], inputs.table_VD.t()), inputs.table_VD, out=out[rows])
    return out
