"""What is in a store, read by a capture."""

from __future__ import annotations

from typing import NamedTuple

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.pserver.storage.cow_view import CowView
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.snapshot.rows import Rows


class Row(NamedTuple):
    """A row, bit by bit."""

    row: bytes
    state: bytes
    last_day: int | None


def arranged(capture: CowView) -> CowView:
    """The capture with all its ids."""
    while capture.collect():
        pass
    capture.arrange()
    return capture


def by_id(rows: Rows) -> dict[int, Row]:
    """Each row by its id; an id may be there once only."""
    last_days = rows.columns.get(LAST_UPDATE_DAY.name)
    days = [None] * len(rows.ids) if last_days is None else last_days.tolist()
    found = {
        id_: Row(row.tobytes(), state.tobytes(), day)
        for id_, row, state, day in zip(rows.ids.tolist(), rows.rows, rows.states, days, strict=True)
    }
    assert len(found) == len(rows.ids)
    return found


def all_rows(store: TableStore) -> Rows:
    """All rows of a store without an open capture; it is as if nobody had looked."""
    capture = arranged(store.capture())
    rows = capture.copy(0, capture.num_rows)
    capture.end(kept=False)
    assert len(rows.ids) == store.num_rows
    return rows


def everything(store: TableStore) -> dict[int, Row]:
    """The same, by id."""
    return by_id(all_rows(store))
