"""Tests. `from tests.support.oracle import ...` works because this is a package and the root is on the path."""
