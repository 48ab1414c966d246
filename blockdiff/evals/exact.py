"""Exact match: the text is the row's response, white space around it apart. Any row will do."""

from blockdiff.evals.questions import Task

TASK = Task("exact", is_solved=lambda question, text: text.strip() == question.reference.strip())
