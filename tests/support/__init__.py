"""Parts that several tests, or tests and benchmarks, share."""
