"""From a model and prompts to text: requests in, results out, and what happened in between."""

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.choices import Choices
from blockdiff.sampling.prompts import read_prompts
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.trace import CommittedCanvas, Recorder, Step, Trace, write_traces

__all__ = [
    "Choices",
    "CommittedCanvas",
    "Generation",
    "Recorder",
    "Request",
    "Result",
    "Sampler",
    "Step",
    "Trace",
    "read_prompts",
    "write_traces",
]
