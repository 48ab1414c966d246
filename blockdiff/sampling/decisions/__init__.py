"""Typed decisions: questions about a state, the probabilities of their answers, and how honest these are."""

from blockdiff.sampling.decisions.decide import Answer, RunningDecision
from blockdiff.sampling.decisions.form import Asking
from blockdiff.sampling.decisions.question import Question, read_questions, read_systemone

__all__ = ["Answer", "Asking", "Question", "RunningDecision", "read_questions", "read_systemone"]
