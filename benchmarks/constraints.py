"""What a denoising step costs under a constraint, at the released vocabulary's size.

    python -m benchmarks.constraints [--vocab 262144] [--hidden 64] [--length 256] [--rows 1] [--output FILE.json]

The constraint is a JSON schema of two fields; the texts of the vocabulary are made up (words, numbers, punctuation,
characters of three bytes). The hidden size is small, so that the products with the table do not hide the rest. It also
prints the peak memory for one row and for more, which does not grow with rows times vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.timing import peak_memory
from blockdiff.kernels import resolve
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.sampling.constraints.automaton import Tokens, of_bytes
from blockdiff.sampling.constraints.byte_automaton import of_regex
from blockdiff.sampling.constraints.json_schema import regex_of_schema
from blockdiff.sampling.constraints.paths import completable, paths
from blockdiff.sampling.control import CanvasControl
from blockdiff.sampling.held import held_canvases
from blockdiff.sampling.predict import predict

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
EOS, PAD = 1, 0
PUNCTUATION = ' "{}[]:,.;!?()-_/\\\n\t=+*<>#@&%$'


def made_up_texts(size: int, seed: int = 0) -> list[bytes]:
    """Texts of so many tokens: two special ones, every byte, then words, punctuation and characters of three bytes."""
    generator = random.Random(seed)
    texts = {bytes([byte]): None for byte in range(256)}
    while len(texts) < size - 2:
        kind, length = generator.random(), generator.randint(1, 4)
        if kind < 0.7:
            word = "".join(generator.choices("etaoinshrdlucmfwypvbgkjqxz", k=length + generator.randint(1, 6)))
            word = generator.choice(["", " "]) + (word.capitalize() if kind < 0.2 else word)
        elif kind < 0.8:
            word = "".join(generator.choices(PUNCTUATION, k=length))
        else:
            word = "".join(chr(generator.randint(0x4E00, 0x9FFF)) for _ in range(length))
        texts[word.encode()] = None
    return [b"", b"", *texts]


def measure(vocab: int, hidden: int, length: int, rows: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Seconds to make the automaton, its sizes, milliseconds of the parts of a step, and peak bytes."""
    started = time.perf_counter()
    tokens = Tokens(made_up_texts(vocab), vocab)
    read = time.perf_counter()
    automaton = of_bytes(of_regex(regex_of_schema(SCHEMA)), tokens, [EOS], PAD)
    built = time.perf_counter()

    generator = torch.Generator().manual_seed(0)
    vocabulary = Vocabulary(vocab, hidden, 30.0, resolve("auto" if device.type == "cuda" else "torch")).to(device)
    with torch.no_grad():
        vocabulary.table.copy_(torch.randn(vocab, hidden, generator=generator))
    model: Any = SimpleNamespace(vocabulary=vocabulary, vocab_size=vocab)
    hidden_BLD = (torch.randn(rows, length, hidden, generator=generator) * 0.5).to(device)
    uniform_BL = torch.rand(rows, length, generator=generator).to(device)
    canvas_BL = torch.zeros(rows, length, dtype=torch.int64, device=device)
    moved = automaton.on(device)
    final_S = completable(automaton, 0).to(device)
    controls = [
        CanvasControl(0, row, classes=moved.classes, automaton=moved, is_final_S=final_S) for row in range(rows)
    ]
    stats = vocabulary.class_stats(hidden_BLD, 0.7, uniform_BL, moved.classes)
    numbers_BL2 = torch.stack((uniform_BL, uniform_BL.flip(-1)), -1)
    start_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def held(count: int) -> Callable[[], object]:
        inputs = hidden_BLD[:count], canvas_BL[:count], 0.7, uniform_BL[:count]
        together, step_B = held_canvases(controls[:count], length, vocab, device), torch.zeros_like(start_B[:count])
        return lambda: predict(model, *inputs, held=together, step_B=step_B)

    parts = {
        "free": lambda: predict(model, hidden_BLD, canvas_BL, 0.7, uniform_BL),
        "held": held(rows),
        "held: statistics of classes": lambda: vocabulary.class_stats(hidden_BLD, 0.7, uniform_BL, moved.classes),
        "held: best, random and marginal": lambda: paths(
            moved, stats.log_sum, stats.maximum, start_B, final_S.expand(rows, -1), numbers_BL2
        ),
    }
    milliseconds = {}
    with torch.no_grad():
        for name, work in parts.items():
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                work()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - began)
            milliseconds[name] = 1e3 * sorted(times[1:])[repeats // 2]
        peaks = {count: peak_memory(held(count), device) for count in sorted({1, rows})}
    return {
        "vocabulary": vocab,
        "hidden": hidden,
        "length": length,
        "rows": rows,
        "states": automaton.states,
        "classes": automaton.next_SC.shape[1],
        "edges": len(automaton.pair_E),
        "seconds to read the texts once": read - started,
        "seconds to make the automaton once": built - read,
        "milliseconds": milliseconds,
        "peak bytes by rows": peaks,
        "machine": describe(device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constraints", description=str(__doc__).split("\n")[0])
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.vocab, options.hidden, options.length, options.rows, options.repeats
    found = measure(*sizes, torch.device(options.device))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{found['states']} states, {found['classes']} classes of tokens, {found['edges']} edges")
    for name in ("seconds to read the texts once", "seconds to make the automaton once"):
        print(f"{name}: {found[name]:.2f}")
    for name, value in found["milliseconds"].items():
        print(f"{name:34} {value:9.1f} ms per step of {options.rows} x {options.length} positions")
    for count, peak in found["peak bytes by rows"].items():
        print(f"peak with {count} rows: {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
