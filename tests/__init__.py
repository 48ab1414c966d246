"""Tests. `from tests.oracle import ...` works because this is a package and the root is on the path."""
