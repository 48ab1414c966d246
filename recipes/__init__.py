"""Recipes with their presets, and the generators of the toy tasks that they learn: sudoku, countdown and small talk.

`recipes/` lies beside the package for the reader and installs as `blockdiff.recipes`.
"""
