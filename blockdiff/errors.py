"""The few errors a user meets. Each message is one line: what is wrong, where, and what to do."""

RESUME = "go on with --resume (from Python resume=True)"  # the remedy that many messages name


class BlockdiffError(Exception):
    """Base of every error that the command line prints as one line instead of a traceback."""


class DataError(BlockdiffError):
    """A row, a chat template or a tokenizer cannot be used for training or sampling."""


class CheckpointError(BlockdiffError):
    """A checkpoint cannot be read or written as it should be."""


class RecipeError(BlockdiffError):
    """A recipe has an unknown key or a value that cannot work."""


class RunError(BlockdiffError):
    """A training run cannot start, cannot resume, or has gone wrong."""


class RequestError(BlockdiffError):
    """A sampling request cannot be answered."""


class NoText(RequestError):
    """No text satisfies what a request asks for."""


class Full(BlockdiffError):
    """An engine's queue has no place for another request now; ask again when some are answered."""


class EngineError(BlockdiffError):
    """An engine failed, was closed or was called by two threads at once; no request is to blame."""


class TimedOut(EngineError):
    """An answer took longer than its request, or the server, lets it."""


class Closed(EngineError):
    """An engine was closed, or is about to be; another one has to be asked."""
