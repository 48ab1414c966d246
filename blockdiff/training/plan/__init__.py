"""The plan of a run: the memory that it needs on every rank, without loading anything."""
