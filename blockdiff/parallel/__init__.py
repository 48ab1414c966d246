"""The processes of a run: their ranks, how they agree and wait, how weights are spread over them, and their signals."""
