"""Random regular expressions over a few letters, in a syntax that Python's `re` and Rust's regex crate share."""

from __future__ import annotations

import random


def random_regex(generator: random.Random, letters: str, depth: int = 3) -> str:
    """An expression nested to `depth`."""
    if depth == 0:
        return generator.choice([*letters, f"[{''.join(sorted(generator.sample(letters, min(2, len(letters)))))}]"])
    inner = [random_regex(generator, letters, depth - 1) for _ in range(generator.randint(1, 3))]
    kind = generator.randrange(4)
    if kind == 0:
        return f"(?:{'|'.join(inner)})"
    if kind == 1:
        return f"(?:{inner[0]}){generator.choice(['*', '+', '?', '*?', '{1,2}', '{2}'])}"
    return "".join(inner)
