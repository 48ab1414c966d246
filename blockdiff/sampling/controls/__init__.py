"""The controls of a response, a file each: what a request asks for, and which tokens may then stand where.

A control is a class like those of `Control` in `restriction.py`; `blockdiff.sampling.request.CONTROLS` lists them.
"""
