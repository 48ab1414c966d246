"""Constraints on a response: a language of texts as an automaton over tokens, and the canvases that stay within it."""
