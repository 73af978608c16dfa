"""LocalRequests: the requests of one call to shards in this process, as values, and where their rows go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.engine.reply import Reply
from fleet_sparse.wire.frame_format import PUSHES, Action, Block, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, copy_from_frame, for_frame
from fleet_sparse.worker.net.request import Outs
from fleet_sparse.worker.net.requests import (
    DenseUpdate,
    check_outs,
    check_values,
    counts_of,
    range_of,
    statistics_of,
)
from fleet_sparse.worker.net.shard_link import ClientIdentity
from fleet_sparse.worker.net.table_client import ExtraBlock
from fleet_sparse.worker.rows.row_batch import RowBatch


class LocalRequest(msgspec.Struct, eq=False):
    """A request to one shard, and its outcome.

    Attributes:
        header: Its header; the client numbers it.
        is_push: True if its op changes something on the shard.
        blocks: Its blocks.
        outs: Destination of the rows of each PULL block.
        places: For each PULL block the memory that the shard writes the rows to; None if they are in the reply, to be
            converted or divided.
        num_bytes_sent: Bytes of its ids and gradients.
        num_bytes_received: Bytes of its rows.
        wants_answers: False if no caller waits for the outcome.
        started_at: Monotonic time.
        reply: The reply, once there is one.
        error: Why there is none.
    """

    header: Header
    is_push: bool
    blocks: list[Block] = []
    outs: list[Outs] = []
    places: list[NDArray[np.float32] | None] = []
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_pulled_rows: int = 0
    num_pushed_rows: int = 0
    wants_answers: bool = True
    started_at: float = 0.0
    reply: Reply | None = None
    error: FleetSparseError | None = None

    @property
    def is_done(self) -> bool:
        """True if it has an outcome."""
        return self.reply is not None or self.error is not None

    def add_pull(self, block: Block, outs: Outs) -> None:
        """Adds a PULL block whose rows go to `outs`."""
        self.blocks.append(block)
        self.outs.append(outs)
        is_direct = block.dtype is RowDtype.FLOAT32 and len(outs) == 1 and outs[0].flags.carray
        self.places.append(outs[0] if is_direct else None)
        self.num_bytes_received += block.count * block.dim * block.dtype.in_frames.itemsize
        if block.ids is not None:
            self.num_bytes_sent += block.ids.nbytes
            self.num_pulled_rows += block.count

    def add(self, block: Block) -> None:
        """Adds a block with rows, of another action."""
        assert block.rows is not None, "only a PULL block has none"
        self.blocks.append(block)
        self.num_bytes_sent += block.rows.nbytes
        if block.ids is not None:
            self.num_bytes_sent += block.ids.nbytes
            self.num_pushed_rows += block.count

    def fill(self) -> list[ExtraBlock]:
        """Copies the rows that are in the reply to their destinations; returns the other blocks of the reply."""
        assert self.reply is not None, "it was answered"
        blocks = self.reply.blocks
        if not blocks:
            return []
        destinations = [outs for outs, place in zip(self.outs, self.places, strict=True) if place is None]
        for block, outs in zip(blocks, destinations, strict=False):
            assert block.rows is not None, "a ROWS block has rows"
            begin = 0
            for out in outs:
                copy_from_frame(block.rows[begin : begin + len(out)], block.dtype, out)
                begin += len(out)
        return [ExtraBlock(self.header.shard, block) for block in blocks[len(destinations) :]]


class LocalRequests:
    """Builds the requests of one call, with the blocks that `Requests` would put into frames.

    Args:
        op: Op of every request.
        identity: Identity of the client.
        num_shards: Number of shards of the job.
        step: As of `Requests`, as are the next ones.
    """

    def __init__(
        self,
        op: Op,
        identity: ClientIdentity,
        num_shards: int,
        step: int,
        rows_dtype: RowDtype,
        weight: float,
        to_all: bool,
    ) -> None:
        self._rows_dtype = rows_dtype
        self._weight = weight
        self._to_all = to_all
        is_push, (client_id, epoch) = op in PUSHES, identity
        self._requests = []
        for shard in range(num_shards):
            header = Header(op, 0, 0, shard, 0, 0, client_id, epoch, 0, 0, 0, step)
            self._requests.append(LocalRequest(header, is_push))

    def add_pull(self, batch: RowBatch, *, presence: bool = False) -> None:
        """As of `Requests`."""
        spec, values = batch.spec, batch.values
        counts = counts_of(batch, len(self._requests), "out")
        if not values.flags.writeable:
            raise ValueError(f"table {spec.name!r}: out is read-only, rows are written into it")
        fields = Action.PULL, spec.table_id, spec.schema_hash, spec.dim
        ids, end, begins = np.ascontiguousarray(batch.unique.ids), 0, batch.unique.begins
        for request, size in zip(self._requests, counts, strict=True):
            if size:
                begin = end if begins is None else int(begins[request.header.shard])
                end = begin + size
                block = Block(*fields, size, ids[begin:end], None, 0.0, int(presence), 1.0, self._rows_dtype)
                request.add_pull(block, (values[begin:end],))

    def add_push(self, batch: RowBatch) -> None:
        """As of `Requests`."""
        spec, dtype = batch.spec, self._rows_dtype
        counts = counts_of(batch, len(self._requests), "gradients")
        fields = Action.PUSH, spec.table_id, spec.schema_hash, spec.dim
        numbers = batch.learning_rate, batch.optimizer_step, self._weight
        ids, rows, end = np.ascontiguousarray(batch.unique.ids), for_frame(batch.values, dtype), 0
        statistics = statistics_of(batch) if spec.statistics else {}
        for request, size in zip(self._requests, counts, strict=True):
            if size or self._to_all:
                begin, end = end, end + size
                of_shard = {name: values[begin:end] for name, values in statistics.items()}
                request.add(Block(*fields, size, ids[begin:end], rows[begin:end], *numbers, dtype, of_shard))

    def add_dense_pull(self, spec: DenseSpec, outs: Outs, *, state: int = 0) -> None:
        """As of `Requests`."""
        check_outs(spec, outs)
        for request, begin, end in self._dense_ranges(spec):
            block = Block(Action.PULL, spec.table_id, spec.schema_hash, 1, end - begin, optimizer_step=state)
            request.add_pull(block, range_of(outs, begin, end))

    def add_dense_push(self, update: DenseUpdate) -> None:
        """As of `Requests`."""
        numbers = update.learning_rate, update.optimizer_step, self._weight
        self._add_dense(Action.PUSH, update.spec, update.grads, "gradients", numbers, update.dtype)

    def add_dense_assign(self, spec: DenseSpec, values: NDArray[np.float32]) -> None:
        """As of `Requests`."""
        self._add_dense(Action.ASSIGN, spec, values, "values", (0.0, 0, 1.0))

    def add_dense_replacement(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """As of `Requests`."""
        self._add_dense(Action.REPLACE, spec, values, "values", (0.0, optimizer_step, 1.0))
        for number, state in enumerate(states, start=1):
            self._add_dense(Action.REPLACE_STATE, spec, state, f"states {number}", (0.0, number, 1.0))

    def add_factors(self, spec: TableSpec | DenseSpec, factors: NDArray[np.float32]) -> None:
        """As of `Requests`."""
        rows = np.ascontiguousarray(factors, np.float32).reshape(-1, 1)
        for request in self._requests:
            request.add(Block(Action.FACTORS, spec.table_id, spec.schema_hash, 1, len(rows), None, rows))

    def add_answers(self, dense: Sequence[DenseUpdate], pulls: Sequence[RowBatch]) -> None:
        """Asks for what an update reads after it is applied: new dense values, and rows."""
        for update in dense:
            if update.outs is not None:
                self.add_dense_pull(update.spec, update.outs)
        for batch in pulls:
            self.add_pull(batch)

    def build(self) -> list[LocalRequest]:
        """The requests in the order of the shards; those without a block only if all shards get one."""
        if self._to_all:
            return self._requests
        return [request for request in self._requests if request.blocks]

    def _add_dense(
        self,
        action: Action,
        spec: DenseSpec,
        values: NDArray[np.float32],
        what: str,
        numbers: tuple[float, int, float],
        dtype: RowDtype = RowDtype.FLOAT32,
    ) -> None:
        check_values(spec, values, what)
        fields = action, spec.table_id, spec.schema_hash, 1
        rows = for_frame(values, dtype).reshape(-1, 1)
        for request, begin, end in self._dense_ranges(spec):
            request.add(Block(*fields, end - begin, None, rows[begin:end], *numbers, dtype))

    def _dense_ranges(self, spec: DenseSpec) -> Iterator[tuple[LocalRequest, int, int]]:
        """Request, begin and end of every range that is not empty."""
        for request in self._requests:
            begin, end = spec.range_of(request.header.shard, len(self._requests))
            if begin < end:
                yield request, begin, end
