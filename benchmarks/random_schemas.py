"""JSON schemas: how many of each kind compile, which keywords are refused, and that all their texts are valid.

`python -m benchmarks.random_schemas --count 60` prints one JSON line: of each kind of `tests/support/schema_kinds.py`
the schemas that compile within the states that a constraint may have, the refused keywords by number, and the texts
that jsonschema finds invalid, formats included; `random` schemas have formats, patterns and recursion.
"""

from __future__ import annotations

import argparse
import collections
import json
import re

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.json_schema import schema_automaton
from blockdiff.sampling.constraints.token_automaton import MOST_STATES
from tests.support.random_schemas import invalid_texts
from tests.support.schema_kinds import KINDS, schema_of_kind

REFUSED = re.compile(r"the JSON schema(?:'s| says) (\$?\w+)")


def main() -> None:
    """Compile the requested number of schemas of each kind, and validate their texts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_schemas", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--texts", type=int, default=10, help="tries of a text of each schema")
    options = parser.parse_args()
    compiled, refused, texts, invalid = collections.Counter[str](), collections.Counter[str](), 0, list[str]()
    for kind in (*KINDS, "random"):
        for seed in range(options.count):
            if kind != "random":
                try:
                    is_small = schema_automaton(schema_of_kind(kind, seed)).states < MOST_STATES
                except RequestError as error:
                    found = REFUSED.match(str(error))
                    refused["states" if found is None else found[1]] += 1
                    continue
                compiled[kind] += is_small
                refused["states"] += not is_small
            judged, wrong = invalid_texts(kind, seed, options.texts)
            texts += judged
            invalid += [f"{kind} {seed}: {text}" for text in wrong]
    share = sum(compiled[kind] for kind in KINDS) / (options.count * len(KINDS))
    numbers = {"compiled": compiled, "share": round(share, 3), "refused": dict(refused.most_common())}
    print(json.dumps({"schemas_of_each_kind": options.count, **numbers, "texts": texts, "invalid": invalid}))


if __name__ == "__main__":
    main()
