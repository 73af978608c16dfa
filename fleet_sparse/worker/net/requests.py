"""Requests: the frames of one call, which part of the caller's arrays goes to which shard, and where replies go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.reused_memory import ReusedMemory
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import (
    BLOCK,
    BLOCK_BYTES,
    DIVISIBLE,
    HEADER_BYTES,
    IDS,
    INT64,
    MAX_BLOCKS,
    MAX_PARTS,
    ROWS,
    STATISTICS_BYTES,
    STATISTICS_COLUMNS,
    Action,
    Buffer,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype, copy_from_frame, for_frame, shorten

from ..rows.row_batch import RowBatch
from .request import NO_STATISTICS, Outs, Request
from .shard_link import Outcome

_FLOAT32 = np.dtype(np.float32)
ID_BYTES, FLOAT_BYTES = 8, 4
# With this many columns another block fits into a frame, whatever it has.
_MAX_COLUMNS = MAX_PARTS - 1 - 2 - len(STATISTICS_COLUMNS)


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


class Requests:
    """Builds the requests of one call. Float32 arrays are sent from the caller's memory where they are contiguous.

    Args:
        op: Op of every request.
        num_shards: Number of shards of the job.
        step: Step number in every request; 0 in a job that does not count steps.
        rows_dtype: Dtype of rows of tables on the wire.
        weight: Factor on all gradients.
        to_all: Every shard gets a request, and every table that is pushed has a block in it, even without ids.
    """

    def __init__(
        self,
        op: Op,
        num_shards: int,
        *,
        step: int = 0,
        rows_dtype: RowDtype = RowDtype.FLOAT32,
        weight: float = 1.0,
        to_all: bool = False,
    ) -> None:
        self._rows_dtype = rows_dtype
        self._weight = weight
        self._to_all = to_all
        self._requests = [*map(Request, repeat(op), repeat(step), range(num_shards))]

    @property
    def all(self) -> Sequence[Request]:
        """The request to each shard, those without a block included."""
        return self._requests

    def add_pull(self, batch: RowBatch, *, presence: bool = False) -> None:
        """Asks for rows, which are written to `batch.values`; with `presence`, for ones if an id has a row, else zeros.

        Raises `ValueError` if shapes or dtypes do not fit.
        """
        spec, values = batch.spec, batch.values
        counts = counts_of(batch, len(self._requests), "out")
        if not values.flags.writeable:
            raise ValueError(f"table {spec.name!r}: out is read-only, rows are written into it")
        dtype = self._rows_dtype
        row_bytes = spec.dim * (FLOAT_BYTES if dtype is RowDtype.FLOAT32 else FLOAT_BYTES // 2)
        ids, end = _bytes_of(batch.unique.ids), 0
        begins = batch.unique.begins
        for request, count in zip(self._requests, counts, strict=True):
            if count:
                begin = end if begins is None else int(begins[request.shard])
                end = begin + count
                request.add_pull(
                    (spec.table_id, dtype, spec.schema_hash, count, spec.dim),
                    ids[ID_BYTES * begin : ID_BYTES * end],
                    (values[begin:end],),
                    row_bytes * count,
                    int(presence),
                )
                request.num_pulled_rows += count

    def add_push(self, batch: RowBatch) -> None:
        """Sends the gradients `batch.values`. Raises `ValueError` if shapes or dtypes do not fit."""
        spec, dtype = batch.spec, self._rows_dtype
        counts = counts_of(batch, len(self._requests), "gradients")
        rows = _bytes_of(batch.values if dtype is RowDtype.FLOAT32 else for_frame(batch.values, dtype))
        row_bytes = spec.dim * (FLOAT_BYTES if dtype is RowDtype.FLOAT32 else FLOAT_BYTES // 2)
        statistics = NO_STATISTICS
        if spec.statistics:
            statistics = {name: _bytes_of(values) for name, values in statistics_of(batch).items()}
        ids, end = _bytes_of(batch.unique.ids), 0
        for request, count in zip(self._requests, counts, strict=True):
            if count or self._to_all:
                begin, end = end, end + count
                request.add(
                    Action.PUSH,
                    (spec.table_id, dtype, spec.schema_hash, count, spec.dim),
                    (ids[ID_BYTES * begin : ID_BYTES * end], rows[row_bytes * begin : row_bytes * end]),
                    (batch.learning_rate, batch.optimizer_step, self._weight),
                    _part_of(statistics, begin, end) if statistics else NO_STATISTICS,
                )
                request.num_pushed_rows += count

    def add_dense_pull(self, spec: DenseSpec, outs: Outs, *, state: int = 0) -> None:
        """Asks for dense values, which are written to arrays of any shape with `num_values` together, in order.

        With `state` from 1 on, asks for that state of their rule instead. Raises `ValueError` if sizes or dtypes do
        not fit.
        """
        check_outs(spec, outs)
        for request, begin, end in self._dense_ranges(spec):
            request.add_pull(
                (spec.table_id, RowDtype.FLOAT32, spec.schema_hash, end - begin, 1),
                None,
                range_of(outs, begin, end),
                FLOAT_BYTES * (end - begin),
                state,
            )

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
        rows = np.ascontiguousarray(factors, np.float32).reshape(-1)
        fields = spec.table_id, RowDtype.FLOAT32, spec.schema_hash, len(rows), 1
        for request in self._requests:
            request.add(Action.FACTORS, fields, (None, _bytes_of(rows)))

    def build(self, max_frame_bytes: int) -> list[Request]:
        """The requests in the order of the shards: one frame for each, or several if the limits demand it.

        A block may be split between two ids, or between two dense values.

        Raises:
            ValueError: One row, or factors, which cannot be split, do not fit into a frame.
        """
        budget = max_frame_bytes - HEADER_BYTES
        built: list[Request] = []
        for request in self._requests:
            is_full = len(request.table) > MAX_BLOCKS * BLOCK_BYTES or len(request.columns) > _MAX_COLUMNS
            if request.cost > budget or is_full:
                built += _split(request, budget)
            elif request.table or self._to_all:
                built.append(request)
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
        check_values(spec, values, what)
        rows = _bytes_of(values if dtype is RowDtype.FLOAT32 else _shortened(values, dtype))
        value_bytes = dtype.in_frames.itemsize
        # A shard without values learns by an empty block that the array has values.
        for request, begin, end in self._dense_ranges(spec, with_empty=action is not Action.PUSH):
            request.add(
                action,
                (spec.table_id, dtype, spec.schema_hash, end - begin, 1),
                (None, rows[value_bytes * begin : value_bytes * end]),
                numbers,
            )

    def _dense_ranges(self, spec: DenseSpec, *, with_empty: bool = False) -> Iterator[tuple[Request, int, int]]:
        """Request, begin and end of every range that is not empty; of all with `with_empty`."""
        for request in self._requests:
            begin, end = spec.range_of(request.shard, len(self._requests))
            if begin < end or with_empty:
                yield request, begin, end


def max_dense_values(max_frame_bytes: int) -> int:
    """Returns the largest number of values of a dense array on one shard that fit into one frame."""
    return (max_frame_bytes - HEADER_BYTES - BLOCK_BYTES) // FLOAT_BYTES


def check_outs(spec: DenseSpec, outs: Outs) -> None:
    """Raises `ValueError` if dense values cannot be written to these arrays, one after the other."""
    for out in outs:
        if out.dtype != np.float32 or not out.flags.carray:
            raise ValueError(f"dense {spec.name!r}: out is {out.dtype}, should be writable contiguous float32")
    num_values = sum(out.size for out in outs)
    if num_values != spec.num_values:
        raise ValueError(f"dense {spec.name!r}: out has {num_values} values, should have {spec.num_values}")


def check_values(spec: DenseSpec, values: NDArray[np.float32], what: str) -> None:
    """Raises `ValueError` if these are not one float32 for each dense value."""
    if values.dtype != np.float32 or values.shape != (spec.num_values,):
        raise ValueError(
            f"dense {spec.name!r}: {what} are {values.dtype} {values.shape}, should be float32 {(spec.num_values,)}"
        )


def fill(outcome: Outcome) -> str | None:
    """Copies the rows of a reply into the arrays that wait for them, unless they were received there.

    Returns:
        What is wrong with the reply; None if it is right, and only then is anything copied.
    """
    request, frame = outcome.request, outcome.reply
    columns = request.received
    if not request.outs or (frame is None and columns is None):
        return None if not request.outs or request.is_filled else _ANOTHER
    if columns is None:
        assert frame is not None, "one of both is there"
        columns = []
        for number, fields in enumerate(BLOCK.iter_unpack(request.reply_table)):
            block = frame.blocks[number] if number < len(frame.blocks) else None
            table_id, _, dtype, _, _, count, dim, *_ = fields
            if block is None or (block.table_id, block.dtype, block.count, block.dim) != (table_id, dtype, count, dim):
                return _ANOTHER
            assert block.rows is not None, "a ROWS block has rows"
            columns.append(_bytes_of(block.rows))
    for column, outs, fields in zip(columns, request.outs, BLOCK.iter_unpack(request.reply_table), strict=False):
        dtype, dim = RowDtype(fields[2]), fields[6]
        rows: NDArray[Any] = np.frombuffer(column, dtype.in_frames).reshape(-1, dim)
        begin = 0
        for out in outs:
            copy_from_frame(rows[begin : begin + len(out)], dtype, out)
            begin += len(out)
    return None


_ANOTHER = "the reply has other tables, counts, dims or dtypes than the request"


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


def _part_of(statistics: Mapping[str, Buffer], begin: int, end: int) -> dict[str, Buffer]:
    """The statistics of the ids `[begin, end)`."""
    first, last = STATISTICS_BYTES * begin, STATISTICS_BYTES * end
    return {name: column[first:last] for name, column in statistics.items()}


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, of a contiguous copy if it is not contiguous."""
    if not array.size:
        return _NOTHING
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B")


