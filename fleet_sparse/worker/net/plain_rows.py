"""PlainRows: the rows of one call, from which its frames are made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import msgspec

from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, INT64, Op

from ..rows.row_batch import RowBatch
from .request import Request
from .requests import FLOAT_BYTES, ID_BYTES, Requests, counts_of


class PlainRows(msgspec.Struct, eq=False):
    """A pull or a push of rows that needs one frame a shard, and no conversion.

    Attributes:
        op: PULL or PUSH.
        batches: The rows.
        num_shards: Number of shards of the job.
        step: As of `Requests`.
        weight: As of `Requests`.
        to_all: As of `Requests`.
        encoded: Requests that `encode` made, by shard.
    """

    op: Op
    batches: Sequence[RowBatch]
    num_shards: int
    step: int
    weight: float
    to_all: bool
    encoded: dict[int, Request] = {}

    def requests(self, max_frame_bytes: int) -> list[Request] | None:
        """Returns requests whose tables and columns are not encoded; None if these rows are not plain.

        Raises:
            ValueError: As `Requests`.
        """
        num_shards, is_push = self.num_shards, self.op is Op.PUSH
        num_ids, num_bytes = [0] * num_shards, [0] * num_shards
        what = "gradients" if is_push else "out"
        budget = max_frame_bytes - HEADER_BYTES
        for batch in self.batches:
            if is_push and batch.spec.statistics:
                return None
            values = batch.values
            counts = counts_of(batch, num_shards, what)
            flags, (ids, num_per_shard, begins) = values.flags, batch.unique
            is_plain = flags.c_contiguous and flags.aligned if is_push else flags.carray
            if not is_plain or not (ids.flags.c_contiguous and ids.flags.aligned) or begins is not None:
                return None
            if num_per_shard.dtype != INT64 or not num_per_shard.flags.c_contiguous:
                return None
            row_bytes = FLOAT_BYTES * batch.spec.dim
            budget -= BLOCK_BYTES + (ID_BYTES + row_bytes) * values.shape[0]
            if is_push:
                row_bytes += ID_BYTES
            else:
                row_bytes = ID_BYTES
            for shard, count in enumerate(counts):
                num_ids[shard] += count
                num_bytes[shard] += row_bytes * count
        if budget < 0:
            return None
        requests = []
        for shard in range(num_shards):
            number = num_ids[shard]
            if number or self.to_all:
                request = Request(self.op, self.step, shard)
                request.num_bytes = num_bytes[shard]
                request.source = self
                if is_push:
                    request.num_pushed_rows = number
                else:
                    request.num_pulled_rows = number
                requests += [request]
        return requests

    def encode(self, request: Request) -> None:
        """Fills in what a request of these rows consists of."""
        if not self.encoded:
            empty = [*map(Request, repeat(self.op), repeat(self.step), range(self.num_shards))]
            requests = Requests(empty, weight=self.weight, to_all=self.to_all)
            for batch in self.batches:
                if self.op is Op.PUSH:
                    requests.add_push(batch)
                else:
                    requests.add_pull(batch)
            self.encoded = {each.shard: each for each in empty}
        encoded = self.encoded[request.shard]
        request.blocks = encoded.blocks
        request.table, request.columns, request.cost = encoded.table, encoded.columns, encoded.cost
        request.outs, request.reply_table = encoded.outs, encoded.reply_table
        request.reply_lengths = encoded.reply_lengths
