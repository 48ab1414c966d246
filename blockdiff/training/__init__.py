"""The objective and everything that trains it: optimiser, ranks, run state, metrics, the loop."""
