"""Files and directories are there whole or not at all, and a name is a path, a pattern or a hub id."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from blockdiff import files
from blockdiff.data.formats import FORMATS
from blockdiff.files import (
    is_hub_id,
    matching,
    remove_directory,
    remove_leftovers,
    whole_directory,
    write_text,
)

pytestmark = pytest.mark.quick


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "page.html", "old")
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write_text(tmp_path / "page.html", "new")
    assert caught.value.filename == str(tmp_path / "page.html")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "old")]


def killed_at(moment: int, action) -> bool:
    """Run `action` in a child that dies before its `moment`-th file operation; whether it died."""
    child = os.fork()
    if not child:
        calls = 0

        def dying(function):
            def call(*arguments, **options):
                nonlocal calls
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for owner, name in [(os, "fsync"), (os, "open"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")]:
            setattr(owner, name, dying(getattr(owner, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_text_is_replaced_whole_and_nothing_stays_beside_it(tmp_path):
    file = tmp_path / "a.json"
    for text in ("old ä\n", "new\n"):
        write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_a_text_that_cannot_be_written_names_its_own_path(tmp_path):
    for path in (tmp_path / "nowhere" / "a.json", tmp_path):
        with pytest.raises(OSError) as caught:
            write_text(path, "x")
        assert caught.value.filename == str(path)


def test_a_kill_at_any_moment_leaves_the_old_text_or_the_new_one(tmp_path):
    file, moment = tmp_path / "a.json", 0
    found = []
    while True:
        moment += 1
        file.write_text("old")
        was_killed = killed_at(moment, lambda: write_text(file, "new"))
        found.append(file.read_text())
        if not was_killed:
            break
    assert len(found) > 2 and found == sorted(found, reverse=True) and set(found) == {"old", "new"}


def fill(target: Path, content: str) -> None:
    with whole_directory(target) as fresh:
        (fresh / "inner").mkdir()
        for name in ("a", "inner/b"):
            (fresh / name).write_text(content)


def content_of(target: Path) -> set[str]:
    return {(target / name).read_text() for name in ("a", "inner/b")} if target.exists() else set()


def test_a_directory_replaces_the_old_one_whole_and_an_error_leaves_it_alone(tmp_path):
    target = tmp_path / "deep" / "model"
    fill(target, "old")
    with pytest.raises(RuntimeError), whole_directory(target) as fresh:
        (fresh / "a").write_text("half")
        raise RuntimeError
    assert content_of(target) == {"old"}
    fill(target, "new")
    assert content_of(target) == {"new"} and list(target.parent.iterdir()) == [target]


def test_a_directory_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    target, rename = tmp_path / "model", Path.rename
    fill(target, "old")

    def refuse(self, other):
        if other == target and "tmp" in self.name and (self / "a").read_text() == "new":
            raise OSError(28, "No space left on device", str(other))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        fill(target, "new")
    assert content_of(target) == {"old"} and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("stands", [False, True], ids=["new", "replaced"])
def test_a_kill_at_any_moment_leaves_no_half_directory(tmp_path, stands):
    target, moment, found = tmp_path / "model", 0, []
    while True:
        moment += 1
        shutil.rmtree(target, ignore_errors=True)
        if stands:
            fill(target, "old")
        was_killed = killed_at(moment, lambda: fill(target, "new"))
        found.append(content_of(target))
        remove_leftovers(tmp_path, "model")
        assert {path.name for path in tmp_path.iterdir()} <= {"model"}
        if not was_killed:
            break
    assert len(found) > 8 and found[-1] == {"new"}
    assert all(len(each) < 2 for each in found) and ({"old"} in found) == stands


def test_a_directory_that_another_process_takes_away_is_not_said_to_be_written(tmp_path, monkeypatch):
    def taken_away(fresh, target):
        fresh.rename(target)
        next(path for path in target.iterdir() if path.is_file()).unlink()

    monkeypatch.setattr(files, "publish", taken_away)
    with pytest.raises(OSError, match="another process"):
        fill(tmp_path / "model", "new")


def test_a_removal_that_is_killed_leaves_nothing_of_that_name(tmp_path):
    target = tmp_path / "model"
    fill(target, "old")
    assert killed_at(2, lambda: remove_directory(target))  # renamed, and nothing removed yet
    assert not target.exists() and len(list(tmp_path.iterdir())) == 1
    fill(target, "new")
    remove_directory(target)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_a_link_to_a_directory_the_link_goes_and_its_content_stays(tmp_path):
    fill(elsewhere := tmp_path / "elsewhere", "old")
    for number, remove in enumerate((remove_directory, lambda link: fill(link, "new"))):
        (link := tmp_path / f"step-{number}").symlink_to(elsewhere)
        remove(link)
        assert not link.is_symlink() and content_of(elsewhere) == {"old"}
    (tmp_path / ".step-2.0.tmp").symlink_to(elsewhere)  # left by a kill
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "step-1"}
    assert content_of(elsewhere) == {"old"}


def test_what_may_still_be_written_is_no_leftover(tmp_path):
    for name in ("model", "other"):
        assert killed_at(1, lambda name=name: fill(tmp_path / name, "x"))
    remove_leftovers(tmp_path, seconds=60)
    left = sorted(tmp_path.iterdir())
    assert len(left) == 2
    for path in (left[0], *left[0].rglob("*")):
        os.utime(path, (0, 0))
    remove_leftovers(tmp_path, seconds=60)
    assert sorted(tmp_path.iterdir()) == left[1:]
    remove_leftovers(tmp_path, "model")
    assert sorted(tmp_path.iterdir()) == left[1:]
    remove_leftovers(tmp_path, "other")
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_is_owner_and_name_and_never_a_file():
    assert all(map(is_hub_id, ["google/diffusiongemma", "a/b", "openai/gsm8k", "o-w.n_er/n.a-m_e"]))
    names = ["gsm8k", "a/b/c", "./a", "../a", "/a", ".a/b", "~/a", "a/", "a/b c", "a/*", "data/train[0-9]"]
    assert not any(map(is_hub_id, [*names, *(f"data/train{suffix}" for suffix in (*FORMATS, ".jsonl.gz", ".JSONL"))]))


def test_a_path_goes_before_a_pattern(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "[ab].jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "c.jsonl").mkdir()
    assert matching(tmp_path / "[ab].jsonl") == [tmp_path / "[ab].jsonl"]
    assert [path.name for path in matching(tmp_path / "?.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert matching(str(tmp_path)) == [tmp_path]
    assert matching(tmp_path / "none") == matching(tmp_path / "none*") == []


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24, 61])
def test_the_digest_of_a_files_pieces_is_that_of_what_was_written_however_it_came(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "PIECE", 8)
    monkeypatch.setattr(files, "_READ", 3)
    content, file = bytes(range(1, size + 1)), tmp_path / "file"
    file.write_bytes(content)
    said = files.piecewise_digest(file)
    for cuts in ((), (1,), (5, 9, 40), (8, 16), (3, 4, 30, 31)):
        with files.PiecewiseDigest() as found:
            for start, end in zip((0, *cuts), (*cuts, size), strict=True):
                found.update(memoryview(content)[start:end])
                found.settle()
            assert found.hexdigest() == said
    changed = [content + b"\0", *([content[:-1], content[8:] + content[:8]] if size > 8 else [])]
    for place in range(size):
        changed.append(content[:place] + b"\xff" + content[place + 1 :])
    for other in changed:
        file.write_bytes(other)
        assert files.piecewise_digest(file) != said
