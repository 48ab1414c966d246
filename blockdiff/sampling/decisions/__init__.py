"""Typed decisions: questions about a state, the probabilities of their answers, and how honest these are."""
