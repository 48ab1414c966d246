"""`python -m blockdiff` is the `blockdiff` command, also inside a checkout that is not installed."""

from importlib.util import find_spec
from pathlib import Path

import blockdiff

if find_spec("blockdiff.cli") is None:
    # Run from a checkout's folder, where cli/ lies beside the package and not in it.
    blockdiff.__path__.append(str(Path(__file__).resolve().parents[1]))

from blockdiff.cli.main import main

if __name__ == "__main__":
    main()
