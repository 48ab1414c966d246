"""Benchmarks against transformers: `python -m benchmarks`; how to run and read them: benchmarks/README.md."""
