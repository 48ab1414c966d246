"""Typed questions about a state, and how they are written into a prompt and a canvas."""

from blockdiff.decisions.form import Asking
from blockdiff.decisions.question import Question, read_questions, read_systemone

__all__ = ["Asking", "Question", "read_questions", "read_systemone"]
