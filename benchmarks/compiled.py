"""The machine code of the Triton kernels for every architecture, on any machine: `python -m benchmarks.compiled`.

The ops are called on CPU tensors with Triton's driver replaced, so every launch goes through Triton's own
specialisation (constants, alignment of pointers, absent arguments) and ends with the compiled kernel: what is looked
at is what would be launched. Nothing runs. Needs triton with its bundled ptxas and cuobjdump, not TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blockdiff.kernels import tiles
from blockdiff.kernels.automaton.triton import look_ahead, reach
from blockdiff.kernels.block_sparse import triton as block_sparse_ops
from blockdiff.kernels.block_sparse.triton import block_sparse_attention, select_blocks
from blockdiff.kernels.expert_mlp.triton import expert_mlp, expert_slots
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8.triton import fp8_linear
from blockdiff.kernels.gated.triton import FEW_ROWS, gated_linear
from blockdiff.kernels.gated.triton import gated as gate_and_up
from blockdiff.kernels.heads import HeadNorms, Norm
from blockdiff.kernels.heads.triton import attention_heads
from blockdiff.kernels.launch import forget_sizes
from blockdiff.kernels.norm_rope.triton import add_rms_norm, layer_end, norm_rope, residual_norms, rms_norms
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4.triton import nvfp4_linear
from blockdiff.kernels.routing.triton import routed_tokens
from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.kernels.span_attention.triton import span_attention
from blockdiff.kernels.vocabulary import Classes, Penalty, Shaping, pack_allowed, triton_launch
from blockdiff.kernels.vocabulary import triton as vocabulary_ops
from blockdiff.spans import denoise_spans

TENSOR_MEMORY = 512  # columns that a block of an sm_100 can have


def attention(head_dim: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Launch the released model's attention: split forward, forward, both over pages, and backward.

    16 query heads, canvases of 256.
    """
    keys = torch.zeros(1, 256, kv_heads, head_dim, dtype=dtype, requires_grad=True)
    q = torch.zeros(1, 256, 16, head_dim, dtype=dtype, requires_grad=True)
    start = torch.tensor([[256]])
    spans = denoise_spans(start, torch.zeros_like(start), start, 256)
    torch.ops.blockdiff.span_attention(q, keys, keys, keys, keys, spans.bounds_BT4, 1.0, 2)
    pool, table = torch.zeros(4, 128, kv_heads, head_dim, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32)
    with torch.no_grad():
        for splits in (1, 2):
            torch.ops.blockdiff.span_attention_paged(
                q, pool, pool, keys, keys, spans.bounds_BT4, table, 256, 1.0, splits
            )
    out = span_attention(q, keys, keys, keys, keys, spans, 1.0)
    assert isinstance(out, Tensor)
    out.sum().backward()


def block_sparse(dtype: torch.dtype, heads: int = 64, kv_heads: int = 4, d: int = 128) -> None:
    """Launch selection and attention of MiniMax M3's sparse layers.

    Packed rows, forward and backward; canvases over pages in one part and in two.
    """
    T, block, topk = 256, 128, 16
    shapes = (1, T, heads, d), (1, 4096, kv_heads, d), (1, T, 4, d), (32, 128, kv_heads, d)
    q, keys, idx_q, pool = (torch.zeros(*shape, dtype=dtype) for shape in shapes)
    visible, own = torch.full((1, T), 4096), torch.zeros(1, T, 2, dtype=torch.int32)
    for score in ("max", "lse"):
        select_blocks(idx_q, keys[:, :, 0], visible, visible, block=block, topk=topk, score=score)
    ids, inputs = torch.zeros(1, T, kv_heads, topk, dtype=torch.int64), [x.requires_grad_() for x in (q, keys)]
    block_sparse_attention(inputs[0], keys, keys, ids, visible, visible, block, 1.0).sum().backward()
    with torch.no_grad():
        with patch.multiple(block_sparse_ops, LEAST_QUERIES=1, SHARED_BY=0):
            block_sparse_attention(q, keys, keys, ids, visible, visible, block, 1.0)
        pages = BlockTable(torch.zeros(1, 32, dtype=torch.int32), torch.full((1,), 4096), 128)
        select_blocks(idx_q, PagedTensor(pool[:, :, :1], pages), visible, block=block, topk=topk)
        whole = q, pool, pool, ids, visible.int(), None, keys[:, :T], keys[:, :T], own, pages.table_BM, 4096, block, 1.0
        for splits in (1, 2):
            torch.ops.blockdiff.block_sparse_attention_paged(*whole, splits)


