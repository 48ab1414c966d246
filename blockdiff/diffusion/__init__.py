"""The mathematics of block diffusion on tokens: how noise is added, weighted and removed.

Frozen dataclasses with one verb each; no modules, no state.
"""
