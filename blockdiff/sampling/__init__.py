"""From a model and prompts to text: requests in, results out, and what happened in between."""

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.trace import Canvas, Recorder, Step, Trace, read_traces, write_traces

__all__ = [
    "Canvas",
    "Choices",
    "Generation",
    "Recorder",
    "Request",
    "Result",
    "Sampler",
    "Step",
    "Trace",
    "read_traces",
    "write_traces",
]
