"""Bodies that somebody sends to do harm: files of the server, its memory, its event loop, other people's answers."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest
from PIL import Image

from benchmarks.hostile_requests import failures
from blockdiff.serving.bodies import parsed_body
from blockdiff.serving.completions import PATH as COMPLETIONS
from blockdiff.serving.protocol import ChatRequest, CompletionRequest
from blockdiff.serving.reads import ReadRequest
from blockdiff.serving.refusals import Refused
from tests.asking import served

pytestmark = pytest.mark.quick

USER = [{"role": "user", "content": "hi"}]
MANY = 100_000


@pytest.mark.parametrize(
    "message",
    [
        {"from": "human", "value": [{"type": "image", "image": "FILE"}]},
        {"from": "human", "value": "hi"},
        {"role": "user", "content": [{"type": "image", "image": "FILE"}]},
        {"role": "user", "content": [{"type": "image", "path": "FILE"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "FILE"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://FILE"}}]},
        {"role": "user", "content": "hi", "value": [{"type": "image", "image": "FILE"}]},
        {"role": "user", "content": {"path": "FILE"}},
    ],
)
def test_no_message_makes_the_server_open_a_file_or_tell_whether_there_is_one(chatty, tmp_path, message):
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    there = tmp_path / "there.png"
    there.write_bytes(file.getvalue())
    texts = [json.dumps(message).replace("FILE", str(path)) for path in (there, tmp_path / "none.png")]

    async def use(asking):
        found = []
        for text in texts:
            messages = [json.loads(text)]
            found.append(await asking.refusal(messages=messages))
            found.append(await asking.refusal("/v1/read", messages=messages, template="<?a:1>"))
        return found

    present, read_present, absent, read_absent = served(chatty, use)
    assert present[0] == absent[0] == read_present[0] == read_absent[0] == 400
    for one, other in ((present, absent), (read_present, read_absent)):
        assert one[1]["message"].replace("there.png", "none.png") == other[1]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[{}]] * MANY}),
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * MANY}),
        (CompletionRequest, {"prompt": "a", "strategy": "a" * MANY}),
        (CompletionRequest, {"prompt": "a", "banned": [{}] * MANY}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": USER, "tools": [1] * MANY}),
        (ChatRequest, {"messages": USER, **{f"key{number}": 1 for number in range(MANY)}}),
        (ChatRequest, {"messages": USER, "k" * MANY: 1}),
        (ChatRequest, {"messages": USER, "response_format": {f"key{number}": 1 for number in range(MANY)}}),
        (ChatRequest, {"messages": USER, "model": "m" * MANY}),
        (ChatRequest, {"messages": 1, "metadata": {"key": "v" * MANY}}),
        (ReadRequest, {"prompt": "a", "template": "<?a:1>", "choices": {f"hole{n}": [] for n in range(MANY)}}),
    ],
)
def test_the_first_error_of_a_body_is_one_short_line_however_many_it_has(kind, body):
    import pydantic_core

    with pytest.raises(Refused) as refused:
        parsed_body(json.dumps(body).encode(), kind, "/v1")
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)
    cause = refused.value.__context__
    if isinstance(cause, pydantic_core.ValidationError):
        assert cause.error_count() < 20


def test_large_bodies_are_read_off_the_event_loop(chatty, monkeypatch):
    """While one is read, `/health` answers."""
    from blockdiff.serving import bodies

    def slow(*arguments):
        time.sleep(0.5)
        return parsed_body(*arguments)

    async def use(asking):
        post = asking.http.post(COMPLETIONS, json={"prompt": [{}] * 50_000})
        large = asyncio.create_task(post)
        await asyncio.sleep(0.1)
        began = time.perf_counter()
        health = await asking.http.get("/health")
        return health.status_code, time.perf_counter() - began, (await large).status_code

    monkeypatch.setattr(bodies, "parsed_body", slow)
    health, seconds, refused = served(chatty, use)
    assert (health, refused) == (200, 400) and seconds < 0.35


def test_no_value_of_a_request_raises_in_the_engine():
    """`python -m benchmarks.hostile_requests` tries 2,000 of them."""
    assert failures(250) == []
