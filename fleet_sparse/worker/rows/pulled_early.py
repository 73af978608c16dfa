"""PulledEarly: rows of the next step of a worker with row caches that are pulled before the push of the present one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.row_dtype import from_frame

from ..net.table_client import ExtraBlock, TableCall
from .deduplicator import Deduplicator, SuccessiveIds, UniqueIds
from .row_batch import RowBatch


class EarlyTable(NamedTuple):
    """The early rows of one table."""

    ids: SuccessiveIds
    """Those of the next step."""
    places: NDArray[np.int64]
    """`(n,)`, ascending: places of the early rows among them."""
    rows: RowBatch
    """The early rows, in memory of their own."""

    def fill(self, batch: RowBatch, extra: Sequence[ExtraBlock], deduplicator: Deduplicator) -> None:
        """Writes the early rows into the batch of the next step.

        Args:
            batch: The batch.
            extra: Blocks of the answer to the push of the present step: with ids, rows that have changed since.
            deduplicator: Deduplicator with the shards' placement.

        Raises:
            ProtocolError: The changed rows have another dim than the table. The batch is unchanged.
        """
        spec, unique, values = batch.spec, self.rows.unique, self.rows.values
        for shard, block, _ in extra:
            if block.table_id != spec.table_id or block.ids is None or block.rows is None:
                continue
            if block.dim != spec.dim:
                text = f"shard {shard}: table {spec.name!r}: rows that changed have dim {block.dim}, the table has dim "
                raise ProtocolError(f"{text}{spec.dim}", code=ErrorCode.MALFORMED)
            # Early pulls of a step that failed half-way are answered too: perhaps with other ids.
            places = deduplicator.places(block.ids, unique.ids, spec.salt)
            is_wanted = places >= 0
            values[places[is_wanted]] = from_frame(block.rows, block.dtype)[is_wanted]
        batch.values[self.places] = values


class PulledEarly(NamedTuple):
    """The early rows of all tables, on their way."""

    tables: dict[str, EarlyTable]
    """By name; only those with early rows."""
    call: TableCall

    def is_untouched_by(self, pushed: Sequence[RowBatch]) -> bool:
        """Returns whether a push changes none of these rows: it has the ids from which they are told apart."""
        before: dict[str, UniqueIds | None] = {name: table.ids.before for name, table in self.tables.items()}
        return all(before.get(batch.spec.name, batch.unique) is batch.unique for batch in pushed)