def norms(dtype: torch.dtype) -> None:
    """Launch the released model's norms, forward and backward: of hidden states, and of heads of both layer kinds."""
    x, w = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((1, 64, 2816), (2816,)))
    sum(out.sum() for out in rms_norms(x, (w, w, None), 1e-6)).backward()  # type: ignore[union-attr]
    add_rms_norm(x, x, w, 1e-6, torch.ones(1, dtype=dtype)).sum().backward()
    for d in (256, 512):
        heads, w = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((1, 64, 16, d), (d,)))
        cos = torch.zeros(1, 64, d, dtype=dtype)
        norm_rope(heads, w, cos, cos, 1e-6).sum().backward()
        rms_norms(heads, (None,), 1e-6)[0].sum().backward()


def experts(
    tokens: int, dtype: torch.dtype, E: int = 128, k: int = 8, D: int = 2816, F: int = 704, rank: int = 0
) -> None:
    """Launch experts of the released model's sizes, forward and backward.

    rank: 0 trains all weights, else low-rank matrices of this rank.
    """
    x, gate_up, down = (
        torch.empty(*shape, dtype=dtype, requires_grad=not rank)  # gigabytes that are never touched
        for shape in ((tokens, D), (E, 2 * F, D), (E, D, F))
    )
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    index, weight = torch.zeros(tokens, k, dtype=torch.int64), torch.zeros(tokens, k, requires_grad=True)
    expert_mlp(x.requires_grad_(), gate_up, down, index, weight, low_rank=low_rank).sum().backward()


def in_fp8(tokens: int, dtype: torch.dtype, goes_back: bool) -> None:
    """Launch experts and linear layers of the released model's sizes with fp8 weights.

    goes_back: also the backward to their inputs.
    """
    stored(Fp8, fp8_linear, tokens, dtype, goes_back)
    if tokens <= FEW_ROWS:
        with torch.no_grad():
            gate = Fp8.empty_like(torch.empty(2112, 2816))
            gated_linear(torch.empty(tokens, 2816, dtype=dtype), gate, gate, "gelu_tanh")


def in_nvfp4(tokens: int, dtype: torch.dtype, goes_back: bool) -> None:
    """Launch experts and linear layers of the released model's sizes with NVFP4 weights, as `in_fp8` does."""
    stored(Nvfp4, nvfp4_linear, tokens, dtype, goes_back)


def stored(form: Any, linear: Callable[..., Tensor], tokens: int, dtype: torch.dtype, goes_back: bool) -> None:
    """Launch the released model's experts and a linear layer with weights in a form of fewer bits."""
    E, k, D, F = 128, 8, 2816, 704
    gate_up, down, weight = (form.empty_like(torch.empty(shape)) for shape in ((E, 2 * F, D), (E, D, F), (4096, D)))
    x = torch.empty(tokens, D, dtype=dtype, requires_grad=goes_back)
    index, routing = torch.zeros(tokens, k, dtype=torch.int64), torch.zeros(tokens, k)
    outs = expert_mlp(x, gate_up, down, index, routing), linear(x, weight)
    if goes_back:
        sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]


