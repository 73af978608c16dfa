"""The kinds of tables, and which spec makes which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec

from .dense import DenseTable
from .embedding import EmbeddingTable
from .table import Table, TableContext

KINDS: dict[type, Callable[[Any, TableContext], Table]] = {
    TableSpec: EmbeddingTable,
    DenseSpec: DenseTable,
}
"""Functions that make an empty table, by the type of its spec."""


def make_table(spec: TableSpec | DenseSpec, context: TableContext) -> Table:
    """Makes an empty table.

    Raises:
        PlanError: Its values do not fit into the memory that this machine has left.
    """
    return KINDS[type(spec)](spec, context)
