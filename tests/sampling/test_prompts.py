"""Reading a prompts file: what its lines become, and that a file without a prompt is refused."""

from __future__ import annotations

import json

import pytest

from blockdiff.errors import DataError
from blockdiff.sampling import Request, Result, read_prompts

pytestmark = pytest.mark.quick

CHAT = [{"role": "user", "content": "a"}]


def test_a_line_is_a_request_with_its_number_as_id_and_other_keys_are_left_alone(tmp_path):
    lines = [{"prompt": "a", "response": "b"}, {"id": "x", "messages": CHAT}, {"prompt": "c", "seed": 7, "id": None}]
    text = "\n\n".join(map(json.dumps, lines))
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_prompts(tmp_path / "p.jsonl") == [
        Request(1, prompt="a"),
        Request("x", messages=CHAT),
        Request(5, prompt="c", seed=7),
    ]


BAD = {
    b"\xff": "not UTF-8",
    b"{": "not valid JSON",
    b"3": "not an object",
    b"{}": "neither prompt nor messages",
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}': "exactly one of prompt, messages",
    b'{"prompt": 3}': "prompt must be text",
    b'{"messages": []}': "at least one entry",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "left to answer",
    b'{"prompt": "a", "seed": "x"}': "seed must be an integer",
    b'{"prompt": "a", "id": 1.5}': "id must be a string or an integer",
    b'{"prompt": "a", "id": "\\ud800", "seed": 1}': "id has half of a surrogate pair",
    b'{"prompt": "a", "seed": 18446744073709551616}': "seed has 64 bits at most",
    b'{"prompt": "b", "id": 1}': "the id 1 is that of line 1 already",
}


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_no_prompt_is_a_failed_result_that_says_where(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    good, bad = read_prompts(path)
    assert good == Request(1, prompt="a")
    assert isinstance(bad, Result) and bad.finish_reason == "error"
    assert str(bad.error).startswith(f"{path}:2: ") and BAD[line] in str(bad.error)
    path.write_bytes(b"\n" + line.replace(b'"id": 1}', b'"id": []}') + b"\n")
    with pytest.raises(DataError, match=r"p\.jsonl:2: [^\n]*$"):
        read_prompts(path)


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"p\.jsonl: No such file or directory; name a JSONL file"):
        read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(tmp_path / "p.jsonl")
