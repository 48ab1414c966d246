"""The memory that a device has left, and the line that says what does not fit."""

from __future__ import annotations

import pytest

from blockdiff import checkpoint, memory
from blockdiff.errors import BlockdiffError

pytestmark = pytest.mark.quick

GIB = 2**30
NOTHING = {
    "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n",
    "proc/self/cgroup": "12:cpu:/a\n0::/\n",
}
V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/memory.max": str(3 * GIB),
    "sys/fs/cgroup/jobs/memory.current": str(2 * GIB),
    "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": str(GIB),
}
CONTAINER = {"sys/fs/cgroup/memory.max": str(5 * GIB), "sys/fs/cgroup/memory.current": str(4 * GIB)}


@pytest.mark.parametrize("files, expected", [(NOTHING, 8), (NOTHING | V2, 2), (NOTHING | CONTAINER, 1), ({}, None)])
def test_a_host_has_what_the_kernel_says_and_its_control_groups_leave(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory._host_bytes(tmp_path) == (None if expected is None else expected * GIB)


@pytest.mark.parametrize("files, expected", [(NOTHING, 16), (NOTHING | V2, 3), (NOTHING | CONTAINER, 5), ({}, None)])
def test_a_host_has_in_all_what_the_kernel_says_and_its_control_groups_allow(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory._host_bytes(tmp_path, is_whole=True) == (None if expected is None else expected * GIB)


def test_this_host_has_memory_left_and_the_meta_device_is_not_asked():
    assert memory.available_bytes("cpu") is None or memory.available_bytes("cpu") > 0
    assert memory.available_bytes("meta") is None
    memory.require({"weights": 10**20}, "meta")


def test_what_does_not_fit_is_said_in_one_line_with_what_would(monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda device: 10 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10 * GIB)
    memory.require({"weights": 6 * GIB, "gradients": 4 * GIB}, "cuda:0")
    with pytest.raises(BlockdiffError) as error:
        memory.require({"weights": 9 * GIB, "gradients": 4 * GIB}, "cuda:0", {"lora": 9 * GIB, "bf16": 11 * GIB})
    assert str(error.value) == (
        "cuda:0: needs 13.0 GiB (weights 9.0 GiB, gradients 4.0 GiB), it has 10.0 GiB; what would fit: lora (9.0 GiB)"
    )
    with pytest.raises(BlockdiffError, match=r"10\.0 GiB.*GPU"):
        memory.require({"weights": 11 * GIB}, "cuda:0")
    with pytest.raises(BlockdiffError, match=r"^.*cpu: .*10\.0 GiB.*machine"):
        memory.require({"weights": 11 * GIB}, "cpu")


def test_what_others_use_at_the_moment_is_a_warning_and_no_refusal(monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda device: 24 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda device: GIB)
    with pytest.warns(
        UserWarning, match=r"cpu: needs 2.0 GiB \(weights 2.0 GiB\), 1.0 GiB of its 24.0 GiB are free"
    ) as told:
        memory.require({"weights": 2 * GIB}, "cpu")
    assert len(told) == 1


def test_weights_that_do_not_fit_are_refused_before_one_is_read_or_drawn(tmp_path, monkeypatch):
    model = checkpoint.init("tiny", device="cpu")
    directory = checkpoint.save(model, tmp_path / "tiny")
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    monkeypatch.setattr(memory, "total_bytes", lambda device: 3 * numbers)
    read = []
    monkeypatch.setattr(checkpoint.read, "read_blocks", lambda *_: read.append(1) or [])
    with pytest.raises(BlockdiffError, match=r'cpu: .*\(weights .*dtype="bfloat16"'):
        checkpoint.load(directory, dtype="float32", device="cpu")
    with pytest.raises(BlockdiffError, match=r"cpu: .*\(weights "):
        checkpoint.init("tiny", device="cpu")
    assert not read
