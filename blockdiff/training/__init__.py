"""Everything that makes a run of a recipe: reading it, building, the loop, checkpoints, plans, what is written."""
