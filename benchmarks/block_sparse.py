"""Block-sparse attention against dense attention and FlexAttention over the same keys, selection included.

    python -m benchmarks.block_sparse --tokens 32768            # one row, as the encode of a long prompt
    python -m benchmarks.block_sparse --output FILE.json        # also written there, with the machine

The peers: torch's causal attention over all keys, and FlexAttention with a BlockMask of the same selection, whose
making is counted as ours is; its tiles have 128 queries, and take every block that one of these chose. A line has times
only where ours agrees with both: with dense attention on a short row with as many blocks as there are. On a CPU
FlexAttention needs a C++ compiler; where it cannot run the line says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.attempts import attempt
from benchmarks.models import Size
from benchmarks.result import Agreement, Result
from benchmarks.settings import Settings
from benchmarks.timing import interleaved, once
from blockdiff.kernels import Kernels, resolve

BOUND = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the difference to dense attention


def inputs(
    tokens: int, heads: int, dim: int, key_heads: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Queries, keys, values, index queries (one head for each key head) and index keys of one row."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, dim), (key_heads, dim), (key_heads, dim), (key_heads, dim), (dim,)
    return tuple(torch.randn((1, tokens, *shape), generator=generator).to(device, dtype) for shape in shapes)


def selected(kernels: Kernels, drawn: tuple[Tensor, ...], block: int, topk: int) -> tuple[Tensor, Tensor]:
    """The blocks of every query, and how many keys each sees."""
    visible = torch.arange(1, drawn[0].shape[1] + 1, device=drawn[0].device)[None]
    idx_q, idx_k = drawn[3:]
    return kernels.select_blocks(idx_q, idx_k, visible, block=block, topk=topk), visible


def sparse(kernels: Kernels, drawn: tuple[Tensor, ...], block: int, topk: int) -> Tensor:
    """Selection and attention."""
    q, k, v = drawn[:3]
    ids, visible = selected(kernels, drawn, block, topk)
    return kernels.block_sparse_attention(q, k, v, ids, visible, None, block, q.shape[-1] ** -0.5)


def dense(drawn: tuple[Tensor, ...]) -> Tensor:
    """torch's causal attention, whose keys are not repeated in memory."""
    q, k, v = (x.transpose(1, 2) for x in drawn[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def flex(kernels: Kernels, drawn: tuple[Tensor, ...], block: int, topk: int) -> Callable[[], Tensor]:
    """FlexAttention, compiled, with a BlockMask of our selection: the blocks that any query of a tile chose, and in
    them a mask of what each query chose."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    attend: Any = torch.compile(flex_attention, dynamic=False)
    (_, T, h, _), H = drawn[0].shape, drawn[3].shape[2]
    blocks = -(-T // block)

    def run() -> Tensor:
        ids, _ = selected(kernels, drawn, block, topk)
        kept = torch.zeros(1, T, H, blocks + 1, dtype=torch.bool, device=ids.device)
        kept.scatter_(-1, torch.where(ids < 0, blocks, ids), True)
        kept = kept[..., :blocks].transpose(1, 2)  # [1, H, T, blocks]
        of_tile = F.pad(kept, (0, 0, 0, blocks * block - T)).view(1, H, blocks, block, blocks).any(3)
        counts = of_tile.sum(-1, dtype=torch.int32).repeat_interleave(h // H, 1)
        order = of_tile.int().argsort(dim=-1, descending=True, stable=True).int().repeat_interleave(h // H, 1)

        def chosen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return kept[b, head // (h // H), query, key // block] & (key <= query)

        mask = BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=block, mask_mod=chosen, seq_lengths=(T, T))
        q, k, v = (x.transpose(1, 2) for x in drawn[:3])
        out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=h != k.shape[1])
        return out.transpose(1, 2)

    return run


Sizes = tuple[int, int, int, int, int]  # query heads, key heads, dimension, block and blocks of a query


def compare(tokens: int, sizes: Sizes, settings: Settings) -> tuple[Result, str]:
    """Ours beside both peers, and why FlexAttention was not timed where it was not."""
    (heads, key_heads, dim, block, topk), device, note = sizes, settings.device, ""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels, drawing = resolve(settings.kernels), (heads, dim, key_heads, str(device), dtype)
    few, drawn = inputs(min(tokens, 3000), *drawing), inputs(tokens, *drawing)
    agreement = Agreement(
        {"dense": (float((sparse(kernels, few, block, 1 << 20) - dense(few)).abs().max()), BOUND[dtype])}
    )
    case = f"{heads} heads, {key_heads} of keys, {topk} blocks of {block}, d {dim}, {torch.get_num_threads()} threads"
    if not agreement.is_met:
        return Result("block_sparse", f"{tokens} tokens", case, agreement), note
    candidates: dict[str, Callable[[], object]] = {
        "ours": lambda: sparse(kernels, drawn, block, topk),
        "dense": lambda: dense(drawn),
    }
    try:
        run = flex(kernels, drawn, block, topk)
        apart = float((sparse(kernels, drawn, block, topk) - run()).abs().max())
        agreement.errors["FlexAttention"] = (apart, BOUND[dtype])
        candidates["FlexAttention"] = run
    except Exception as obstacle:  # a peer that cannot run is no reason to lose the other
        note = f"FlexAttention: {type(obstacle).__name__}: {str(obstacle).strip().splitlines()[0][:160]}"
    stopwatches = {name: once(work, device) for name, work in candidates.items()}
    times = interleaved(stopwatches, settings.repeats, 2 if device.type == "cuda" else 0)
    ours = times.pop("ours")
    return Result("block_sparse", f"{tokens} tokens", case, agreement, ours, times), note


@torch.no_grad()
def run(sizes: Sequence[Size], settings: Settings, done: Callable[[Result], None]) -> None:
    """The suite of `python -m benchmarks`, on a GPU: MiniMax M3's heads."""
    for tokens in (8192, 32768, 131072) if settings.device.type == "cuda" else ():
        with attempt(f"block_sparse, {tokens} tokens"):
            done(compare(tokens, (64, 4, 128, 128, 16), settings)[0])


def line(result: Result, note: str) -> str:
    """One line of the table: seconds of ours, of each peer, and how many times ours that is."""
    if result.ours is None or result.speedup is None:
        return f"{result.size}, {result.case}: DISAGREES: {result.agreement}"
    ours = result.ours.median
    peers = [f"{name} {x.median:.2f} s ({x.median / ours:.2f} times)" for name, x in result.peers.items()]
    return ", ".join([f"{result.size}, {result.case}: ours {ours:.2f} s", *peers, *([note] if note else [])])


def main(words: list[str] | None = None) -> None:
    """Compare, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_sparse", description=__doc__)
    parser.add_argument("--tokens", type=int, action="append", help="of a row (may be repeated; default 32768)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=1, help="key heads, and as many index heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--topk", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="FILE.json; FILE.md beside it has the lines")
    given = parser.parse_args(words)
    settings = Settings(torch.device(given.device), given.repeats, "auto", False)
    sizes = given.heads, given.key_heads, given.dim, given.block, given.topk
    record, found = machine.describe(settings.device), []
    with torch.no_grad():
        for tokens in given.tokens or [32768]:
            found.append(compare(tokens, sizes, settings))
            print(line(*found[-1]), flush=True)
    if given.output:
        lines = [result.to_record() | {"note": note} for result, note in found]
        contents = {"machine": record, "repeats": given.repeats, "results": lines}
        text = "\n".join(f"- {line(*each)}" for each in found)
        machine.write(given.output, contents, f"{machine.heading(record, given.repeats)}\n\n{text}\n")


if __name__ == "__main__":
    main()
