"""The prefixes of many rows in pages that rows can share: what an engine samples with.

Which pages a row holds and shares is the business of `page_rows.py`; here tokens are encoded into them and canvases are
denoised over them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.errors import BlockdiffError
from blockdiff.kernels import CPU, NATIVE
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.models.page_pool import SPILL, Pool, Published
from blockdiff.models.page_rows import PagedRow, PagedRows
from blockdiff.models.page_steps import GatheredSteps, Steps, TabledSteps, bucket, first_columns, paged_past, table_of

PAGE_TOKENS = 128
MOST_STEPS = 32  # sets of rows that are denoised in turns without being gathered again
SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.8}  # that pages may take: native ops on a CPU gather live rows a second time


class Pages(PagedRows):
    """All pages of one model, on its device.

    page_tokens: tokens of a page; capacity: tokens that fit in all, of each kind of layer (None: what the device has
    memory for; on a CPU memory is taken as it is needed, elsewhere all of it with the first encode); identity: of the
    model, its adapter and its quantisation: rows share pages only where it is the same. It may be changed between rows.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        page_tokens: int = PAGE_TOKENS,
        capacity: int | None = None,
        identity: str = "",
    ):
        most = (_capacity(model) if capacity is None else capacity) // page_tokens
        by_kind = {name: [n for n, each in enumerate(model.layer_kinds) if each == name] for name in model.kinds}
        grows = model.device.type == "cpu"
        links: Published = {}
        pools = {
            name: Pool(model.kinds[name], layers, page_tokens, most, grows, links) for name, layers in by_kind.items()
        }
        super().__init__(pools, links, page_tokens, identity)
        self.model = model
        self._steps: list[Steps] = []  # the one used last comes last

    @property
    def reads_tables(self) -> bool:
        """Whether attention reads pages where they stand; shapes are then those of buckets, whatever rows hold."""
        return self.model.kernels.span_attention not in (NATIVE.span_attention, CPU.span_attention)

    # -- passes ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, rows: Sequence[PagedRow], tokens_BT: Tensor, lengths: Sequence[int]) -> Tensor:
        """Encode clean tokens causally and append them to their rows: hidden states [B, T, D] after the final norm.

        tokens_BT: int64, rows right-padded, best on the CPU (their values are needed there); lengths: how many tokens
        each row gets. Raises BlockdiffError where there is no room: `reserve` asks before.
        """
        if not all(self.reserve(row, added) for row, added in zip(rows, lengths, strict=True)):
            raise BlockdiffError(
                f"no room for {sum(lengths)} more tokens: {self.free_tokens()} of the pages' tokens are free; "
                "release rows or make capacity larger"
            )
        model, device, given = self.model, self.model.device, tokens_BT.tolist()
        numbers = [[row.length for row in rows], list(lengths)]
        past_B1, added_B1 = torch.tensor(numbers, device=device)[..., None]
        column_T = torch.arange(tokens_BT.shape[1], device=device)
        doc_start_BT = torch.where(column_T < added_B1, 0, -1)
        spans = {name: kind.encode_spans(doc_start_BT, past_B1[:, 0]) for name, kind in model.kinds.items()}
        places = {name: self._places(pool, rows, lengths, len(column_T)) for name, pool in self.pools.items()}
        past = None
        # layers write their kv into pages that are there, where attention reads these; the first call says what kv is
        is_written = self.reads_tables and all(pool.tensors for pool in self.pools.values())
        if is_written or any(numbers[0]):
            tables = {
                name: table_of(rows, pool, device, bucket(rows, pool) if self.reads_tables else 0)
                for name, pool in self.pools.items()
            }
            for pool in self.pools.values():
                pool.hold_all()
            own = (lengths, places) if is_written else ()
            past = paged_past(rows, self.pools, tables, self.reads_tables, *own)
            spans = {
                name: each.shifted(torch.tensor(first_columns(rows, self.pools[name]), device=device))
                for name, each in spans.items()
            }
        hidden, kv = model(tokens_BT.to(device), past_B1 + column_T, spans, past)
        for name, pool in self.pools.items():
            pool.write([kv[n] for n in pool.layers], places[name])
        for row, tokens, added in zip(rows, given, lengths, strict=True):
            self._append(row, tokens[:added])
        return hidden

    @torch.no_grad()
    def denoise(
        self, rows: Sequence[PagedRow], canvas_BT: Tensor, soft_BTD: Tensor | None = None, canvases: int = 1
    ) -> Tensor:
        """Hidden states [B, T, D], after the final norm, of the canvases that follow each row; leaves the rows alone.

        rows: in any order, one may come twice; canvas_BT: int64 noisy tokens, on the model's device; soft_BTD: the
        signal of the last prediction (None: none); canvases: how many of a row stand side by side: each sees those
        before it, as `spans.running_spans` says.
        """
        steps = self._steps_of(rows)
        steps.serve(rows, canvases, canvas_BT.shape[1] // canvases)
        if steps.order is not None:
            canvas_BT = canvas_BT[steps.order]
            soft_BTD = None if soft_BTD is None else soft_BTD[steps.order]
        hidden, _ = self.model(canvas_BT, steps.positions_BT, steps.spans, steps.past, True, soft_BTD, steps.rope)
        steps.keep()
        return hidden if steps.back is None else hidden[steps.back]

    def _places(self, pool: Pool, rows: Sequence[PagedRow], lengths: Sequence[int], width: int) -> Tensor:
        """Where the tokens of a call stand in a pool, int64 [B * width], counted in tokens; padding is spilled."""
        places, name = array("q"), pool.kind.name
        for row, added in zip(rows, lengths, strict=True):
            pool.add_places(places, row.tables[name], row.first[name], row.length, row.length + added)
            places.extend([SPILL * self.page_tokens] * (width - added))
        return torch.frombuffer(places, dtype=torch.int64).to(self.model.device)

    def _steps_of(self, rows: Sequence[PagedRow]) -> Steps:
        """The steps that were last made for most of these rows, else new ones in place of the oldest."""
        chosen = max(self._steps, key=lambda steps: steps.shares(rows), default=None)
        if chosen is None or not chosen.shares(rows):
            # in place of those whose rows are gone, or else of those that have not been used for longest
            gone = next((steps for steps in self._steps if self._rows.isdisjoint(steps.rows)), None)
            chosen = gone or (self._steps[0] if len(self._steps) == MOST_STEPS else None)
        if chosen is None:
            chosen = (TabledSteps if self.reads_tables else GatheredSteps)(self.model, self.pools)
        else:
            self._steps.remove(chosen)
        self._steps.append(chosen)
        return chosen


def _capacity(model: BlockDiffusionModel) -> int:
    """How many tokens fit into the share of the device's memory that pages may take."""
    each = (
        family_of(model.config).outline(model.config).cached_per_token
        * torch.empty(0, dtype=model.dtype).element_size()
    )
    available = memory.available_bytes(model.device)
    return 1 << 40 if available is None else int(available * SHARE_OF_MEMORY.get(model.device.type, 0.4)) // each