_NOTHING = memoryview(b"")


def _shortened(values: NDArray[np.float32], dtype: RowDtype) -> NDArray[np.uint16]:
    """Dense values in 16 bits each, in memory that is used again once they are acked."""
    halves = _halves.lend(len(values))[: len(values)]
    shorten(np.ascontiguousarray(values), dtype, halves)
    return halves


_halves = ReusedMemory(np.uint16, num_kept=2)


def range_of(arrays: Outs, begin: int, end: int) -> Outs:
    """Values `[begin, end)` of all values that the arrays have together, as views."""
    parts, offset = [], 0
    for array in arrays:
        first, last = max(begin - offset, 0), min(end - offset, array.size)
        if first < last:
            parts.append(array.reshape(-1, 1)[first:last])
        offset += array.size
    return parts


def _rows_of(arrays: Outs, begin: int, end: int) -> Outs:
    """Rows `[begin, end)` of all rows that the arrays have together, as views."""
    parts, offset = [], 0
    for array in arrays:
        first, last = max(begin - offset, 0), min(end - offset, len(array))
        if first < last:
            parts.append(array[first:last])
        offset += len(array)
    return parts


class _Piece(NamedTuple):
    """A block of a request, or some of its rows."""

    action: Action
    fields: tuple[int, RowDtype, int, int, int]
    """As of `Request.add`."""
    ids: Buffer | None
    rows: Buffer | None
    outs: Outs | None
    numbers: tuple[float, int, float]
    statistics: Mapping[str, Buffer] = NO_STATISTICS
    offset: int = 0

    @property
    def is_divisible(self) -> bool:
        """True if its rows may be in several frames."""
        return self.ids is not None or self.action in DIVISIBLE

    @property
    def cost(self) -> int:
        """Bytes of its columns, or of those of its reply, whichever is larger."""
        count, dim = self.fields[3:]
        of_ids = 0 if self.ids is None else ID_BYTES * count
        of_rows = count * dim * self.fields[1].in_frames.itemsize + STATISTICS_BYTES * count * len(self.statistics)
        return max(of_ids, of_rows) if self.action is Action.PULL else of_ids + of_rows

    def part(self, begin: int, end: int) -> _Piece:
        """Its rows `[begin, end)`."""
        table_id, dtype, schema_hash, count, dim = self.fields
        row_bytes = dim * dtype.in_frames.itemsize
        return _Piece(
            self.action,
            (table_id, dtype, schema_hash, min(end, count) - begin, dim),
            None if self.ids is None else self.ids[ID_BYTES * begin : ID_BYTES * end],
            None if self.rows is None else self.rows[row_bytes * begin : row_bytes * end],
            None if self.outs is None else _rows_of(self.outs, begin, end),
            self.numbers,
            _part_of(self.statistics, begin, end),
            self.offset + begin if self.ids is None else 0,
        )

    def add_to(self, request: Request) -> None:
        """Adds it as a block."""
        if self.outs is None:
            request.add(self.action, self.fields, (self.ids, self.rows), self.numbers, self.statistics, self.offset)
            request.num_pushed_rows += 0 if self.ids is None else self.fields[3]
        else:
            _, dtype, _, count, dim = self.fields
            num_bytes = count * dim * dtype.in_frames.itemsize
            request.add_pull(self.fields, self.ids, self.outs, num_bytes, self.numbers[1], self.offset)
            request.num_pulled_rows += 0 if self.ids is None else count


