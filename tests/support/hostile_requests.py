"""Odd values in every field of a request: each is answered or refused, and none raises in the engine's thread."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.errors import RequestError
from blockdiff.sampling import Engine, Request, Sampler

VALUES: tuple[Any, ...] = (
    *(10**20, -(10**20), 2**63, 2**64, -1, 0, 1e308, -1e308, 1e-308, float("inf"), float("nan"), -0.0, 3.5),
    *(True, None, "", "a", "\ud800", "a\ud800b", "\x00", b"x", "x" * 5000, object()),
    *([], {}, [None], ["\ud800"], [""], [2**70], [-1], [True], (1,), {"a": "\ud800"}, {"type": "\ud800"}),
)
STRATEGIES = (
    *("entropy_bound:stability", "entropy_bound:confidence", "entropy_bound:t_min", "entropy_bound:top_k"),
    *("entropy_bound:top_p", "next_token:temperature", "next_token:top_k", "next_token:top_p", "next_token:min_p"),
    *("verified:steps", "ddim:t_max", "confident:threshold", "quota:quota", "nosuch:entropy_bound"),
)
NUMBERS = (
    "9" * 20,
    "9" * 400,
    str(2**63 - 1),
    "-1",
    "0",
    "1e308",
    "1e-320",
    "nan",
    "inf",
    "-inf",
    "\ud800",
    "",
    "0x10",
)
OTHERS: tuple[dict[str, Any], ...] = (
    *({"regex": each} for each in ("a{99999}", "\ud800", "[\ud800-\uffff]", "(", "\\u0000", "." * 50)),
    *({"template": each} for each in ("<?99999999>", "<?a:0>", "<?\ud800>", "\ud800<?3>", "<?0>")),
    *({"json_schema": {"type": "string", "pattern": each}} for each in ("\ud800", "(")),
    *({"json_schema": {"type": "integer", "minimum": each}} for each in (10**400, float("nan"), "1")),
    *({"json_schema": {"type": "array", "minItems": each}} for each in (10**9, -1, 2**70)),
    {"json_schema": {"enum": ["\ud800"]}},
    {"json_schema": {"const": float("inf")}},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "\ud800", "content": "a"}]},
)


def odd_requests(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The fields of so many requests: every value in every field in turn, then two odd fields at once."""
    fields = [field.name for field in dataclasses.fields(Request) if field.name != "id"]
    given = [{name: value} for name in fields for value in VALUES]
    given += [{"strategy": f"{strategy}={number}"} for strategy in STRATEGIES for number in NUMBERS]
    chosen = random.Random(seed)
    chosen.shuffle(given)
    yield from [*OTHERS, *given][:count]
    for _ in range(count - len(OTHERS) - len(given)):
        yield {name: chosen.choice(VALUES) for name in chosen.sample(fields, 2)}


def failures(count: int) -> list[str]:
    """The requests that raised something else than RequestError, with what they raised."""
    model, tokenizer = init("tiny", seed=3, device="cpu", kernels="torch"), byte_level_bpe(["hello there"], 300)
    tokenizer.chat_template = packaged_template()
    settings = Sampler(model, tokenizer, Generation(max_steps=3, max_new_tokens=16, eos_ids=(1,))).settings
    engine, found = Engine(model, settings=settings), []
    for number, case in enumerate(odd_requests(count)):
        has_prompt = any(case.get(name) is not None for name in ("prompt", "messages", "tokens"))
        try:
            engine.submit(Request(number, **{**({} if has_prompt else {"prompt": "hi"}), **case}))
            while engine.step():
                pass
        except RequestError:
            continue
        except Exception as error:  # whatever it is, it would have ended all requests of a server
            found.append(f"{case!r:.80}: {type(error).__name__}: {error!s:.80}")
            engine = Engine(model, settings=settings)
    return found
