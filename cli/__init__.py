"""The command line, installed as `blockdiff.cli`: `main.py` and one file per command."""
