"""The server's page in a real browser: a prompt is typed and sent, canvases are seen as they denoise, and end."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from blockdiff.plots.trace_moments import visible
from blockdiff.serving import Access, Limits, app
from blockdiff.serving.page import page_of
from tests.plots.browser import SECONDS, Browser
from tests.support.asking import answering

KEY = "only-in-memory"
HOSTILE = "<img src=x onerror=boom()>\n</pre><b>it"
CARDS = "return document.querySelectorAll('.card').length"
TEXT = "return document.querySelector(arguments[0])?.textContent"
DONE = "return document.querySelectorAll('.card[data-state=done]').length === arguments[0]"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, object]]:
    """The address of a server that answers a text with marks of HTML to whatever it is asked, and its engine."""
    engine = answering(HOSTILE, canvas_length=48, canvases=1)
    asgi = app(engine, names=("<i>tiny",), access=Access(keys=(KEY,)), limits=Limits(steps=20_000))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # now: a test may ask before the server has begun
        running = uvicorn.Server(uvicorn.Config(asgi, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", engine
        running.should_exit = True
        thread.join()


@pytest.fixture
def opened(browser: Browser, server: tuple[str, object]) -> Browser:
    browser.resize(1280)
    browser.prefer()
    browser.open(server[0])
    browser.type("#key", KEY)
    browser.type("#prompt", "Say <b>it</b>")
    return browser


@pytest.mark.quick
def test_the_page_allows_only_its_own_script_and_style_and_asks_nobody_else(server: tuple[str, object]) -> None:
    answer = httpx.get(server[0], trust_env=False)  # it needs no key
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"https?:|@import|url\(|\bsrc=|<i>|innerHTML|\{\{|localStorage|document.cookie", answer.text)
    assert "<title>&lt;i&gt;tiny</title>" in answer.text and answer.text.count("<script") == 1
    assert 'data-path="completions"' in page_of("m", is_chat=False)[0]
    assert httpx.get(server[0], headers={"host": "evil.example"}, trust_env=False).status_code == 403


def test_answers_are_seen_side_by_side_step_by_step(opened: Browser) -> None:
    opened.type("#answers", "2")
    opened.type("#seed", "3")
    opened.click("[type=submit]")
    opened.wait(DONE, 2)
    assert opened.run(TEXT, ".card .text") == HOSTILE  # as text, not as markup
    assert opened.run("return document.querySelectorAll('main img, main b').length") == 0
    drawn = "return [...document.querySelectorAll('.card:first-child .stage button')].map((cell) => cell.textContent)"
    assert "".join(opened.run(drawn)).startswith("<img·src=x·onerror=boom()>⏎</pre><b>")
    names = opened.run("return [...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert [name for name in names if "Request" in name] == ["Request 1, seed 3", "Request 2, seed 4"]
    steps, tokens = re.findall(r"(\d+) (?:steps|tokens)", opened.run(TEXT, ".card .state"))
    assert int(steps) >= 2 and int(tokens) > 10
    opened.click(".card .last")
    assert opened.run(TEXT, ".card .where") == "committed"
    opened.click(".card .back")
    assert re.fullmatch(r"step \d+", opened.run(TEXT, ".card .where"))
    assert "mean entropy" in opened.run(TEXT, ".card .numbers")
    tops = "return [...document.querySelectorAll('.card')].map((each) => each.offsetTop)"
    first, second = opened.run(tops)
    assert first == second
    opened.resize(375)  # a phone
    first, second = opened.run(tops)
    assert first < second and opened.run("return document.documentElement.scrollWidth") <= 375
    assert opened.log() == []


def test_stop_ends_the_request_and_who_looks_back_is_left_there(opened: Browser, server: tuple[str, object]) -> None:
    opened.prefer(motion="no-preference")
    opened.type("#strategy", "entropy_bound:confidence=0")
    opened.type("#steps", "20000")
    opened.click("[type=submit]")
    opened.wait("return /^step .*/.test(document.querySelector('.card .where')?.textContent)")
    opened.click(".card .first")
    before = opened.run(TEXT, ".card .state")
    opened.wait("return document.querySelector('.card .state').textContent !== arguments[0]", before)  # it goes on
    assert opened.run(TEXT, ".card .where") == "step 1"
    opened.click(".card .stop")
    opened.wait("return document.querySelector('.card').dataset.state === 'stopped'")
    assert opened.run(TEXT, ".card .state").startswith("stopped · 1 canvas · ")
    end = time.monotonic() + SECONDS
    while server[1].unanswered:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "the request goes on"
        time.sleep(0.01)
    opened.click(".card .stop")  # which now removes the card
    assert opened.run(CARDS) == 0


def test_a_request_that_is_refused_says_why_and_leaves_no_card(opened: Browser) -> None:
    choose = "const kind = document.getElementById('form-kind'); kind.value = arguments[0]; "
    choose += "kind.dispatchEvent(new Event('change'))"
    for kind, text, words in [
        ("regex", "[0-9", "'[0-9' cannot be used: unterminated character set"),
        ("json_schema", '{"type": ', "the JSON schema is not JSON"),
    ]:
        opened.run(choose, kind)
        opened.type("#form-text", text)
        opened.click("[type=submit]")
        assert words in opened.wait(TEXT, "#error") and opened.run(CARDS) == 0
    opened.run(choose, "")
    opened.type("#key", "another")
    opened.click("[type=submit]")
    assert "API key" in opened.wait(TEXT, "#error") and opened.run(CARDS) == 0
    opened.open(opened.run("return location.href"))
    assert opened.run("return document.getElementById('key').value") == ""  # the key is kept nowhere


def test_tokens_look_as_on_the_page_of_a_trace(opened: Browser) -> None:
    texts = ["", " a", "\n", "<|turn>", "<eos>", "<>", "\x1b[2J", "\u202e<b>", "tab\t\r", "\U000e0041", "é😀"]
    assert opened.run("return arguments[0].map(visible)", texts) == [visible(text) for text in texts]
