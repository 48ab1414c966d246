"""Reading a prompts file: what its lines become, and that a file without a prompt is refused."""

from __future__ import annotations

import gzip
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
        Request("x", messages=tuple(CHAT)),
        Request(5, prompt="c", seed=7),
    ]


BAD = {
    b"\xff": "not valid UTF-8",
    b"{": "not valid JSON",
    b"3": "not an object",
    b"{}": "neither messages nor prompt (keys: none)",
    b'{"promtp": "a"}': "did you mean 'prompt' by 'promtp'",
    b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}': "both messages and prompt",
    b'{"prompt": "a", "prompt": "b"}': "the key 'prompt' appears twice",
    b'{"prompt": "a", "seed": NaN}': "NaN is not JSON",
    b'{"prompt": "a", "temperature": 1}': "'temperature' is a setting that no line can have",
    b'{"prompt": "a", "num-return-sequence": 2}': "'num-return-sequence' is a setting that no line can have",
    b'{"prompt": "a", "Seed": 1}': "'Seed' is no option of a request; did you mean 'seed'?",
    b'{"messages": [{"role": "user", "content": "a"}], "template_options": "b"}': "template_options must be an object",
    b'{"prompt": "a", "scores": "yes"}': "scores must be true or false, got 'yes'",
    b'{"prompt": "a", "allow_control_tokens": true}': "'allow_control_tokens' is a setting that no line can have",
    b'{"prompt": 3}': "prompt is a number",
    b'{"messages": []}': "messages has no message",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "left to answer",
    b'{"prompt": "a", "seed": "x"}': "seed must be an integer",
    b'{"prompt": "a", "id": 1.5}': "id must be a string or an integer",
    b'{"prompt": "a", "id": "\\ud800", "seed": 1}': "id has half of a surrogate pair",
    b'{"prompt": "a", "seed": 18446744073709551616}': "seed must be an integer from 0 to 2**64 - 1",
    b'{"prompt": "b", "id": 1}': "the id 1 is that of line 1 already",
}


def test_prompts_are_the_rows_that_training_reads(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    call = {"role": "assistant", "tool_calls": [{"name": "get", "arguments": "{}"}]}
    lines = [
        {"messages": parts},
        {"conversations": [{"from": "human", "value": "a"}], "score": 3, "source": "web", "steps": 2, "label": "x"},
        {"instruction": "a", "output": "b"},
        {"prompt": "a", "completion": "b", "seed": None},
        {"messages": [*CHAT, call, {"role": "tool", "content": "b"}], "tools": [{"name": "get"}]},
        {"messages": [{"role": "user", "content": "a"}], "system": "s"},
        {"messages": [*CHAT, {"role": "assistant", "content": "b"}]},
    ]
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + "\n \n".join(map(json.dumps, lines)).encode()))
    entries = read_prompts(path)
    assert [entry.messages for entry in entries[:3]] == [tuple(CHAT)] * 3
    assert entries[3] == Request(7, prompt="a")
    assert entries[4].messages[2] == {"role": "tool", "content": "b", "name": "get"}
    assert entries[4].tools[0]["function"]["name"] == "get"
    assert entries[5].messages == ({"role": "system", "content": "s"}, *CHAT)
    assert entries[6].messages == tuple(CHAT)


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
    with pytest.raises(DataError, match="no prompt"):
        read_prompts(tmp_path / "p.jsonl")
