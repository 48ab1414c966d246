"""What memory a run will need on every rank, and at least how long a step takes, without loading anything."""