@torch.no_grad()
def inference(dtype: torch.dtype) -> None:
    """Launch the fused ops of a denoising step of the released model, for both layer kinds.

    With gradients, each of these is several ops.
    """
    N, D, F, E, k, eps = 256, 2816, 2112, 128, 8, 1e-6
    x, w, scalar = (torch.zeros(*shape, dtype=dtype) for shape in ((1, N, D), (D,), (1,)))

    def norms(form: str, d: int, norms_values: bool = False) -> HeadNorms:
        norm = None if form == "none" else cast(Norm, SimpleNamespace(form=form, gain=w[:d]))
        return HeadNorms(d, norm, norm, norms_values, eps)

    for d, kv_heads in ((256, 8), (512, 2)):
        q, keys = torch.zeros(1, N, 16, d, dtype=dtype), torch.zeros(1, N, kv_heads, d, dtype=dtype)
        cos = torch.zeros(1, N, d, dtype=dtype)
        of_heads = q, keys, keys, norms("direct", d, True), (cos, cos)
        attention_heads(*of_heads)
        pages = BlockTable(torch.zeros(1, 2, dtype=torch.int32), torch.full((1,), N), 128, torch.arange(N))
        into = PagedTensor(torch.zeros(4, 128, kv_heads, d, dtype=dtype), pages)
        attention_heads(*of_heads, (into, into))
    # MiniMax M3 (RoPE on half of a head): its heads and its indexer's; then heads of Qwen3 and Llama
    q, keys, cos, whole = (torch.zeros(1, N, *shape, dtype=dtype) for shape in ((64, 128), (4, 128), (64,), (128,)))
    for form in ("cast", "none"):
        attention_heads(q, keys, keys, norms(form, 128), (whole, whole))
    centred = norms("centred", 128)
    attention_heads(q, keys, keys, centred, (cos, cos))
    attention_heads(q[:, :, :4], keys[:, :, :1], None, centred, (cos, cos))
    residual_norms(x, x, w, (w, w, None), eps)
    of_experts = torch.empty(E, D, dtype=dtype), torch.zeros(E, dtype=dtype)
    index, weight = routed_tokens(x[0], w, D**-0.5, *of_experts, k)
    weights = torch.empty(E, 2 * 704, D, dtype=dtype), torch.empty(E, D, 704, dtype=dtype)
    slots = expert_slots(x[0], *weights, index, weight)
    gate = torch.empty(F, D, dtype=dtype)
    gated_linear(x[0], gate, gate, "gelu_tanh")
    layer_end(x, x, slots, (w, w, w), eps, scalar)


def router(experts: int, dtype: torch.dtype) -> None:
    """Launch the choice of 8 experts for 256 tokens of the released model's width, and its gradient."""
    x, table, scale = (torch.zeros(*shape, dtype=dtype) for shape in ((256, 2816), (experts, 2816), (experts,)))
    routed_tokens(x.requires_grad_(), x[0].detach(), 1.0, table, scale, 8)[1].sum().backward()


