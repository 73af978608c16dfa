"""Requests: the blocks of one call, and which part of the caller's arrays goes to which shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import EVEN
from fleet_sparse.core.reused_memory import ReusedMemory
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INT64,
    NO_STATISTICS,
    STATISTICS_COLUMNS,
    Action,
    Block,
)
from fleet_sparse.wire.row_dtype import FrameRows, RowDtype, copy_from_frame, for_frame, shorten

from ..rows.row_batch import RowBatch
from ..rows.row_exchange import RowAsk, RowChange

_FLOAT32 = np.dtype(np.float32)
ID_BYTES, FLOAT_BYTES = 8, 4

Outs = Sequence[NDArray[np.float32]]
"""Arrays `(n, dim)` each: the rows of a reply are written to one after the other."""


class DenseUpdate(NamedTuple):
    """Gradients of one dense array in one step, and where its new values go."""

    spec: DenseSpec
    grads: NDArray[np.float32]
    """`(spec.num_values,)`."""
    outs: Sequence[NDArray[np.float32]] | None
    """Contiguous arrays of any shape, with `spec.num_values` values together; the values are written to one after the
    other. None: the new values are not read."""
    learning_rate: float
    optimizer_step: int = 0
    """Step count t of the update rule, from 1."""
    dtype: RowDtype = RowDtype.FLOAT32
    """Encoding of the gradients on the wire, FLOAT32 or BFLOAT16."""


class ShardRequest(Protocol):
    """The request of a call to one shard."""

    @property
    def shard(self) -> int:
        """Index of the shard."""
        ...

    @property
    def is_empty(self) -> bool:
        """True if it has no blocks."""
        ...

    def add(self, block: Block, outs: Outs | None = None, *, num_states: int = 0) -> None:
        """Adds a block, whose arrays are contiguous; the rows that a PULL block asks for are written to `outs`.

        A PULL block that asks about copies has no `outs`; the answer to it may have `num_states` states of each row.
        """
        ...

    def within(self, max_frame_bytes: int) -> Sequence[Self]:
        """Returns the request, divided if it must be.

        Raises:
            ValueError: One row, or factors, which cannot be divided, are too large.
        """
        ...


AnyRequest = TypeVar("AnyRequest", bound=ShardRequest)


class Requests(Generic[AnyRequest]):
    """Builds the requests of one call. Arrays are sent from the caller's memory where they need no conversion.

    Args:
        requests: An empty request for each shard.
        rows_dtype: Dtype of rows of tables on the wire.
        weight: Factor on all gradients.
        to_all: Every shard gets a request, and every table that is pushed has a block in it, even without ids.
        placement_version: Version of the placement, by which shards have dense values.

    Attributes:
        all: The request to each shard, those without a block included.
    """

    def __init__(
        self,
        requests: Sequence[AnyRequest],
        rows_dtype: RowDtype = RowDtype.FLOAT32,
        weight: float = 1.0,
        *,
        to_all: bool = False,
        placement_version: int = EVEN,
    ) -> None:
        self.all = requests
        self._placement_version = placement_version
        self._rows_dtype = rows_dtype
        self._weight = weight
        self._to_all = to_all

    def add_pull(self, batch: RowBatch, *, presence: bool = False) -> None:
        """Asks for rows, which are written to `batch.values`; with `presence`, for ones if an id has a row, else zeros.

        Raises `ValueError` if shapes or dtypes do not fit.
        """
        spec, values = batch.spec, batch.values
        counts = counts_of(batch, len(self.all), "out")
        if not values.flags.writeable:
            raise ValueError(f"table {spec.name!r}: out is read-only, rows are written into it")
        fields = Action.PULL, spec.table_id, spec.schema_hash, spec.dim
        ids, end, begins = np.ascontiguousarray(batch.unique.ids), 0, batch.unique.begins
        for request, count in zip(self.all, counts, strict=True):
            if count:
                begin = end if begins is None else int(begins[request.shard])
                end = begin + count
                block = Block(*fields, count, ids[begin:end], None, 0.0, int(presence), 1.0, self._rows_dtype)
                request.add(block, (values[begin:end],))

    def add_push(self, batch: RowBatch) -> None:
        """Sends the gradients `batch.values`. Raises `ValueError` if shapes or dtypes do not fit."""
        spec, dtype = batch.spec, self._rows_dtype
        counts = counts_of(batch, len(self.all), "gradients")
        fields = Action.PUSH, spec.table_id, spec.schema_hash, spec.dim
        numbers = batch.learning_rate, batch.optimizer_step, self._weight
        ids, rows, end = np.ascontiguousarray(batch.unique.ids), for_frame(batch.values, dtype), 0
        statistics = statistics_of(batch) if spec.statistics else NO_STATISTICS
        for request, count in zip(self.all, counts, strict=True):
            if count or self._to_all:
                begin, end = end, end + count
                of_shard = {name: column[begin:end] for name, column in statistics.items()}
                request.add(Block(*fields, count, ids[begin:end], rows[begin:end], *numbers, dtype, of_shard))

    def add_ask(self, ask: RowAsk) -> None:
        """Asks about copies of rows. The answer is not written anywhere. After all blocks whose answers are.

        Rows of the answer are float32 in every job: a copy is the row of the pservers.
        """
        spec, unique = ask.spec, ask.unique
        fields, end = (Action.PULL, spec.table_id, spec.schema_hash, spec.dim), 0
        for request, count in zip(self.all, unique.num_per_shard.tolist(), strict=True):
            if count:
                begin, end = end, end + count
                block = Block(*fields, count, unique.ids[begin:end])
                block.copies = {"versions": ask.versions[begin:end]}
                request.add(block, num_states=spec.update_rule.num_states)

    def add_change(self, change: RowChange) -> None:
        """Sends changes of rows, or rows."""
        spec, unique, end = change.spec, change.unique, 0
        action = Action.ASSIGN if change.is_whole else Action.CHANGE
        for request, count in zip(self.all, unique.num_per_shard.tolist(), strict=True):
            if not count:
                continue
            begin, end = end, end + count
            block = Block(action, spec.table_id, spec.schema_hash, spec.dim, count)
            block.ids, block.rows = unique.ids[begin:end], change.rows[begin:end]
            block.optimizer_step = change.optimizer_step
            if not change.is_whole:
                block.learning_rate = change.weight
                block.statistics = {"counts": change.counts[begin:end]}
            if change.states is not None:
                block.copies = {"states": change.states[begin:end]}
                if not change.is_whole:
                    block.copies = {"versions": change.num_updates[begin:end], **block.copies}
            request.add(block)

    def add_dense_pull(self, spec: DenseSpec, outs: Outs, *, state: int = 0) -> None:
        """Asks for dense values, which are written to arrays of any shape with `num_values` together, in order.

        With `state` from 1 on, asks for that state of their rule instead. Raises `ValueError` if sizes or dtypes do
        not fit.
        """
        _check_outs(spec, outs)
        for request, begin, end in self._dense_ranges(spec):
            block = Block(Action.PULL, spec.table_id, spec.schema_hash, 1, end - begin, optimizer_step=state)
            request.add(block, rows_between([out.reshape(-1, 1) for out in outs], begin, end))

    def add_dense_push(self, update: DenseUpdate) -> None:
        """Sends gradients of dense values. Raises `ValueError` if their shape or dtype does not fit."""
        numbers = update.learning_rate, update.optimizer_step, self._weight
        self._add_dense(Action.PUSH, update.spec, update.grads, "gradients", numbers, update.dtype)

    def add_dense_assign(self, spec: DenseSpec, values: NDArray[np.float32]) -> None:
        """Sends dense values `(num_values,)`. Raises `ValueError` if their shape or dtype does not fit."""
        self._add_dense(Action.ASSIGN, spec, values, "values", (0.0, 0, 1.0))

    def add_dense_replacement(
        self, spec: DenseSpec, values: NDArray[np.float32], states: Sequence[NDArray[np.float32]], optimizer_step: int
    ) -> None:
        """Sends dense values `(num_values,)`, each state `(num_values,)` of their rule, and the rule's t.

        Raises `ValueError` if a shape or dtype does not fit.
        """
        self._add_dense(Action.REPLACE, spec, values, "values", (0.0, optimizer_step, 1.0))
        for number, state in enumerate(states, start=1):
            self._add_dense(Action.REPLACE_STATE, spec, state, f"states {number}", (0.0, number, 1.0))

    def add_factors(self, spec: TableSpec | DenseSpec, factors: NDArray[np.float32]) -> None:
        """Sends all shards the factors on the gradients of a table, or of each segment of a dense array."""
        rows = np.ascontiguousarray(factors, np.float32).reshape(-1, 1)
        for request in self.all:
            request.add(Block(Action.FACTORS, spec.table_id, spec.schema_hash, 1, len(rows), None, rows))

    def build(self, max_frame_bytes: int) -> list[AnyRequest]:
        """The requests in the order of the shards: one for each, or several if the limits demand it.

        A block may be divided between two ids, or between two dense values.

        Raises:
            ValueError: One row, or factors, which cannot be divided, do not fit into a frame.
        """
        built: list[AnyRequest] = []
        for request in self.all:
            if self._to_all or not request.is_empty:
                built += request.within(max_frame_bytes)
        return built

    def _add_dense(
        self,
        action: Action,
        spec: DenseSpec,
        values: NDArray[np.float32],
        what: str,
        numbers: tuple[float, int, float],
        dtype: RowDtype = RowDtype.FLOAT32,
    ) -> None:
        if values.dtype != np.float32 or values.shape != (spec.num_values,):
            raise ValueError(
                f"dense {spec.name!r}: {what} are {values.dtype} {values.shape}, should be float32 {(spec.num_values,)}"
            )
        values = np.ascontiguousarray(values)
        rows = (values if dtype is RowDtype.FLOAT32 else _shortened(values, dtype)).reshape(-1, 1)
        fields = action, spec.table_id, spec.schema_hash, 1
        # A shard without values learns by an empty block that the array has values.
        for request, begin, end in self._dense_ranges(spec, with_empty=action is not Action.PUSH):
            request.add(Block(*fields, end - begin, None, rows[begin:end], *numbers, dtype))

    def _dense_ranges(self, spec: DenseSpec, *, with_empty: bool = False) -> Iterator[tuple[AnyRequest, int, int]]:
        """Request, begin and end of every range that is not empty; of all with `with_empty`."""
        for request in self.all:
            begin, end = spec.range_of(request.shard, len(self.all), self._placement_version)
            if begin < end or with_empty:
                yield request, begin, end


def max_dense_values(max_frame_bytes: int) -> int:
    """Returns the largest number of values of a dense array on one shard that fit into one frame."""
    return (max_frame_bytes - HEADER_BYTES - BLOCK_BYTES) // FLOAT_BYTES


def _check_outs(spec: DenseSpec, outs: Outs) -> None:
    """Raises `ValueError` if dense values cannot be written to these arrays, one after the other."""
    for out in outs:
        if out.dtype != np.float32 or not out.flags.carray:
            raise ValueError(f"dense {spec.name!r}: out is {out.dtype}, should be writable contiguous float32")
    num_values = sum(out.size for out in outs)
    if num_values != spec.num_values:
        raise ValueError(f"dense {spec.name!r}: out has {num_values} values, should have {spec.num_values}")


def write_rows(rows: FrameRows, dtype: RowDtype, outs: Outs) -> None:
    """Copies the rows of a reply to the arrays that wait for them."""
    begin = 0
    for out in outs:
        copy_from_frame(rows[begin : begin + len(out)], dtype, out)
        begin += len(out)


def counts_of(batch: RowBatch, num_shards: int, what: str) -> list[int]:
    """Returns the number of ids of each shard. Raises `ValueError` if shapes or dtypes do not fit."""
    spec, (ids, num_per_shard, begins), rows = batch.spec, batch.unique, batch.values
    counts: list[int] = num_per_shard.tolist()
    num_ids = len(ids)
    if ids.dtype != INT64 or ids.ndim != 1:
        raise ValueError(f"table {spec.name!r}: ids are {ids.dtype} with {ids.ndim} axes, should be int64 with 1")
    is_whole = sum(counts) == num_ids or begins is not None
    if len(counts) != num_shards or min(counts) < 0 or not is_whole:
        raise ValueError(
            f"table {spec.name!r}: num_per_shard is {counts}, should be {num_shards} counts of {num_ids} ids"
        )
    if rows.dtype != _FLOAT32:
        raise ValueError(f"table {spec.name!r}: {what} are {rows.dtype}, should be float32")
    if rows.shape != (num_ids, spec.dim):
        if rows.ndim == 2 and rows.shape[1] != spec.dim:
            raise ValueError(f"table {spec.name!r}: {what} have dim {rows.shape[1]}, the table has dim {spec.dim}")
        raise ValueError(f"table {spec.name!r}: {what} have shape {rows.shape}, should be {(num_ids, spec.dim)}")
    return counts


def statistics_of(batch: RowBatch) -> dict[str, NDArray[Any]]:
    """Returns the columns with statistics of a push, by name.

    Raises:
        ValueError: One is missing, or has another shape or dtype.
    """
    spec, count = batch.spec, len(batch.unique.ids)
    columns = {}
    for name, array in zip(spec.statistics, batch.statistics, strict=False):
        dtype = STATISTICS_COLUMNS[name].dtype
        if array.dtype != dtype or array.shape != (count,):
            raise ValueError(
                f"table {spec.name!r}: {name} are {array.dtype} {array.shape}, should be {dtype} {(count,)}"
            )
        columns[name] = array
    if len(columns) != len(spec.statistics):
        raise ValueError(
            f"table {spec.name!r}: a push has {len(batch.statistics)} statistics of its ids, should have "
            f"{', '.join(spec.statistics)}"
        )
    return columns


def _shortened(values: NDArray[np.float32], dtype: RowDtype) -> NDArray[np.uint16]:
    """Dense values in 16 bits each, in memory that is used again once they are acked."""
    halves = _halves.lend(len(values))[: len(values)]
    shorten(values, dtype, halves)
    return halves


_halves = ReusedMemory(np.uint16, num_kept=2)


def rows_between(arrays: Outs, begin: int, end: int) -> Outs:
    """Rows `[begin, end)` of all rows that the arrays have together, as views."""
    parts, offset = [], 0
    for array in arrays:
        first, last = max(begin - offset, 0), min(end - offset, len(array))
        if first < last:
            parts.append(array[first:last])
        offset += len(array)
    return parts
