"""What the denoising steps of rows read, in buffers that stay where they are, so that a step can be replayed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.layers.attention import Past
from blockdiff.models.page_steps import TabledSteps
from blockdiff.spans import Spans

if TYPE_CHECKING:
    from blockdiff.models.page_rows import PagedRow
    from blockdiff.models.pages import Pages


class FixedSteps:
    """The steps of at most `most` rows, `canvases` side by side of each: `load` the rows, then `denoise` often.

    Positions, spans, RoPE and block tables stand in buffers, of which a step of fewer rows reads the first ones. What
    `denoise` launches, and on which memory, depends on what `load` gave and on nothing else.
    """

    def __init__(self, pages: Pages, most: int, canvases: int, canvas_length: int):
        self.pages, self.most, self.canvases, self.canvas_length = pages, most, canvases, canvas_length
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._widths: dict[str, int] = {}  # of the block tables of each kind of layer

    def load(self, rows: Sequence[PagedRow]) -> Hashable:
        """Write what the steps of these rows read; the same answer means the same launches, for as many rows.

        At least one of them must have tokens.
        """
        made = TabledSteps(self.pages.model, self.pages.pools)
        made.serve(rows, self.canvases, self.canvas_length)
        assert made.past is not None, "nothing was encoded yet"
        self._write(made.positions_BT, "positions")
        for name, pool in self.pages.pools.items():
            self._write(made.spans[name].bounds_BT4, name, "bounds")
            for part, x in zip(("cos", "sin"), made.rope[name], strict=True):
                self._write(x, name, part)
            prefix = made.past[pool.layers[0]][0]
            assert isinstance(prefix, PagedTensor)
            self._widths[name] = prefix.pages.columns // pool.page_tokens
            self._write(prefix.pages.lengths_B, name, "lengths")
            self._write(prefix.pages.table_BM, name, "table", str(self._widths[name]))
        # the pools of a CPU grow, and are then other memory
        memory = [(x.data_ptr(), x.shape) for pool in self.pages.pools.values() for x in pool.tensors]
        return tuple(self._widths.values()), tuple(memory)

    def denoise(self, canvas_BT: Tensor, soft_BTD: Tensor) -> Tensor:
        """Hidden states [B, T, D], after the final norm, of canvases of the first B rows that were loaded."""
        B, spans, past = len(canvas_BT), dict[str, Spans](), dict[int, Past]()
        for name, pool in self.pages.pools.items():
            # made anew in every step: both remember what they compute of the buffers, and the buffers change
            spans[name] = Spans(self._read(B, name, "bounds"), is_padded=False)
            width = self._widths[name]
            table, lengths = self._read(B, name, "table", str(width)), self._read(B, name, "lengths")
            pages = BlockTable(table, lengths, width * pool.page_tokens, pool.page_tokens)
            for n, layer in enumerate(pool.layers):
                past[layer] = tuple(PagedTensor(x[n], pages) for x in pool.tensors)
        rope = {name: (self._read(B, name, "cos"), self._read(B, name, "sin")) for name in spans}
        layers = [past[layer] for layer in sorted(past)]
        hidden, _ = self.pages.model(canvas_BT, self._read(B, "positions"), spans, layers, True, soft_BTD, rope)
        return hidden

    def _write(self, x: Tensor, *name: str) -> None:
        if name not in self._buffers:
            self._buffers[name] = x.new_zeros(self.most, *x.shape[1:])
        self._buffers[name][: len(x)] = x

    def _read(self, count: int, *name: str) -> Tensor:
        return self._buffers[name][:count]
