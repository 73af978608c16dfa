"""Rows of a table store, read through a copy-on-write view."""

from __future__ import annotations

from typing import NamedTuple

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.pserver.storage.cow_view import CowView
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.snapshot.rows import Rows


class Row(NamedTuple):
    """The bits of a row."""

    row: bytes
    state: bytes
    last_day: int | None


def arranged(view: CowView) -> CowView:
    """Returns a view with all its ids."""
    while view.collect():
        pass
    view.arrange()
    return view


def by_id(rows: Rows) -> dict[int, Row]:
    """Returns each row by its id; fails if an id occurs twice."""
    last_days = rows.columns.get(LAST_UPDATE_DAY.name)
    days = [None] * len(rows.ids) if last_days is None else last_days.tolist()
    found = {
        id_: Row(row.tobytes(), state.tobytes(), day)
        for id_, row, state, day in zip(rows.ids.tolist(), rows.rows, rows.states, days, strict=True)
    }
    assert len(found) == len(rows.ids)
    return found


def all_rows(store: TableStore) -> Rows:
    """Returns all rows of a store that has no open view, and leaves the store unchanged."""
    view = arranged(store.capture())
    rows = view.copy(0, view.num_rows)
    view.end(kept=False)
    assert len(rows.ids) == store.num_rows
    return rows


def everything(store: TableStore) -> dict[int, Row]:
    """Returns the same rows by id."""
    return by_id(all_rows(store))
