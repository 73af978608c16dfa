"""Rows: ids with one array for each column, as stores, snapshots and exports exchange them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import ROWS, STATES, Column

Selection = slice | NDArray[np.int64] | NDArray[np.bool_]


class Rows(NamedTuple):
    """Rows of one table.

    Attributes:
        ids: `(n,)`.
        columns: By column name, `(n, *shape)` each: `rows` and `states` always, the others if the table has them.
    """

    ids: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]

    @classmethod
    def of(
        cls, ids: NDArray[np.int64], rows: NDArray[np.float32], states: NDArray[np.float32], **columns: NDArray[Any]
    ) -> Rows:
        """Rows `(n, dim)` with their states `(n, num_states, dim)` and other columns by name."""
        return cls(ids, {ROWS: rows, STATES: states, **columns})

    @property
    def rows(self) -> NDArray[np.float32]:
        """`(n, dim)`."""
        return self.columns[ROWS]

    @property
    def states(self) -> NDArray[np.float32]:
        """`(n, num_states, dim)`."""
        return self.columns[STATES]

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return self.ids.nbytes + sum(array.nbytes for array in self.columns.values())

    def part(self, which: Selection) -> Rows:
        """Some of the rows, with all columns."""
        return Rows(self.ids[which], {name: array[which] for name, array in self.columns.items()})

    def with_columns(self, columns: Iterable[Column]) -> Rows:
        """Returns the same rows with these columns, in this order; a missing one has its initial value."""
        count, found = len(self.ids), self.columns
        return Rows(
            self.ids, {each.name: found[each.name] if each.name in found else each.new(count) for each in columns}
        )


def joined(blocks: Sequence[Rows]) -> Rows:
    """The rows of at least one block, one block after the other. All blocks have the same columns."""
    if len(blocks) == 1:
        return blocks[0]
    columns = {name: np.concatenate([block.columns[name] for block in blocks]) for name in blocks[0].columns}
    return Rows(np.concatenate([block.ids for block in blocks]), columns)
