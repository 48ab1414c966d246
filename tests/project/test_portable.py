"""`make portable`: which kinds of arithmetic it runs, what it says of the others, and its exit status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import portable

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("own", "kinds"), [("AVX512", ["avx2", "default"]), ("NO AVX", ["default"])])
def test_a_kind_that_the_processor_lacks_is_left_out_with_a_line(
    own: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = list[dict[str, str]]()

    def run(words: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        if "pytest" in words:
            runs.append(env)
        return SimpleNamespace(returncode=env["ATEN_CPU_CAPABILITY"] == "default", stdout="AVX2 0123\n")

    monkeypatch.setattr(portable.torch.backends.cpu, "get_cpu_capability", lambda: own)
    monkeypatch.setattr(portable, "subprocess", SimpleNamespace(run=run))
    assert portable.main([]) == 1  # the tests of one kind fail
    assert [env["ATEN_CPU_CAPABILITY"] for env in runs] == kinds
    assert ("AVX2: torch has no such arithmetic here" in capsys.readouterr().out) == (len(kinds) == 1)
