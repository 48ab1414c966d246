"""`blockdiff serve`: the command, in a process of its own, and what it refuses in one line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import openai
import pytest
import torch

from blockdiff.checkpoint import init, save, save_adapter
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import BlockdiffError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.sampling import Request, Sampler
from blockdiff.serving.process import listener
from blockdiff.serving.settings import read_settings
from tests.support.asking import chat_tokenizer
from tests.support.commands import refusal
from tests.support.oracle import TWO_LAYERS, tiny_config


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint of a tiny random model that chats."""
    place = tmp_path_factory.mktemp("served") / "tiny"
    model = init(tiny_config(8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)  # so that rounding them changes an answer
    save(model, place, tokenizer=chat_tokenizer(), generation=Generation(max_steps=3, max_new_tokens=16))
    return place


def test_a_served_model_streams_canvas_by_canvas_and_ends_its_answers_before_it_exits(directory, tmp_path):
    model = init(tiny_config(8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    adapt(model, targets(model, {"attention": LowRank(2, 8)}))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    save_adapter(model, tmp_path / "adapter", base=str(directory))
    (tmp_path / "serve.yaml").write_text(f"quantize: nvfp4\nadapters: {{fresh: {tmp_path}/adapter}}")
    command = [sys.executable, "-m", "blockdiff", "serve", str(directory), "--port", "0", "--device", "cpu"]
    command += ["--config", str(tmp_path / "serve.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = []
            while not (found := re.search(r"serving tiny, fresh on (http://\S+)", lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            rest = threading.Thread(target=lambda: lines.extend(process.stderr))
            rest.start()
            client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", timeout=60)
            names = [each.id for each in client.models.list().data]
            assert names == ["tiny", "fresh"]
            asked = dict(messages=[{"role": "user", "content": "hi"}], seed=1)
            answers = [client.chat.completions.create(model=name, **asked).choices[0].message.content for name in names]
            assert answers[0] == answers[1]  # B of a fresh adapter is 0
            here = [
                Sampler.from_pretrained(directory, quantize=form, device="cpu").generate([Request(0, **asked)])[0].text
                for form in ("nvfp4", "none")
            ]
            assert answers[0] == here[0] != here[1]
            asked["model"] = "fresh"
            asked |= dict(stream=True, max_tokens=128, extra_body={"regex": "(a|b){120}"})
            with client.chat.completions.create(**asked) as stream:
                contents = (chunk.choices[0].delta.content for chunk in stream)
                text = next(each for each in contents if each)  # after the chunk that says that it is accepted
                assert 0 < len(text) < 100  # a canvas, and not the whole answer
                process.send_signal(signal.SIGTERM)
                text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert re.fullmatch("(a|b){120}", text)
            assert process.wait(60) == 0
            rest.join(60)
            assert any("/v1/chat/completions stop" in line for line in lines)
        finally:
            process.kill()


def test_other_machines_need_a_key_and_a_port_has_one_server(directory, tmp_path):
    assert "--api-key-file" in refusal("serve", directory, "--host", "0.0.0.0", code=2)
    (tmp_path / "none").write_text("\n")
    assert "has no key" in refusal("serve", directory, "--api-key-file", tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refusal("serve", directory, "--port", taken.getsockname()[1])
    assert "cannot be listened on" in said
    with listener("127.0.0.1", 0) as first, pytest.raises(BlockdiffError, match="listened on"):
        listener(*first.getsockname())  # before either has loaded its model


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("prot: 1", "prot: is not a key; did you mean port?"),
        ("{limits: {answer_second: 1}}", "did you mean limits.answer_seconds?"),
        ("qqqq: 1", "qqqq: is not a key; there are "),
        ("limits: {bodies: 2}", "limits.bodies"),
        ("port: x", "port"),
        ("- a", "write keys"),
        ("{", "cannot be read"),
        ("{adapter: a, adapters: {b: c}}", "leave out adapter"),
        ("{port: &a [*a]}", "it holds itself"),
        ("{port: 1, port: 2}", "the key 'port' appears twice"),
        ("adapters: {model: a}", "'model' is no name of an adapter"),
    ],
)
def test_a_bad_file_of_settings_is_one_line(tmp_path, text, word):
    (tmp_path / "serve.yaml").write_text(text)
    assert word in refusal("serve", "model", "--config", tmp_path / "serve.yaml")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{}", {"127.0.0.1", "localhost", "::1"}),
        ("hosts: [a.example]", {"127.0.0.1", "localhost", "::1", "a.example"}),
        ("{host: 0.0.0.0, hosts: [a.example]}", {"127.0.0.1", "localhost", "::1", "0.0.0.0", "a.example"}),
        ("host: 0.0.0.0", None),
        ("{hosts: ['*']}", None),
    ],
)
def test_the_hosts_of_a_file_count_whatever_the_address(tmp_path, text, names):
    (tmp_path / "serve.yaml").write_text(text)
    found = read_settings(tmp_path / "serve.yaml", {}).access().hosts
    assert (None if found is None else {*found}) == names


def test_the_command_line_goes_over_the_file(tmp_path):
    (tmp_path / "keys").write_text("# of the team\none\n\n  # two, until May\ntwo\n")
    (tmp_path / "serve.yaml").write_text(
        f"port: 1\nmax_rows: 4\napi_key_file: {tmp_path}/keys\nlimits: {{answers: 2}}\n"
    )
    settings = read_settings(tmp_path / "serve.yaml", {"port": 2, "host": None})
    assert (settings.port, settings.max_rows, settings.host, settings.limits.answers) == (2, 4, "127.0.0.1", 2)
    assert settings.access().keys == ("one", "two") and "127.0.0.1" in settings.access().hosts
