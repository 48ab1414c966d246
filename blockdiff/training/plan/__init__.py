"""The plan of a run: the memory that it needs on every rank and the least time of a step, without loading anything."""
