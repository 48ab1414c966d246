"""The mathematics of block diffusion on tokens: noise going in, and the rules by which it comes out again.

Frozen dataclasses with one verb each; no modules, no state.
"""