def _pieces_of(request: Request) -> Iterator[_Piece]:
    columns, outs = iter(request.columns), iter(request.outs)
    for table_id, action, dtype, mask, schema_hash, count, dim, _, *numbers, offset in BLOCK.iter_unpack(request.table):
        yield _Piece(
            Action(action),
            (table_id, RowDtype(dtype), schema_hash, count, dim),
            next(columns) if mask & IDS else None,
            next(columns) if mask & ROWS else None,
            next(outs) if action == Action.PULL else None,
            tuple(numbers),
            {name: next(columns) for name, column in STATISTICS_COLUMNS.items() if mask & column.bit},
            offset,
        )


def _split(whole: Request, budget: int) -> list[Request]:
    """Divides a request whose frame, or whose reply, would be too large."""
    requests = [Request(whole.op, whole.step, whole.shard)]
    for piece in _pieces_of(whole):
        count, dim = piece.fields[3:]
        bytes_per_row = max(piece.cost // max(count, 1), 1)
        begin = 0
        while begin < max(count, 1):
            request = requests[-1]
            has_block = len(request.table) < MAX_BLOCKS * BLOCK_BYTES and len(request.columns) <= _MAX_COLUMNS
            num_rows = (budget - request.cost - BLOCK_BYTES) // bytes_per_row if has_block else -1
            if num_rows >= count - begin:
                (piece.part(begin, count) if begin else piece).add_to(request)
                break
            if piece.is_divisible and num_rows > 0:
                piece.part(begin, begin + num_rows).add_to(request)
                begin += num_rows
            elif not request.table:
                what = "a row" if piece.is_divisible else f"{count} factors"
                raise ValueError(
                    f"request: {what} of dim {dim} cannot go into a frame of {budget + HEADER_BYTES} bytes. "
                    "Set FLEET_SPARSE_MAX_FRAME_BYTES higher, for workers and pservers"
                )
            requests.append(Request(whole.op, whole.step, whole.shard))
    for part, request in enumerate(requests):
        request.part, request.num_parts = part, len(requests)
    return requests
