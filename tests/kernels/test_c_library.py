"""The library of C functions: what they take, where it is built and kept, and what is said where it is left out."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from blockdiff.kernels import IN_C, IN_TORCH, c_library
from blockdiff.kernels.c_library import NoLibrary, serves

pytestmark = pytest.mark.quick

EPS = 1e-6
HAS_C = c_library.library() is not None
BASELINE = {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(platform.machine(), "native")
needs_c = pytest.mark.skipif(not HAS_C, reason="there is no C compiler here")


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not loaded the library yet, and whose environment does not choose its instructions."""
    monkeypatch.delenv(c_library.ARCH, raising=False)
    monkeypatch.delenv(c_library.CACHE)
    monkeypatch.setattr(c_library, "library", functools.cache(c_library.library.__wrapped__))


@pytest.fixture
def quick_builds(monkeypatch):
    """A library of one file, for tests that build it and do not call it."""
    name = "capped_softmax"
    monkeypatch.delenv(c_library.CACHE)
    monkeypatch.setattr(c_library, "FLAGS", (*(flag for flag in c_library.FLAGS if flag != "-O3"), "-O0"))
    monkeypatch.setattr(c_library, "SIGNATURES", {name: c_library.SIGNATURES[name]})
    monkeypatch.setattr(c_library, "sources", lambda: [c_library.HERE / "vocabulary" / "vocabulary.c"])


def compiler(path: Path, text: str) -> str:
    """A compiler that is this script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def assert_torch_after_one_warning(match: str) -> None:
    x = torch.randn(7, 24)
    with pytest.warns(UserWarning, match=match) as warned:
        outs = [IN_C.rms_norms(x, (None,), EPS)[0] for _ in range(2)]
    assert len(warned) == 1 and not serves(x)
    assert all(torch.equal(out, IN_TORCH.rms_norms(x, (None,), EPS)[0]) for out in outs)


# -- signatures ----------------------------------------------------------------------------------------------------


def test_the_table_of_signatures_is_that_of_the_prototypes():
    text = "\n".join(path.read_text() for path in c_library.sources())
    kinds = {"int64_t": "n", "float": "f"}
    found = {}
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\)\s*{", text, re.MULTILINE):
        found[name] = "".join("p" if "*" in each else kinds[each.split()[-2]] for each in arguments.split(","))
    assert found == {name: signature.replace(" ", "") for name, signature in c_library.SIGNATURES.items()}
    others = re.findall(r"^(?!static|INLINE|typedef|void|#)\w[\w ]*\**\w+\([^;]*\)\s*{", text, re.MULTILINE)
    assert not others


def test_the_functions_allocate_nothing_and_end_no_process():
    files = [*c_library.sources(), *c_library.HERE.rglob("*.h")]
    words = set(re.findall(r"\w+(?= *\()", "\n".join(path.read_text() for path in files)))
    assert "memset" in words
    assert not words & {"malloc", "calloc", "realloc", "aligned_alloc", "free", "abort", "exit", "assert"}


@needs_c
def test_a_call_with_other_arguments_than_the_table_has_never_reaches_the_function():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="shorter"):
        c_library.call("capped_softmax", x, 1, 4, 0.0)
    with pytest.raises(AttributeError, match="data_ptr"):
        c_library.call("capped_softmax", 4, 1, 4, 0.0, 1.0)
    with pytest.raises(ctypes.ArgumentError, match="argument 2"):
        c_library.call("capped_softmax", x, 1.0, 4, 0.0, 1.0)


@needs_c
def test_a_library_that_lacks_a_function_is_not_loaded(monkeypatch, tmp_path, quick_builds):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(c_library.SIGNATURES, "of_nobody", "pn")
    with pytest.raises(NoLibrary, match="of_nobody"):
        c_library.find_library()


# -- torch after one warning ------------------------------------------------------------------------------------------


def test_without_a_compiler_torch_runs_after_one_warning(monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    assert_torch_after_one_warning("torch runs .* there is no C compiler '.*no-compiler'")


def test_without_openmp_torch_runs_and_the_compiler_is_quoted(monkeypatch, tmp_path, fresh):
    says = "cc1: error: unsupported option -fopenmp"
    script = f'for word in "$@"; do [ "$word" = -fopenmp ] && echo "{says}\nmore" >&2 && exit 1; done; exit 0'
    monkeypatch.setenv("CC", compiler(tmp_path / "compiler", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert_torch_after_one_warning(f"{says}$")


@needs_c
def test_a_compiler_that_leaves_openmp_out_in_silence_makes_no_library(monkeypatch, tmp_path, quick_builds):
    """On one thread the functions would be slower than torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", tuple(flag for flag in c_library.FLAGS if flag != "-fopenmp"))
    with pytest.raises(NoLibrary, match="OpenMP"):
        c_library.find_library()


def test_a_cc_that_is_no_command_is_told(monkeypatch, fresh):
    monkeypatch.setenv("CC", "gcc '")
    assert_torch_after_one_warning("CC cannot be read")


