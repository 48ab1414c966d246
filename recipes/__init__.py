"""Recipes with their presets, and the generators of the toy tasks that they learn: sudoku (also as images),
countdown, addition and small talk.

`recipes/` lies beside the package for the reader and installs as `blockdiff.recipes`.
"""
