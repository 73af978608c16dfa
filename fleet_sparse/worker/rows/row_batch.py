"""RowBatch: rows of distinct ids of one table, on their way from the pservers or to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.table_spec import TableSpec

from .deduplicator import UniqueIds


class RowBatch(NamedTuple):
    """Rows of one table. It travels unchanged from the op callback to the encoder, in both directions."""

    spec: TableSpec
    unique: UniqueIds
    values: NDArray[np.float32]
    """`(k, dim)`. In a pull, contiguous memory that the rows are written to; in a push, the gradients."""
    learning_rate: float = 0.0
    """Learning rate of a push."""
    optimizer_step: int = 0
    """Step count t of the update rule, from 1, of a push."""
    statistics: Sequence[NDArray[Any]] = ()
    """Statistics of the ids of a push: `(k,)` for each of `spec.statistics`; counts are uint32, shows and clicks
    float32."""

    def at(self, places: NDArray[np.int64]) -> RowBatch:
        """Returns the rows at these ascending places `(n,)`, as fresh arrays."""
        statistics = [each[places] for each in self.statistics]
        return self._replace(
            unique=self.unique.at(places), values=self.values.take(places, axis=0), statistics=statistics
        )

    @classmethod
    def empty(cls, spec: TableSpec, unique: UniqueIds) -> RowBatch:
        """A batch to pull: its values are fresh memory."""
        return cls(spec, unique, np.empty((len(unique.ids), spec.dim), np.float32))


def check_distinct(caller: str, batches: list[str]) -> None:
    """Raises `ValueError` if a table name occurs twice."""
    if len(set(batches)) < len(batches):
        raise ValueError(f"{caller}: a table occurs twice among {batches}; sum its gradients first")
