"""From a model and prompts to text: requests in, results out, and what happened in between."""

from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.prompts import read_prompts
from blockdiff.sampling.read import Read, RunningRead
from blockdiff.sampling.request import Forwards, Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.strategies import Composed, parse_strategy
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy
from blockdiff.sampling.trace import CommittedCanvas, Recorder, Step, Trace, write_traces

__all__ = [
    "Canvases",
    "CommittedCanvas",
    "Composed",
    "Decision",
    "DiffusionSettings",
    "Engine",
    "Forwards",
    "Generation",
    "Read",
    "Recorder",
    "Request",
    "Result",
    "RunningRead",
    "Sampler",
    "Shape",
    "Step",
    "Strategy",
    "Trace",
    "parse_strategy",
    "read_prompts",
    "write_traces",
]
