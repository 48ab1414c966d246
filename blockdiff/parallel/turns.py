"""Held-out evaluation and sampling over ranks that may each hold only pieces of the model.

All ranks must take part in every call of such a model, but they have unequal numbers of batches, prompts and denoising
steps. So before every call they agree on the next one. A rank that has nothing to compute takes part with one token and
drops the result. If all ranks have the same rows (tensor parallelism over all of them) they make the same calls anyway,
and only agree whether to continue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.images import ImageInput
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted
from blockdiff.tensor_pieces import is_spread

# The votes of a rank: the call that it makes next, or how its work ended.
_MODEL, _VOCABULARY, _IMAGES, _DONE, _FAILED, _INTERRUPTED = range(6)


@contextmanager
def measuring(module: nn.Module, ranks: Ranks, doing: str) -> Iterator[Callable[[], None]]:
    """Let ranks call a model that may be spread over them, each any number of times, inside the `with` block.

    module: the model, or an objective of it. doing: a name of the work for messages. Yields `look`, to be called
    between pieces of the work; it raises Interrupted on all ranks if one was asked to stop.

    All ranks enter and leave together (see `Ranks.at_own_pace`). No rank affects another's results.
    """
    if ranks.world > 1 and ranks.row_world == 1:  # they run every call together, and so have to leave after the same

        def look() -> None:
            if ranks.any(ranks.is_stopping() > 0)[0]:
                raise Interrupted

        yield look
        return
    with ranks.at_own_pace(doing) as look_around, _turns(module, ranks):
        yield look_around


@contextmanager
def _turns(module: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Let ranks call a model that is spread over them, each as often as it needs; do nothing for any other model.

    If one rank leaves with an error, the others raise RunError at their next call; if it leaves with Interrupted, they
    raise that. An error during a call is not announced: the others find the rank lost or hung.
    """
    if ranks.world == 1 or not any(map(is_spread, module.parameters())):
        yield
        return
    model: Any = module if isinstance(module, BlockDiffusionModel) else module.model
    turn = _Turns(model, ranks)
    watched: list[nn.Module] = [model, model.vocabulary]
    handles = [part.register_forward_pre_hook(turn.begin, prepend=True) for part in watched]
    handles += [part.register_forward_hook(turn.end, always_call=True) for part in watched]
    model.image_features = turn.image_features
    try:
        yield
        turn.answer_until_all_are_done()
    except BaseException as error:
        turn.tell(error)
        raise
    finally:
        model.image_features = turn.see
        for handle in handles:
            handle.remove()


class _Turns:
    """One rank's side of the agreement on the next call; `see` is the model's own `image_features`."""

    def __init__(self, model: BlockDiffusionModel, ranks: Ranks) -> None:
        self.model, self.ranks, self.see = model, ranks, model.image_features
        self.depth = 0  # number of watched calls in progress, nested
        self.is_over = False  # whether a rank left with an error, so that none waits for a vote

    def begin(self, module: nn.Module, _: Any) -> None:
        """Before a call of the model or its vocabulary, take part in other ranks' calls until it is its turn."""
        self.wait_for(_MODEL if module is self.model else _VOCABULARY)

    def image_features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the model's `image_features`, after taking part in other ranks' calls until it is their turn."""
        try:
            self.wait_for(_IMAGES)
            return self.see(inputs)
        finally:
            self.end()

    def wait_for(self, mine: int) -> None:
        """Take part in the other ranks' calls until all agree on `mine`; inside a watched call return at once."""
        self.depth += 1
        if self.depth > 1:
            return
        while (called := self._agreed(mine)) != mine:
            self._take_part(called)

    def end(self, *_: Any) -> None:
        """Count a watched call as ended, by its return or by an error."""
        self.depth -= 1

    def answer_until_all_are_done(self) -> None:
        """Take part in the other ranks' calls until all ranks are done."""
        self.depth += 1
        while (called := self._agreed(_DONE)) != _DONE:
            self._take_part(called)
        self.depth -= 1

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one leaves, if they still wait for its vote."""
        if self.depth == 0 and not self.is_over:
            with suppress(RunError, Interrupted, RuntimeError):  # the first error counts
                self._agreed(_INTERRUPTED if isinstance(error, Interrupted) else _FAILED)

    def _agreed(self, mine: int) -> int:
        """Vote `mine` and return the next call of all ranks: the model if a rank needs it, else another, or the end."""
        votes = torch.zeros(6, dtype=torch.int64)
        votes[mine] = 1
        self.is_over = True  # if anything interrupts this, no rank waits for this one any more
        dist.all_reduce(votes, group=_group(dist.group.WORLD, self.ranks.timeout))
        if votes[_FAILED]:
            raise RunError("another rank failed; its message says why")
        if votes[_INTERRUPTED]:
            raise Interrupted
        self.is_over = False
        return next(kind for kind in (_MODEL, _VOCABULARY, _IMAGES, _DONE) if votes[kind])

    @torch.no_grad()
    def _take_part(self, called: int) -> None:
        """Call the model or its vocabulary with one token, or its image side with a blank, and drop the result."""
        if called == _IMAGES:
            assert self.model.image_side is not None, "another rank has called it"
            self.see([self.model.image_side.blank().to(self.model.device)])
            return
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        if called == _VOCABULARY:
            self.model.vocabulary.embed(token)
            return
        spans = {name: kind.encode_spans(token) for name, kind in self.model.kinds.items()}
        self.model(token, token, spans)


@functools.cache
def _group(world: Any, timeout: float) -> Any:
    """Return a gloo group of all ranks, whose collectives wait for no device."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
