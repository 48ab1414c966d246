"""Random JSON schemas with formats, patterns and recursion: every text that a constraint lets through is valid.

`python -m benchmarks.random_schemas --count 300` prints one JSON line; jsonschema judges, formats included.
"""

from __future__ import annotations

import argparse
import json

from tests.support.random_schemas import invalid_texts


def main() -> None:
    """Judge the texts of as many schemas as asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_schemas", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    found = [invalid_texts(seed) for seed in range(parser.parse_args().count)]
    invalid = [{"seed": seed, "texts": texts} for seed, (_, texts) in enumerate(found) if texts]
    refused = sum(judged == 0 for judged, _ in found)
    numbers = {"schemas": len(found), "refused": refused, "texts": sum(judged for judged, _ in found)}
    print(json.dumps({**numbers, "invalid": invalid}))


if __name__ == "__main__":
    main()
