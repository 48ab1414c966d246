"""The `blockdiff` command and `python -m blockdiff`, also inside a checkout that is not installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import blockdiff


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it in one line, too."""
    try:
        if find_spec("blockdiff.cli") is None:
            # Run from a checkout's folder, where cli/ lies beside the package and not in it.
            blockdiff.__path__.append(str(Path(__file__).resolve().parents[1]))
        from blockdiff.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("blockdiff: error: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