def test_a_library_that_does_not_load_is_not_kept(monkeypatch, tmp_path, fresh):
    script = 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"'
    monkeypatch.setenv("CC", compiler(tmp_path / "compiler", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert_torch_after_one_warning("the library does not load")
    assert not list((tmp_path / "cache" / "blockdiff").iterdir())


def test_an_architecture_that_the_compiler_lacks_is_named_with_its_variable(monkeypatch, tmp_path, fresh):
    says = "error: bad value ('pdp-11') for '-march=' switch"
    script = f'for word in "$@"; do [ "$word" = -march=pdp-11 ] && echo "cc1: {says}" >&2 && exit 1; done; exit 0'
    monkeypatch.setenv("CC", compiler(tmp_path / "compiler", script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(c_library.ARCH, "pdp-11")
    assert_torch_after_one_warning(f"BLOCKDIFF_C_ARCH=pdp-11: .*{re.escape(says)} .*none")


def test_without_an_architecture_torch_runs_in_silence(monkeypatch, fresh):
    monkeypatch.setenv(c_library.ARCH, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c_library.library() is None and not serves(torch.randn(7, 24))


# -- where it lies -------------------------------------------------------------------------------------------------


@needs_c
def test_the_library_is_built_again_for_another_machine_and_kept_for_the_same(monkeypatch, tmp_path, quick_builds):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "_machine", lambda: "another machine")
    c_library.find_library()
    directory = tmp_path / "blockdiff"
    (built,) = directory.iterdir()
    made = built.stat().st_mtime_ns
    assert directory.stat().st_mode & 0o777 == built.stat().st_mode & 0o777 == 0o700
    c_library.find_library()
    assert built.stat().st_mtime_ns == made
    monkeypatch.setattr(c_library, "_machine", lambda: "a third one")
    c_library.find_library()
    assert len(list(directory.iterdir())) == 2


@needs_c
def test_the_library_is_kept_where_tokens_are_unless_others_may_write_there(monkeypatch, tmp_path, quick_builds):
    users, asked = tmp_path / "blockdiff", tmp_path / "asked"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(c_library.CACHE, str(asked))
    c_library.find_library()
    assert len(list(asked.iterdir())) == 1 and not users.exists()
    asked.chmod(0o770)
    c_library.find_library()
    assert len(list(asked.iterdir())) == len(list(users.iterdir())) == 1


@needs_c
def test_each_architecture_has_a_library_of_its_own(monkeypatch, tmp_path, quick_builds):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = []
    for arch in ("native", BASELINE, ""):
        monkeypatch.setenv(c_library.ARCH, arch)
        c_library.find_library()
        kept.append({*(tmp_path / "blockdiff").iterdir()})
    assert [len(each) for each in kept] == [1, 2, 3]


@needs_c
@pytest.mark.parametrize("damage", ["others may write", "a link", "no library"])
def test_a_library_that_others_could_have_written_is_built_anew(damage, monkeypatch, tmp_path, quick_builds):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    c_library.find_library()
    (kept,) = (tmp_path / "blockdiff").iterdir()
    if damage == "others may write":
        kept.chmod(0o720)
    elif damage == "a link":
        kept.symlink_to(kept.rename(tmp_path / "elsewhere"))
    else:
        kept.unlink()  # this process has mapped it
        kept.write_bytes(b"no library")
        kept.chmod(0o700)
    before = kept.stat().st_mtime_ns
    c_library.find_library()
    assert kept.lstat().st_mode & 0o777 == 0o700 and not kept.is_symlink() and kept.stat().st_mtime_ns > before


@needs_c
@pytest.mark.parametrize("obstacle", ["others may write", "a link", "of another user", "no directory", "no home"])
def test_a_cache_that_is_not_the_users_own_is_left_alone(obstacle, monkeypatch, tmp_path, quick_builds):
    """The library is then built in a directory of the process, of which nothing is left."""
    own, cache = tmp_path / "own", tmp_path / "cache" / "blockdiff"
    own.mkdir()
    if obstacle == "no directory":
        (tmp_path / "cache").write_text("no directory can be made in here")
    elif obstacle == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        cache.parent.mkdir()
        cache.symlink_to(tmp_path / "elsewhere")
    elif obstacle != "no home":
        cache.mkdir(parents=True)
        cache.chmod(0o720 if obstacle == "others may write" else 0o700)
    if obstacle == "of another user":
        user = c_library.os.getuid()
        monkeypatch.setattr(c_library.os, "getuid", lambda: user + 1)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-here/cache" if obstacle == "no home" else str(tmp_path / "cache"))
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(own))
    with pytest.warns(UserWarning, match="compiled anew for this process: .*cache") as warned:
        c_library.find_library()
    assert len(warned) == 1 and not list(own.iterdir())
    assert obstacle in ("no directory", "no home") or not list(cache.iterdir())


@needs_c
def test_a_process_leaves_no_directory_of_its_own_behind(tmp_path, monkeypatch, quick_builds):
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c_library.find_library()
    assert not list(own.iterdir()) and len(list((tmp_path / "cache" / "blockdiff").iterdir())) == 1


def test_there_is_a_library_if_there_is_a_compiler_and_it_is_not_left_out():
    words = (c_library.os.environ.get("CC") or "cc").split()
    assert HAS_C == (shutil.which(words[0]) is not None and os.environ.get(c_library.ARCH) != "none")
