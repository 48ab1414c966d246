"""What the Triton kernels compile to for an H200, on any machine: `python -m benchmarks.compiled`. Nothing runs.

The ops are called on CPU tensors with every launch replaced by a compilation for sm_90, so that exactly the kernels
that the model launches are looked at. Needs triton with its bundled ptxas and cuobjdump, not TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from blockdiff.kernels.expert_mlp.triton import expert_mlp
from blockdiff.kernels.norm_rope.triton import add_rms_norm, norm_rope, rms_norms
from blockdiff.kernels.span_attention.triton import span_attention
from blockdiff.kernels.vocabulary import pack_allowed
from blockdiff.kernels.vocabulary import triton as vocabulary_ops
from blockdiff.spans import denoise_spans

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # bytes that a block of an H200 can have
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
TYPES |= {torch.bool: "i1", torch.uint8: "u8"}


def attention(head_dim: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Forward, split forward and backward of the released model's attention: 16 query heads, canvases of 256."""
    keys = torch.zeros(1, 256, kv_heads, head_dim, dtype=dtype, requires_grad=True)
    q = torch.zeros(1, 256, 16, head_dim, dtype=dtype, requires_grad=True)
    start = torch.tensor([[256]])
    spans = denoise_spans(start, torch.zeros_like(start), start, 256)
    out = span_attention(q, keys, keys, keys, keys, spans, 1.0)
    assert isinstance(out, Tensor)
    out.sum().backward()
    torch.ops.blockdiff.span_attention(q, keys, keys, keys, keys, spans.bounds_BT4, 1.0, 2)


def norms(dtype: torch.dtype) -> None:
    """The norms of the released model, forward and backward: hidden states and heads of both layer kinds."""
    x, w = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((1, 64, 2816), (2816,)))
    sum(out.sum() for out in rms_norms(x, (w, w, None), 1e-6)).backward()  # type: ignore[union-attr]
    add_rms_norm(x, x, w, 1e-6, torch.ones(1, dtype=dtype)).sum().backward()
    for d in (256, 512):
        heads, w = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((1, 64, 16, d), (d,)))
        cos = torch.zeros(1, 64, d, dtype=dtype)
        norm_rope(heads, w, cos, cos, 1e-6).sum().backward()
        rms_norms(heads, (None,), 1e-6)[0].sum().backward()


def experts(tokens: int, dtype: torch.dtype, E: int = 128, k: int = 8, D: int = 2816, F: int = 704) -> None:
    """Experts of the released model's sizes, forward and backward with everything trained."""
    x, gate_up, down = (
        torch.empty(*shape, dtype=dtype, requires_grad=True)  # gigabytes that are never touched
        for shape in ((tokens, D), (E, 2 * F, D), (E, D, F))
    )
    index, weight = torch.zeros(tokens, k, dtype=torch.int64), torch.zeros(tokens, k, requires_grad=True)
    expert_mlp(x, gate_up, down, index, weight).sum().backward()


def vocabulary(dtype: torch.dtype) -> None:
    """Every vocabulary op at the released model's 262,144 tokens, with all options and with none."""
    N, V, D = 16, 262_144, 16
    hidden, table = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((N, D), (V, D)))
    tokens, vector = torch.zeros(N, dtype=torch.int64), torch.zeros(N)
    options = tokens, vector, vector > 0
    for chosen, chunk_bytes in (((), 1 << 24), (options, 1 << 20)):  # dloss/dx kept, and made again
        cross_entropy: Callable[..., Tensor] = vocabulary_ops.linear_cross_entropy
        loss = cross_entropy(hidden, table, tokens, 30.0, *chosen, chunk_bytes=chunk_bytes)
        loss.sum().backward()
        vocabulary_ops.token_scores(hidden, table, tokens, 30.0, *chosen[:2])
        vocabulary_ops.soft_embedding(hidden, table, 30.0, 0.8, chunk_bytes).sum().backward()
    allowed = pack_allowed(torch.ones(1, V, dtype=torch.bool)).expand(N, -1)
    for given, mask in ((None, None), (tokens, allowed)):
        vocabulary_ops.token_stats(hidden, table, 30.0, 0.8, vector, given, mask)


# What is compiled under a name; each op adds its own.
OPS: dict[str, Callable[[], None]] = {
    "span_attention, d = 256": lambda: attention(256, 8, torch.bfloat16),
    "span_attention, d = 512": lambda: attention(512, 2, torch.bfloat16),
    "norms": lambda: norms(torch.bfloat16),
    "expert_mlp, 256 tokens": lambda: experts(256, torch.bfloat16),
    "expert_mlp, 2048 tokens": lambda: experts(2048, torch.bfloat16),
    "expert_mlp, 4096 tokens": lambda: experts(4096, torch.bfloat16),
    "expert_mlp, all ones": lambda: experts(1, torch.bfloat16, E=1, k=1, D=16, F=16),
    "vocabulary": lambda: vocabulary(torch.bfloat16),
}


@contextmanager
def launches_compile(found: list[dict[str, Any]]) -> Iterator[None]:
    """Within it a launch compiles its kernel, once for equal constants, and adds the figures to `found`."""
    seen: set[str] = set()
    launch = JITFunction.run

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or _is_one(values[p.name])}
        signature = {name: "constexpr" if name in constants else _type(values[name]) for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants, _divisible(kernel, values, constants))
        if (key := f"{kernel.__name__} {signature} {constants} {options}") not in seen:
            seen.add(key)
            compiled = triton.compile(source, target=TARGET, options=options)
            sizes = {name: value for name, value in constants.items() if not isinstance(value, str)}
            figures = dict(shared=compiled.metadata.shared, **_resources(compiled.asm["cubin"]))
            found.append(dict(kernel=kernel.__name__, **figures, constants=sizes | options))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def _is_one(value: Any) -> bool:
    """Triton makes a constant of every integer that happens to be 1."""
    return type(value) is int and value == 1


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def _divisible(kernel: JITFunction, values: dict[str, Any], constants: dict[str, Any]) -> dict[Any, Any]:
    """The promise that triton would make: pointers and multiples of 16 are divisible by 16."""
    fits = (
        name not in constants and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0))
        for name, value in ((name, values[name]) for name in kernel.arg_names)
    )
    return {(place,): [["tt.divisibility", 16]] for place, is_divisible in enumerate(fits) if is_divisible}


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes of its stack: what did not fit into them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", words)
    return {} if usage is None else dict(registers=int(usage[1]), stack=int(usage[2]))


def compiled(name: str) -> list[dict[str, Any]]:
    """Kernel, bytes of shared memory and stack, registers and constants of everything an op of OPS launches."""
    found: list[dict[str, Any]] = []
    with launches_compile(found):
        OPS[name]()
    return found


def main() -> None:
    """Prints a Markdown table, or one JSON object per kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--only", action="append", choices=OPS, help="an op (may be repeated); default: all")
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args()
    if not options.json:
        print("| op | kernel | constants | shared KiB | registers | stack bytes |\n|---|---|---|---|---|---|")
    for name in options.only or OPS:
        for line in compiled(name):
            if options.json:
                print(json.dumps(dict(op=name, **line)), flush=True)
                continue
            constants = ", ".join(f"{key} {value}" for key, value in line["constants"].items())
            cells = (name, line["kernel"], constants, f"{line['shared'] / 1024:.0f}")
            print(f"| {' | '.join([*cells, str(line.get('registers')), str(line.get('stack'))])} |", flush=True)


if __name__ == "__main__":
    main()
