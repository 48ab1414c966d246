"""`python -m tests.support.launched DIR`: a rank of a launcher, which writes their number and its device to DIR."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from blockdiff.parallel.ranks import from_accelerate

if __name__ == "__main__":
    ranks = from_accelerate()
    found = [ranks.world, str(ranks.device), ranks.gather(ranks.rank)]
    (Path(sys.argv[1]) / f"launched-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.close()
    os._exit(0)  # Python taken down beside a thread of gloo aborts now and then
