"""The exceptions that a user meets. Each message is one line: what is wrong, where, and what to do."""

RESUME = "go on with --resume (from Python resume=True)"  # the remedy that many messages name


class BlockdiffError(Exception):
    """The base of all errors that the command line prints as one line instead of a traceback."""


class DataError(BlockdiffError):
    """A row, a chat template or a tokenizer cannot be used for training or sampling."""


class CheckpointError(BlockdiffError):
    """A checkpoint cannot be read or written."""


class RecipeError(BlockdiffError):
    """A recipe has an unknown key or a value that cannot work."""


class RunError(BlockdiffError):
    """A training run cannot start, cannot resume, or has gone wrong."""


class RequestError(BlockdiffError):
    """A sampling request cannot be answered."""


class NoText(RequestError):
    """No text satisfies the constraint of a request."""


class Full(BlockdiffError):
    """The queue of an engine is full; send the request again later."""


class EngineError(BlockdiffError):
    """An engine failed, was closed or was called by two threads at once. The request is not the cause."""


class TimedOut(EngineError):
    """An answer took longer than the time limit of its request or of the server."""


class Closed(EngineError):
    """An engine was closed or is about to be; send the request to another one."""