def gated(tokens: int, dtype: torch.dtype) -> None:
    """Launch the gated half of the released model's dense MLP.

    Also the ops of which it is composed in training, with gradient.
    """
    gate, products = torch.empty(2112, 2816, dtype=dtype), torch.zeros(tokens, 2112, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        gated_linear(torch.zeros(tokens, 2816, dtype=dtype), gate, gate, "gelu_tanh")
    gate_and_up(products, products, "gelu_tanh").sum().backward()


def vocabulary(dtype: torch.dtype) -> None:
    """Launch every vocabulary op at the released model's 262,144 tokens, with all options and with none."""
    N, V, D = 16, 262_144, 16
    hidden, table = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((N, D), (V, D)))
    tokens, vector = torch.zeros(N, dtype=torch.int64), torch.zeros(N)
    for chosen, chunk_bytes in (((), 1 << 24), ((tokens, vector), 1 << 20)):  # dloss/dx kept, and made again
        with patch.object(triton_launch, "CHUNK_BYTES", chunk_bytes):
            loss: Tensor = vocabulary_ops.linear_cross_entropy(hidden, table, tokens, 30.0, *chosen)
            loss.sum().backward()
            vocabulary_ops.linear_cross_entropy(hidden, table.detach(), tokens, 30.0, *chosen)
            vocabulary_ops.token_scores(hidden, table, tokens, 30.0, *chosen)
            vocabulary_ops.soft_embedding(hidden, table, 30.0, 0.8).sum().backward()
    allowed = pack_allowed(torch.ones(1, V, dtype=torch.bool)).expand(N, -1)
    for mask in (None, allowed):
        vocabulary_ops.token_stats(hidden, table, 30.0, 0.8, vector, mask)
    filters = Shaping(top_k=50, top_p=0.9, min_p=0.1)
    vocabulary_ops.token_stats(hidden, table, 30.0, 0.8, vector, shaping=filters)
    vocabulary_ops.token_stats(hidden, table, 30.0, 0.8, vector, allowed, Shaping(top_p=0.9))
    classes, is_seen = Classes.of(torch.arange(V) // 4096, 64), torch.zeros(N, V, dtype=torch.bool)
    for penalty, excluded in ((None, None), (Penalty(is_seen, vector, tokens), 4)):
        vocabulary_ops.class_stats(hidden, table, 30.0, 0.8, vector, classes, penalty, excluded)


@torch.no_grad()
def automaton() -> None:
    """Launch the walks of a constraint of 100 states over two canvases of 16."""
    successor, ways = torch.zeros(100, 5, dtype=torch.int64), torch.zeros(2, 16, 2, 100, 5, dtype=torch.float64)
    ahead = ways.new_zeros(2, 2, 101)
    look_ahead(successor, ways, ahead)
    reach(successor, ways[0], ahead[0])


# The calls to compile, by name.
OPS: dict[str, Callable[[], None]] = {
    "span_attention, d = 256": lambda: attention(256, 8, torch.bfloat16),
    "span_attention, d = 512": lambda: attention(512, 2, torch.bfloat16),
    "block_sparse": lambda: block_sparse(torch.bfloat16),
    "norms": lambda: norms(torch.bfloat16),
    "expert_mlp, 256 tokens": lambda: experts(256, torch.bfloat16),
    "expert_mlp, 2048 tokens": lambda: experts(2048, torch.bfloat16),
    "expert_mlp, 4096 tokens": lambda: experts(4096, torch.bfloat16),
    "expert_mlp, low rank": lambda: experts(4096, torch.bfloat16, rank=16),
    "expert_mlp, all ones": lambda: experts(1, torch.bfloat16, E=1, k=1, D=16, F=16),
    "fp8, 256 tokens": lambda: in_fp8(256, torch.bfloat16, False),
    "fp8, 4096 tokens": lambda: in_fp8(4096, torch.bfloat16, True),
    "nvfp4, 256 tokens": lambda: in_nvfp4(256, torch.bfloat16, True),
    "nvfp4, 2048 tokens": lambda: in_nvfp4(2048, torch.bfloat16, True),
    "nvfp4, 4096 tokens": lambda: in_nvfp4(4096, torch.bfloat16, True),
    "inference": lambda: inference(torch.bfloat16),
    "vocabulary": lambda: vocabulary(torch.bfloat16),
    "automaton": automaton,
}


class Driver:
    """Replaces a GPU's driver: Triton compiles for `architecture`, and keeps a cache for each architecture."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


Wanted = Callable[[str, dict[str, Any]], bool]  # called with a kernel's name and its arguments by name


class _Ended(Exception):
    """Raised to stop a compilation early; its argument is Triton's metadata so far."""


@contextmanager
def launches_compile(
    architecture: int,
    found: list[dict[str, Any]],
    wanted: Wanted | None = None,
    sizes_only: bool = False,
    loops: bool = True,
) -> Iterator[None]:
    """In the block a launch compiles its kernel instead, if it is wanted; figures of new kernels are added to `found`.

    Compilation stops after the sizes if a kernel does not fit, or always with `sizes_only`, since later stages take
    most of the time. wanted: None wants all. loops: also count the instructions in the loop of the products.
    """
    seen: set[Any] = set()
    launch, make_ptx = JITFunction.run, CUDABackend.make_ptx

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        if wanted is not None and not wanted(kernel.__name__, values):
            return
        try:
            compiled = launch(kernel, *arguments, grid=grid, warmup=True, **named)
            identity: Any = id(compiled)
            figures = _sizes(compiled.metadata._asdict()) | _code(compiled, loops)
        except _Ended as ended:
            identity, figures = str(values), _sizes(ended.args[0])
        except Exception as error:  # this Triton does not compile it; the other kernels still count
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            identity, figures = str(values), dict(shared=0, tensor_memory=0, error=reason)
        if identity not in seen:  # Triton caches one kernel for equal specialisations
            seen.add(identity)
            constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
            constants |= {name: named[name] for name in ("num_warps", "num_stages") if name in named}
            found.append(dict(kernel=kernel.__name__, architecture=architecture, constants=constants, **figures))

    def stop_or_go_on(backend: Any, source: Any, metadata: dict[str, Any], *rest: Any) -> Any:
        if sizes_only or not fits(dict(architecture=architecture, **_sizes(metadata))):
            raise _Ended(metadata)
        return make_ptx(backend, source, metadata, *rest)

    with (
        patch.object(driver, "_active", Driver(architecture)),
        patch.object(JITFunction, "run", run),
        patch.object(CUDABackend, "make_ptx", stop_or_go_on),
        patch.object(tiles, "architecture", lambda device: architecture),
    ):
        forget_sizes()
        yield
    forget_sizes()


def _sizes(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return bytes of shared memory, and columns of tensor memory."""
    return dict(shared=metadata["shared"], tensor_memory=metadata.get("tmem_size") or 0)


def _code(compiled: Any, loops: bool) -> dict[str, Any]:
    """Return the registers of a thread, bytes of its stack, and figures of matrix products.

    products: executed operations for each useful one (None without products). With `loops` the counts of `_loop` are
    added.
    """
    useful, executed = _useful(compiled.asm["ttir"]), _executed(compiled.asm["ptx"], compiled.metadata.num_warps)
    products, cubin = executed / useful if useful and executed else None, compiled.asm["cubin"]
    return dict(products=products, **_resources(cubin), **(_loop(cubin) if products and loops else {}))


def _useful(ttir: str) -> int:
    """Return the operations of the products as written, each counted once."""
    shapes = re.findall(r"tt\.dot .*tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x", ttir)
    return sum(2 * int(m) * int(k) * int(n) for m, k, n in shapes)


def _executed(ptx: str, warps: int) -> int:
    """Return the operations of the products in the loop with most of them, over all warps; some may be done twice.

    0 on sm_100, which issues its products once for all warps, without a shape in the instruction.
    """
    lines, labels, most = ptx.splitlines(), {}, 0
    for place, line in enumerate(lines):
        if label := re.match(r"\s*(\$L\w+):", line):
            labels[label[1]] = place
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)) and branch[1] in labels:
            loop = "\n".join(lines[labels[branch[1]] : place])
            found = re.findall(r"\b(w?g?mma)\S*\.m(\d+)n(\d+)k(\d+)\.", loop)
            sizes = ((2 * int(m) * int(n) * int(k), name) for name, m, n, k in found)
            most = max(most, sum(size * warps // (4 if name == "wgmma" else 1) for size, name in sizes))
    return most


def _resources(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and bytes of its stack, which holds spilled values."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _said_of(cubin, "cuobjdump", "--dump-resource-usage"))
    return {} if usage is None else dict(registers=int(usage[1]), stack=int(usage[2]))


@lru_cache(maxsize=256)
def _loop(cubin: bytes) -> dict[str, int]:
    """Count instructions in the loop with the most products.

    All instructions (`loop_instructions`), reads and writes of the stack (`loop_stack`), issued products (`issued`:
    wgmma and mma, fp8 with a Q), and waits for products (`waits`). If there are as many waits as products, no two
    overlap.
    """
    lines, labels, loop = _said_of(cubin, "nvdisasm", "-c", "-ndf").splitlines(), {}, ""
    products = r"\b[HQ]?G?MMA\b"
    for place, line in enumerate(lines):
        if label := re.match(r"\s*(\.L\S+):", line):
            labels[label[1]] = place
        elif (branch := re.search(r"\bBRA\b.*`\((\.L\S+)\)", line)) and branch[1] in labels:
            body = "\n".join(lines[labels[branch[1]] : place])
            loop = max(loop, body, key=lambda text: len(re.findall(products, text)))
    counted = dict(loop_stack=r"\b(?:LDL|STL)\b", issued=products, waits=r"\bWARPGROUP\.DEPBAR")
    counted |= dict(loop_instructions=r"(?m)^\s*/\*[0-9a-f]{4,}\*/")
    return {name: len(re.findall(pattern, loop)) for name, pattern in counted.items()}


def _said_of(cubin: bytes, tool: str, *options: str) -> str:
    """Return the output of a tool that comes with Triton, run on a compiled kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def compiled(
    call: Callable[[], None],
    architecture: int,
    wanted: Wanted | None = None,
    sizes_only: bool = False,
    loops: bool = True,
) -> list[dict[str, Any]]:
    """Return the figures of the kernels that a call launches on an architecture (90: sm_90).

    wanted: selects kernels (None: all).
    """
    found: list[dict[str, Any]] = []
    with launches_compile(architecture, found, wanted, sizes_only, loops):
        call()
    return found


def fits(line: dict[str, Any]) -> bool:
    """Return whether a kernel compiles and can be launched on its architecture."""
    if "error" in line:
        return False
    limit = tiles.SHARED_MEMORY[line["architecture"]]
    return line["shared"] <= limit and line["tensor_memory"] <= TENSOR_MEMORY


def main() -> int:
    """Print a Markdown table, or one JSON object per kernel; return 1 if a kernel does not fit, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--only", action="append", choices=OPS, help="an op (may be repeated); default: all")
    parser.add_argument(
        "--architecture", action="append", type=int, choices=tiles.SHARED_MEMORY, help="default: all of the table"
    )
    parser.add_argument("--sizes", action="store_true", help="shared and tensor memory only, in a third of the time")
    parser.add_argument(
        "--loops",
        action="append",
        choices=OPS,
        help="count what stands in the loops of an op (may be repeated); default: all",
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args()
    if not options.json:
        titles = ("sm", "op", "kernel", "constants", "shared KiB", "registers", "stack bytes", "executed / useful",
                  "stack in loop", "products issued, waits")  # fmt: skip
        print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    all_fit = True
    for architecture in options.architecture or tiles.SHARED_MEMORY:
        for name in options.only or OPS:
            for line in compiled(
                OPS[name], architecture, sizes_only=options.sizes, loops=name in (options.loops or OPS)
            ):
                all_fit &= fits(line)
                print(json.dumps(dict(op=name, **line)) if options.json else _row(name, line), flush=True)
    return 0 if all_fit else 1


def _row(name: str, line: dict[str, Any]) -> str:
    constants = ", ".join(f"{key} {value}" for key, value in line["constants"].items())
    shared = f"{line['shared'] / 1024:.0f}{'' if fits(line) else ': TOO LARGE'}"
    if "error" in line:
        shared = f"DOES NOT COMPILE: {line['error']}"
    products = f"{line['products']:.2f}" if line.get("products") else ""
    loop = (line["loop_stack"], f"{line['issued']}, {line['waits']}") if "issued" in line else ("", "")
    figures = (shared, line.get("registers"), line.get("stack"), products, *loop)
    return f"| {' | '.join(map(str, (line['architecture'], name, line['kernel'], constants, *figures)))} |"


if __name__ == "__main__":
    sys.exit(main())
