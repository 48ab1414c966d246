"""The library of C functions: where it is built, kept and left out."""

from __future__ import annotations

import functools
import os
import shutil

import pytest
import torch

from blockdiff.kernels import CPU, NATIVE, c_library
from blockdiff.kernels.c_library import serves

pytestmark = pytest.mark.quick

EPS = 1e-6


def test_the_c_functions_are_built_where_there_is_a_compiler_and_left_out_where_there_is_none(monkeypatch, tmp_path):
    has_compiler = shutil.which((os.environ.get("CC") or "cc").split()[0]) is not None
    assert (c_library.library() is not None) == has_compiler
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(c_library, "library", functools.cache(c_library.library.__wrapped__))
    x = torch.randn(7, 24)
    assert c_library.library() is None and not serves(x)
    assert torch.equal(CPU.rms_norms(x, (None,), EPS)[0], NATIVE.rms_norms(x, (None,), EPS)[0])


@pytest.fixture
def quick_builds(monkeypatch):
    """The library without optimisation, for tests that build it and do not call it."""
    flags = [flag for flag in c_library.FLAGS if flag != "-O3"]
    monkeypatch.setattr(c_library, "FLAGS", (*flags, "-O0"))


def test_the_library_is_built_again_for_other_sources_and_kept_for_the_same(monkeypatch, tmp_path, quick_builds):
    if c_library.library() is None:
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "_machine", lambda: "another machine")
    build = c_library.library.__wrapped__
    assert build() is not None
    (built,) = (tmp_path / "blockdiff").iterdir()
    made = built.stat().st_mtime_ns
    assert build() is not None and built.stat().st_mtime_ns == made
    monkeypatch.setattr(c_library, "_machine", lambda: "a third one")
    assert build() is not None and len(list((tmp_path / "blockdiff").iterdir())) == 2


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_process_leaves_no_directory_of_its_own_behind(has_cache, tmp_path, monkeypatch, quick_builds):
    if c_library.library() is None:
        return
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "file").write_text("no directory can be made in here")
    monkeypatch.setattr(c_library.tempfile, "tempdir", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("cache" if has_cache else "file")))
    assert c_library.library.__wrapped__() is not None
    assert not list(own.iterdir()) and (tmp_path / "cache").exists() == has_cache
