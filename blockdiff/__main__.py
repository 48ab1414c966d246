"""`python -m blockdiff` is the `blockdiff` command."""

from blockdiff.cli.main import main

if __name__ == "__main__":
    main()
