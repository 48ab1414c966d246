"""The `blockdiff` command and `python -m blockdiff`, also inside a checkout that is not installed."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it in one line, too."""
    try:
        from blockdiff.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("blockdiff: error: stopped", file=sys.stderr)  # noqa: T201 (nothing else is imported yet)
        sys.exit(130)


if __name__ == "__main__":
    main()
