"""Next tokens over ranks: 2 and 4 draw what one draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.next_token_ranks import sampled


@pytest.mark.quick
def test_any_number_of_ranks_draws_the_same_next_tokens(tmp_path: Path):
    run_ranks(4, sampled, tmp_path)
