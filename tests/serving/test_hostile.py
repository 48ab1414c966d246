"""Bodies that somebody sends to do harm: files of the server, its memory, its event loop, other people's answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import threading
import time

import pytest
from PIL import Image

from blockdiff.errors import RequestError
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.constraints.compile_limit import TooSlow, seconds_left
from blockdiff.serving import Access, AsyncEngine, Limits
from blockdiff.serving.bodies import parsed_body
from blockdiff.serving.completions import PATH as COMPLETIONS
from blockdiff.serving.metrics import Metrics
from blockdiff.serving.protocol import ChatRequest, CompletionRequest, ReadRequest
from blockdiff.serving.refusals import Refused
from blockdiff.serving.security import Guard
from tests.support.asking import chat_tokenizer, served
from tests.support.hostile_requests import failures

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


@pytest.mark.parametrize("value", ["[]", "{}", "1", '{"a":1}'])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(value):
    content = b'{"messages":[],"metadata":[%s]}' % b",".join([value.encode()] * 1_050_000)
    with pytest.raises(Refused, match="values") as refused:
        parsed_body(content, ChatRequest, "/v1")
    assert refused.value.status == 413


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


def test_plain_requests_never_wait_for_constraints_that_are_compiled(chatty, monkeypatch):
    """Four slow ones are begun, two at a time; those whose time is over before they begin are told to come again."""
    gate, prepare = threading.Event(), AsyncEngine._prepare

    def slow(engine, request, *others):
        draws = prepare(engine, request, *others)
        if request.form:
            gate.wait(30)
        return draws

    monkeypatch.setattr(AsyncEngine, "_prepare", slow)

    async def use(asking):
        forms = [asyncio.create_task(asking.refusal(messages=USER, regex=f"a{{{n}}}")) for n in (1, 2, 3, 4)]
        await asyncio.sleep(0.3)
        plain = await asking.http.post("/v1/chat/completions", json={"messages": USER})
        await asyncio.sleep(0.3)
        gate.set()
        return plain.status_code, [each.result() for each in (await asyncio.wait(forms))[0] if not each.exception()]

    plain, told = served(chatty, use, limits=Limits(prepare_seconds=0.5))
    assert plain == 200 and [status for status, _ in told] == [429, 429]


def test_constraints_never_wait_for_those_that_compile_for_long(chatty, monkeypatch):
    """Four that take longer than QUICK_SECONDS leave the two threads to others, and go on one at a time elsewhere."""
    monkeypatch.setattr("blockdiff.serving.preparing.QUICK_SECONDS", 20.0)
    is_over, prepare = threading.Event(), AsyncEngine._prepare

    def slow(engine, request, *others):
        if request.regex == "slow" and seconds_left() <= 20:
            raise TooSlow
        if request.regex == "slow":
            is_over.wait(60)
        return prepare(engine, request, *others)

    monkeypatch.setattr(AsyncEngine, "_prepare", slow)

    async def use(asking):
        post = asking.http.post
        hostile = [asyncio.create_task(post(COMPLETIONS, json={"prompt": "a", "regex": "slow"})) for _ in range(4)]
        await asyncio.sleep(0.02)
        good = await post(COMPLETIONS, json={"prompt": "a", "regex": "a{3}"})
        are_over = [each.done() for each in hostile]
        is_over.set()
        return good.status_code, are_over, [each.status_code for each in await asyncio.gather(*hostile)]

    assert served(chatty, use, limits=Limits(prepare_seconds=60)) == (200, [False] * 4, [200] * 4)


def test_long_prompts_are_prepared_one_at_a_time_and_constraints_beside_them(chatty, monkeypatch):
    monkeypatch.setattr("blockdiff.serving.preparing.LONG_CHARACTERS", 100)
    prepare, gate, under_way, most = AsyncEngine._prepare, threading.Event(), [], []

    def slow(engine, request, *others):
        if len(request.prompt) > 100:
            under_way.append(request)
            most.append(len(under_way))
            gate.wait(0.1 if gate.is_set() else 30)
            under_way.pop()
        return prepare(engine, request, *others)

    monkeypatch.setattr(AsyncEngine, "_prepare", slow)

    async def use(asking):
        many = [asyncio.create_task(asking.http.post(COMPLETIONS, json={"prompt": "a" * 101})) for _ in range(4)]
        formed = await asking.http.post(COMPLETIONS, json={"prompt": "a", "regex": "a{3}"})
        gate.set()
        return [each.status_code for each in (formed, *await asyncio.gather(*many))]

    assert served(chatty, use) == [200] * 5 and max(most) == 1


def test_characters_beyond_those_of_the_positions_are_refused_before_they_are_tokenised(chatty, monkeypatch):
    monkeypatch.setattr(Request, "as_tokens", lambda *_: 1 / 0)
    prompt = "a" * 1_000_000
    for body in ({"prompt": prompt}, {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}]}):
        path = COMPLETIONS if "prompt" in body else "/v1/chat/completions"
        status, error = served(
            chatty, lambda asking, body=body, path=path: asking.refusal(path, **body), limits=Limits(prompt_tokens=100)
        )
        assert status == 400 and "1000000 characters" in error["message"]


def test_a_template_without_an_end_is_refused_in_a_thread_too(chatty, monkeypatch):
    monkeypatch.setattr("blockdiff.data.template.TEMPLATE_SECONDS", 0.05)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    sampler = Sampler(chatty.model, tokenizer, chatty.generation)
    status, error = served(sampler, lambda asking: asking.refusal(messages=USER))
    assert status == 400 and "more than 0.05 seconds" in error["message"]


def test_the_pixels_of_all_images_are_bounded_before_any_is_decoded(chatty):
    file = io.BytesIO()
    Image.new("1", (4000, 4000)).save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}] * 3}]
    status, error = served(chatty, lambda asking: asking.refusal(messages=messages))
    assert len(file.getvalue()) < 10_000
    assert status == 400 and "the pixels of all images: 48000000" in error["message"]


def test_the_bytes_of_all_bodies_that_are_read_are_bounded(chatty):
    async def use(asking):
        sent = asyncio.Event()

        async def slow():
            yield b"x" * 6000
            await sent.wait()

        post, headers = asking.http.post, {"content-type": "application/json"}
        guard = Guard(asking.http._transport.app, Access(), Limits(bodies_bytes=10_000), asking.server.metrics)
        asking.http._transport.app = guard
        first = asyncio.create_task(post(COMPLETIONS, content=slow(), headers=headers))
        while not guard._held:
            await asyncio.sleep(0.01)
        second = await post(COMPLETIONS, content=b"x" * 6000, headers=headers)
        sent.set()
        return second.status_code, (await first).status_code, guard._held

    assert served(chatty, use) == (429, 400, 0)


def scope_of(path: str = COMPLETIONS, raw_path: bytes | None = None, method: str = "POST"):
    """The ASGI scope of a request with JSON."""
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = dict(type="http", method=method, path=path, raw_path=raw_path or path.encode(), headers=headers, state={})
    scope |= dict(http_version="1.1", scheme="http", server=("127.0.0.1", 80), query_string=b"", root_path="")
    return scope | dict(asgi={"version": "3.0", "spec_version": "2.3"}, client=("127.0.0.1", 1))


def test_a_body_counts_until_its_answer_ends():
    async def use():
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def answer(scope, receive, send):
            assert len((await receive())["body"]) == 6000
            has_begun.set()
            await may_end.wait()

        async def receive():
            return {"type": "http.request", "body": b"x" * 6000}

        sent = asyncio.Queue()
        guard = Guard(answer, Access(), Limits(bodies_bytes=10_000), Metrics())
        first = asyncio.create_task(guard(scope_of(), receive, sent.put))
        await has_begun.wait()
        await guard(scope_of(), receive, sent.put)
        may_end.set()
        await first
        return (await sent.get())["status"], guard._held

    assert asyncio.run(use()) == (429, 0)


def test_the_text_of_a_body_is_let_go_once_it_is_parsed(chatty):
    async def use(asking):
        content = json.dumps({"messages": USER, "stream": True, "max_tokens": 2048, "metadata": {"a": "b" * 99_999}})
        body, left, sent = [content.encode()], asyncio.Event(), asyncio.Queue()
        own, before = body[0], sys.getrefcount(body[0])

        async def receive():
            if body:
                return {"type": "http.request", "body": body.pop()}
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(asking.http._transport.app(scope_of("/v1/chat/completions"), receive, sent.put))
        started = await sent.get()
        held = sys.getrefcount(own) - before
        left.set()
        await task
        return started["status"], held

    status, held = served(chatty, use, max_rows=1)
    assert status == 200 and held < 0  # `body` has let it go, too


def test_a_client_that_leaves_while_its_body_is_sent_is_no_error(chatty, caplog):
    async def use(asking):
        parts = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            return parts.pop()

        sent = asyncio.Queue()
        await asking.http._transport.app(scope_of(), receive, sent.put)
        return sent.empty(), (await asking.http.get("/metrics")).text

    with caplog.at_level("INFO", "blockdiff.serving"):
        is_silent, metrics = served(chatty, use)
    assert is_silent and not caplog.records
    assert 'blockdiff_requests_total{outcome="left"} 1.0' in metrics and 'outcome="error"' not in metrics


def test_no_path_forges_a_line_of_the_log_or_commands_a_terminal(chatty, caplog):
    path = "/v1/a%0A2026 req-1 /v1/b answered%1b[31m\x9b"

    async def use(asking):
        async def receive():
            return {"type": "http.request"}

        for raw_path in (b"/v1/%0a%1b\x1b\x9b\n" + b"x" * 9999, None):
            scope = scope_of("/v1/\n\x1b\x9b") | {"raw_path": raw_path}
            await asking.http._transport.app(scope, receive, asyncio.Queue().put)
        return await asking.http.get(path)

    with caplog.at_level("INFO", "blockdiff.serving"):
        served(chatty, use)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all(line.isprintable() and line.isascii() and len(line) < 400 for line in lines)
    assert all("%0" in line for line in lines)


def test_stop_texts_are_few_and_short(chatty):
    for stop in (["a"] * 65, "a" * 1025, ["a" * 1025]):
        status, error = served(chatty, lambda asking, stop=stop: asking.refusal(messages=USER, stop=stop))
        assert status == 400 and error["param"].startswith("stop")
        assert "64 items" in error["message"] or "1024 characters" in error["message"]
    with pytest.raises(RequestError, match="stop"):
        Request("a", prompt="a", stop=["a" * 1025]).check()


@pytest.mark.parametrize("options", [{"limits": Limits(answers_each=2)}, {"max_rows": 1, "max_waiting": 1}])
def test_more_answers_than_are_ever_taken_are_refused_for_good(chatty, options):
    async def use(asking):
        chat = await asking.refusal(messages=USER, n=3)
        return [chat, await asking.refusal(COMPLETIONS, prompt=["a", "b", "c"])]

    assert [(status, "more than the 2" in error["message"]) for status, error in served(chatty, use, **options)] == [
        (400, True)
    ] * 2


@pytest.mark.parametrize(
    "clients, owner",
    [
        ([("127.0.0.1", 1), ("127.0.0.1", 2), ("::ffff:127.0.0.1", 3)], "127.0.0.1"),
        ([("2001:db8:0:7::1", 1), ("2001:db8:0:7:ffff::9", 1), ("2001:db8:0:7::1%eth0", 1)], "2001:db8:0:7::/64"),
        ([("testclient", 1), ("testclient", 2)], "testclient"),
    ],
    ids=["an address", "a network", "a name"],
)
def test_connections_from_one_address_are_one_owner(clients, owner):
    owners = set()

    async def note(scope, receive, send):
        owners.add(scope["state"]["owner"])

    async def receive():
        return {"type": "http.request"}

    async def use():
        guard = Guard(note, Access(), Limits(), Metrics())
        for client in clients:
            await guard(scope_of() | {"client": client}, receive, None)

    asyncio.run(use())
    assert owners == {owner}


def test_a_stream_begins_when_it_is_accepted_although_it_waits_for_others(chatty):
    async def use(asking):
        engine = asking.server.engine
        long = engine.generate(Request("long", prompt="a", max_new_tokens=8 * 256))
        await anext(long)
        sent = asyncio.Queue()
        body, left = [json.dumps({"messages": USER, "stream": True}).encode()], asyncio.Event()

        async def receive():
            if body:
                return {"type": "http.request", "body": body.pop()}
            await left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(asking.http._transport.app(scope_of("/v1/chat/completions"), receive, sent.put))
        start, first = await sent.get(), await sent.get()
        unanswered = engine.unanswered
        left.set()
        await task
        await long.aclose()
        return start["status"], first["body"].decode(), unanswered

    status, first, unanswered = served(chatty, use, max_rows=1)
    assert (status, unanswered) == (200, 2) and '"role":"assistant"' in first


def test_no_value_of_a_request_raises_in_the_engine():
    assert failures(250) == []
