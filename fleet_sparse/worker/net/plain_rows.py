"""PlainRows: the gradients and rows of one call, from which its frames are made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import msgspec

from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, INT64, Op

from ..rows.row_batch import RowBatch
from .request import Request
from .requests import FLOAT_BYTES, ID_BYTES, Requests, counts_of


class PlainRows(msgspec.Struct, eq=False):
    """Gradients and rows of a call that needs one frame a shard, and no conversion.

    Attributes:
        op: PULL, PULL_EARLY, PUSH or PUSH_PULL.
        num_tables: Number of pushes and pulls.
        pushes: Gradients.
        pulls: Rows to pull, after the gradients are applied.
        num_shards: Number of shards of the job.
        step: Step number in every request.
        weight: As in `Requests`.
        to_all: As in `Requests`.
        is_deferred: True if the rows are received later, and not by the lane.
        encoded: Requests that `encode` made, by shard.
    """

    op: Op
    num_tables: int
    pushes: Sequence[RowBatch]
    pulls: Sequence[RowBatch]
    num_shards: int
    step: int
    weight: float
    to_all: bool
    is_deferred: bool = False
    encoded: dict[int, Request] = {}

    def requests(self, max_frame_bytes: int) -> list[Request] | None:
        """Returns requests whose tables and columns are not encoded; None if these rows are not plain.

        Raises:
            ValueError: As `Requests`.
        """
        num_shards = self.num_shards
        num_bytes, num_pushed, num_pulled = [0] * num_shards, [0] * num_shards, [0] * num_shards
        budget = max_frame_bytes - HEADER_BYTES
        for batch in self.pushes:
            counts = counts_of(batch, num_shards, "gradients")
            if batch.spec.statistics or batch.unique.begins is not None or not _is_plain(batch):
                return None
            row_bytes = ID_BYTES + FLOAT_BYTES * batch.spec.dim
            budget -= BLOCK_BYTES + row_bytes * batch.values.shape[0]
            for shard, count in enumerate(counts):
                num_pushed[shard] += count
                num_bytes[shard] += row_bytes * count
        for batch in self.pulls:
            counts = counts_of(batch, num_shards, "out")
            if not (_is_plain(batch) and batch.values.flags.writeable):
                return None
            budget -= BLOCK_BYTES + (ID_BYTES + FLOAT_BYTES * batch.spec.dim) * batch.values.shape[0]
            for shard, count in enumerate(counts):
                num_pulled[shard] += count
                num_bytes[shard] += ID_BYTES * count
        if budget < 0:
            return None
        requests = []
        for shard in range(num_shards):
            if num_pushed[shard] or num_pulled[shard] or self.to_all:
                request = Request(self.op, self.step, shard)
                request.num_bytes = num_bytes[shard]
                request.source = self
                request.num_pushed_rows, request.num_pulled_rows = num_pushed[shard], num_pulled[shard]
                if self.is_deferred:
                    self._set_outs(request)
                requests += [request]
        return requests

    def _set_outs(self, request: Request) -> None:
        """Sets where the rows of a reply go that the lane does not receive."""
        for batch in self.pulls:
            num_per_shard, begins = batch.unique.num_per_shard, batch.unique.begins
            count = int(num_per_shard[request.shard])
            if count:
                begin = int(num_per_shard[: request.shard].sum() if begins is None else begins[request.shard])
                request.outs.append((batch.values[begin : begin + count],))
                request.reply_lengths.append(FLOAT_BYTES * batch.spec.dim * count)

    def encode(self, request: Request) -> None:
        """Fills in what a request of these rows consists of."""
        if not self.encoded:
            empty = [*map(Request, repeat(self.op), repeat(self.step), range(self.num_shards))]
            requests = Requests(empty, weight=self.weight, to_all=self.to_all)
            for batch in self.pushes:
                requests.add_push(batch)
            for batch in self.pulls:
                requests.add_pull(batch)
            self.encoded = {each.shard: each for each in empty}
        encoded = self.encoded[request.shard]
        request.blocks = encoded.blocks
        request.table, request.columns, request.cost = encoded.table, encoded.columns, encoded.cost
        request.outs, request.reply_table = encoded.outs, encoded.reply_table
        request.reply_lengths = encoded.reply_lengths


def _is_plain(batch: RowBatch) -> bool:
    """Returns whether a kernel can read the arrays of a batch as they are."""
    (ids, num_per_shard, begins), of_values = batch.unique, batch.values.flags
    of_ids, of_counts = ids.flags, num_per_shard.flags
    is_plain = of_ids.c_contiguous and of_ids.aligned and of_values.c_contiguous and of_values.aligned
    is_plain = is_plain and of_counts.c_contiguous and num_per_shard.dtype == INT64
    return is_plain and (begins is None or (begins.dtype == INT64 and begins.flags.c_contiguous))
