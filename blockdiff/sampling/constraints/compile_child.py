"""A program that calls outlines-core in a process of its own, which can be ended when it takes too long.

It reads one line of JSON: `regex`, the most `states`, and the most `bytes` of memory. It writes one line of JSON,
followed by the state after each byte (int32 [states, 256], -1 for none) and one byte for each state, 1 if it is final.
`outlines.py` runs it.
"""

import array
import json
import resource
import sys
from contextlib import suppress
from typing import Any

# A character that no text contains, added to the end of every text. Without it the automaton of outlines-core stops at
# the first match in the order of the alternatives, so `a|ab` would not accept "ab".
END = "\U0010ffff"


def main() -> None:
    """Answer one request, within the memory limit that it contains."""
    request = json.loads(sys.stdin.readline())
    with suppress(ValueError, OSError):  # the machine has no such limit, or a lower one already
        resource.setrlimit(resource.RLIMIT_AS, (request["bytes"], request["bytes"]))
    head, body = answer(request)
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + body)


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Compile the request's `regex` with outlines-core.

    Returns the first line of the answer, and the automaton's bytes, which follow it. If there is no automaton, the line
    has the cause and there are no bytes.
    """
    try:
        return _automaton(request["regex"], request["states"])
    except ImportError:
        return {"missing": True}, b""
    except (TypeError, ValueError) as error:
        return {"error": " ".join(str(error).split())}, b""


def _automaton(regex: str, most_states: int) -> tuple[dict[str, int], bytes]:
    from outlines_core import Index, Vocabulary

    single_bytes = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    Index(regex, single_bytes)  # raises its own errors: the group below could close what `regex` leaves open
    index = Index(f"(?:{regex}){END}", single_bytes)
    edges, finals = index.get_transitions(), index.get_final_states()
    if len(edges) > most_states:
        return {"states": len(edges)}, b""
    places: dict[int, int] = {index.get_initial_state(): 0}
    for state in {*edges, *(following for row in edges.values() for following in row.values())}:
        places.setdefault(state, len(places))
    after = array.array("i", [-1]) * (256 * len(places))
    for state, row in edges.items():
        first = 256 * places[state]
        for byte, following in row.items():
            if byte < 256:
                after[first + byte] = places[following]
    is_final = bytearray(len(places))
    for state in finals:
        is_final[places[state]] = 1
    return {"states": len(places)}, after.tobytes() + bytes(is_final)


if __name__ == "__main__":
    main()
