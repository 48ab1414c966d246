"""Files that cannot be trained on: for each its name, its content, where the fault is and a word of the reason."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GOOD = '{"prompt": "1+1=", "response": "2"}'
USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "hi"}
CALL = {"role": "assistant", "tool_calls": [{"name": "get"}]}
ANSWER = {"role": "tool", "content": "a"}


def line(**row: Any) -> str:
    """A good row, a blank line, and the bad row on line 3."""
    return f"{GOOD}\n\n{json.dumps(row)}\n{GOOD}\n"


def raw(text: str) -> str:
    return f"{GOOD}\n\n{text}\n{GOOD}\n"


def talk(*messages: Any) -> str:
    return line(messages=list(messages))


def parquet(*rows: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


PARQUET = parquet({"prompt": "a", "response": "b"}, {"prompt": "c", "response": None})
NOT_UTF8 = pa.array([b"fine", b"\xff\xfe"]).cast(pa.binary()).view(pa.string())


def parquet_of_bytes() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": NOT_UTF8, "response": ["x", "y"]}), file)
    return file.getvalue()


# name: (file name, content, place of the fault after the file's name, word of the reason)
CORPUS: dict[str, tuple[str, str | bytes, str, str]] = {
    "half a row": ("a.jsonl", raw('{"prompt": "a", "resp'), ":3: ", "not valid JSON"),
    "python instead of JSON": ("a.jsonl", raw("{'prompt': 'a'}"), ":3: ", "not valid JSON"),
    "two rows on a line": ("a.jsonl", raw(GOOD + GOOD), ":3: ", "not valid JSON"),
    "a comma after each row": ("a.jsonl", raw(GOOD + ","), ":3: ", "not valid JSON"),
    "nested too deeply": ("a.jsonl", raw("[" * 100_000), ":3: ", "nested"),
    "not a number": ("a.jsonl", raw('{"prompt": "a", "response": NaN}'), ":3: ", "NaN"),
    "a key twice": ("a.jsonl", raw('{"prompt": "a", "prompt": "b", "response": "c"}'), ":3: ", "appears twice"),
    "an endless integer": ("a.jsonl", raw('{"id": ' + "1" * 5000 + "}"), ":3: ", "integer"),
    "a list": ("a.jsonl", raw("[1]"), ":3: ", "the row is a list"),
    "null": ("a.jsonl", raw("null"), ":3: ", "the row is null"),
    "a text": ("a.jsonl", raw('"hello"'), ":3: ", "the row is a string"),
    "nothing in it": ("a.jsonl", raw("{}"), ":3: ", "neither messages nor prompt"),
    "misspelt": ("a.jsonl", line(promt="a", completion="b"), ":3: ", "'promt', 'completion'"),
    "no response": ("a.jsonl", line(prompt="a"), ":3: ", "response is missing"),
    "no prompt": ("a.jsonl", line(response="a"), ":3: ", "prompt is missing"),
    "a number as prompt": ("a.jsonl", line(prompt=1, response="a"), ":3: ", "prompt is a number"),
    "null as prompt": ("a.jsonl", line(prompt=None, response="a"), ":3: ", "prompt is null"),
    "several responses": ("a.jsonl", line(prompt="a", response=["b"]), ":3: ", "response is a list"),
    "an empty response": ("a.jsonl", line(prompt="a", response=""), ":3: ", "response is empty"),
    "half a surrogate pair": ("a.jsonl", raw('{"prompt": "\\ud800", "response": "a"}'), ":3: ", "surrogate"),
    "a list as id": ("a.jsonl", line(prompt="a", response="b", id=[1]), ":3: ", "id is a list"),
    "both forms": ("a.jsonl", line(prompt="a", response="b", messages=[]), ":3: ", "both messages and prompt"),
    "a system text without turns": ("a.jsonl", line(prompt="a", response="b", system="c"), ":3: ", "no turns"),
    "two lists of messages": ("a.jsonl", line(messages=[ASSISTANT], conversations=[]), ":3: ", "keep one"),
    "messages in an object": ("a.jsonl", line(messages={}), ":3: ", "messages is an object"),
    "messages in a text": ("a.jsonl", line(messages="[{}"), ":3: ", "not valid JSON"),
    "no messages": ("a.jsonl", line(messages=[]), ":3: ", "no assistant message"),
    "nobody answers": ("a.jsonl", talk(USER), ":3: ", "no assistant message"),
    "a text as message": ("a.jsonl", talk("hello"), ":3: ", "messages[0] is a string"),
    "no role": ("a.jsonl", talk({"content": "a"}), ":3: ", "messages[0] has no role"),
    "no content": ("a.jsonl", talk(USER, {"role": "assistant"}), ":3: ", "messages[1] has no content"),
    "an unknown role": ("a.jsonl", talk({"role": "wizard", "content": "a"}), ":3: ", "'wizard'"),
    "a second answer": ("a.jsonl", talk(USER, CALL, ANSWER, ANSWER, ASSISTANT), ":3: ", "every call before it"),
    "nothing to learn": ("a.jsonl", talk(USER, {**ASSISTANT, "weight": 0}), ":3: ", "not to be learnt"),
    "half a weight": ("a.jsonl", talk(USER, {**ASSISTANT, "weight": 0.5}), ":3: ", "weight is 0.5"),
    "a learnt question": ("a.jsonl", talk({**USER, "train": True}, ASSISTANT), ":3: ", "role user"),
    "a bad answer": ("a.jsonl", line(prompt="a", completion="b", label=False), ":3: ", "label is false"),
    "null as content": ("a.jsonl", talk({"role": "user", "content": None}, ASSISTANT), ":3: ", "content is null"),
    "an answer of spaces": ("a.jsonl", talk(USER, {**ASSISTANT, "content": " \n"}), ":3: ", "is empty"),
    "calls of tools": ("a.jsonl", talk(USER, {**ASSISTANT, "tool_calls": [{}]}), ":3: ", "tool_calls"),
    "a number as reasoning": ("a.jsonl", talk(USER, {**ASSISTANT, "reasoning": 4}), ":3: ", "reasoning is a number"),
    "a user who reasons": ("a.jsonl", talk({**USER, "reasoning": "x"}, ASSISTANT), ":3: ", "only an assistant"),
    "system in the middle": ("a.jsonl", talk(USER, {**USER, "role": "system"}, ASSISTANT), ":3: ", "role system"),
    "system twice": (
        "a.jsonl", line(system="a", messages=[{"role": "system", "content": "b"}, ASSISTANT]), ":3: ", "keep one",
    ),
    "a part without its image": (
        "a.jsonl",
        talk({"role": "user", "content": [{"type": "image"}]}, ASSISTANT),
        ":3: ",
        "have none",
    ),
    "a picture under another name": (
        "a.jsonl",
        talk({"role": "user", "content": [{"type": "image", "path": "a.png"}]}, ASSISTANT),
        ":3: ",
        "has its image as 'path'",
    ),
    "a film": ("a.jsonl", talk({"role": "user", "content": [{"type": "video"}]}, ASSISTANT), ":3: ", "is 'video'"),
    "a sound": ("a.jsonl", talk({"role": "user", "content": [{"type": "audio"}]}, ASSISTANT), ":3: ", "is 'audio'"),
    "an address": (
        "a.jsonl",
        talk({"role": "user", "content": [{"type": "image", "image": "https://x.y/a.png"}]}, ASSISTANT),
        ":3: ",
        "URLs are not fetched",
    ),
    "an address of OpenAI's form": (
        "a.jsonl",
        talk({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x.y/a.png"}}]}, ASSISTANT),
        ":3: ",
        "URLs are not fetched",
    ),
    "an address of a file": ("a.jsonl", line(prompt="a", response="b", image="file:///a.png"), ":3: ", "not fetched"),
    "an address in a list": ("a.jsonl", line(prompt="a", response="b", images=["ftp://a.png"]), ":3: ", "images[0]"),
    "a data URI of a text": ("a.jsonl", line(prompt="a", response="b", image="data:text/plain,a"), ":3: ", "data URI"),
    "broken base64": ("a.jsonl", line(prompt="a", response="b", image="data:image/png;base64,a"), ":3: ", "base64"),
    "a number as image": ("a.jsonl", line(prompt="a", response="b", image=3), ":3: ", "image is a number"),
    "image and images": ("a.jsonl", line(prompt="a", response="b", image="a", images=["b"]), ":3: ", "keep one"),
    "a column of films": ("a.jsonl", line(prompt="a", response="b", videos=["a.mp4"]), ":3: ", "videos is there"),
    "too many markers": ("a.jsonl", line(prompt="<image><image>", response="b", image="a"), ":3: ", "2 of <image>"),
    "too few markers": (
        "a.jsonl",
        line(messages=[{"role": "user", "content": "<image>"}, ASSISTANT], images=["a", "b"]),
        ":3: ",
        "1 of <image>",
    ),
    "an image of the assistant": (
        "a.jsonl",
        talk(USER, {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}),
        ":3: ",
        "only a user's message",
    ),
    "images here and there": (
        "a.jsonl",
        line(messages=[{"role": "user", "content": [{"type": "image", "image": "a"}]}, ASSISTANT], images=["b"]),
        ":3: ",
        "in one way",
    ),
    "an unknown speaker": ("a.jsonl", line(conversations=[{"from": "elf", "value": "a"}]), ":3: ", "from 'elf'"),
    "a speaker without words": ("a.jsonl", line(conversations=[{"from": "gpt"}]), ":3: ", "has no value"),
    "not UTF-8": ("a.jsonl", GOOD.encode() + b'\n{"prompt": "\xff"}\n', ":2: ", "not valid UTF-8"),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), ":1: ", "not valid UTF-8"),
    "zeros after a crash": ("a.jsonl", GOOD.encode() + b"\n" + b"\0" * 64, ":2: ", "not valid JSON"),
    "an empty file": ("a.jsonl", "", ": ", "has no rows"),
    "a file of blank lines": ("a.jsonl", "\n \n", ": ", "has no rows"),
    "half a gzip file": ("a.jsonl.gz", gzip.compress(GOOD.encode() * 999)[:-9], ": ", "not a whole gzip file"),
    "no gzip file": ("a.jsonl.gz", GOOD, ": ", "not a whole gzip file"),
    "half a list": ("a.json", f"[{GOOD},\n{GOOD}", ":row 2: ", "the list ends in the middle"),
    "a list without commas": ("a.json", f"[{GOOD}\n{GOOD}]", ":row 1: ", "a comma is missing"),
    "a bad element": ("a.json", f"[{GOOD},\n{{'a'}}]", ":row 2: ", "not valid JSON"),
    "an element too many": ("a.json", f"[{GOOD},]", ":row 2: ", "not valid JSON"),
    "not a number in a list": ("a.json", f"[{GOOD}, NaN]", ":row 2: ", "NaN"),
    "a text after the list": ("a.json", f"[{GOOD}]\n{GOOD}", ":1: ", "something follows the list"),
    "a bad row in a list": ("a.json", f'[{GOOD}, {{"prompt": "a"}}]', ":row 2: ", "response is missing"),
    "a bad row in data": ("a.json", f'{{"data": [{GOOD}, 3]}}', ":row 2: ", "the row is a number"),
    "an object broken off": ("a.json", '\n{"data": [', ":2: ", "not valid JSON"),
    "an empty list": ("a.json", "[]", ": ", "has no rows"),
    "a text in place of a document": ("a.json", "\nhello", ":2: ", "neither a list nor an object"),
    "a document that is not UTF-8": ("a.json", f"[{GOOD},\n".encode() + b'"\xff"]', ":2: ", "not valid UTF-8"),
    "a field too many": ("a.csv", "prompt,response\na,b\nc,d,e\n", ":3: ", "3 fields under 2"),
    "a field too few": ("a.csv", 'prompt,response\n"a\nb",c\nd\n', ":4: ", "1 fields under 2"),
    "an open quote": ("a.csv", 'prompt,response\na,b\nc,"d\ne,f\n', ":3: ", "not valid CSV"),
    "a column twice": ("a.csv", "prompt,prompt\na,b\n", ":1: ", "appears twice"),
    "a column without a name": ("a.csv", "prompt,\na,b\n", ":1: ", "no name"),
    "no column names": ("a.csv", "1+1=,2\n2+2=,4\n", ":2: ", "'1+1=', '2'"),
    "semicolons": ("a.csv", "prompt;response\na;b\n", ":2: ", "'prompt;response'"),
    "an empty cell": ("a.csv", "prompt,response\na,\n", ":2: ", "response is empty"),
    "column names only": ("a.csv", "prompt,response\n", ": ", "has no rows"),
    "a table that is not UTF-8": ("a.csv", b"prompt,response\na,\xff\n", ":2: ", "not valid UTF-8"),
    "commas in place of tabs": ("a.tsv", "prompt,response\na,b\n", ":2: ", "'prompt,response'"),
    "null in parquet": ("a.parquet", PARQUET, ":row 2: ", "response is null"),
    "half a parquet file": ("a.parquet", PARQUET[:-9], ": ", "not a whole parquet file"),
    "no parquet file": ("a.parquet", GOOD, ": ", "not a whole parquet file"),
    "parquet with bytes": ("a.parquet", parquet({"prompt": b"a", "response": "b"}), ":row 1: ", "prompt is bytes"),
    "parquet that is not UTF-8": ("a.parquet", parquet_of_bytes(), ":row 2: ", "not valid UTF-8"),
    "parquet without rows": ("a.parquet", parquet(*[]), ": ", "has no rows"),
    "no Arrow file": ("a.arrow", GOOD, ": ", "not a whole Arrow file"),
    "a kind of file nobody knows": ("a.txt", GOOD, ": ", "not a file of rows"),
    "a packed parquet file": ("a.parquet.gz", gzip.compress(PARQUET), ": ", "not a file of rows"),
}  # fmt: skip
