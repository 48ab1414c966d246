"""The processes of a run: which they are, how they agree and wait for one another, and how signals stop them."""
