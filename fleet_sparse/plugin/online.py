"""Online training as with Paddle's accessors: which rows a base model and a cache have, and what a shrink removes.

Settings of tables in `DistributedStrategy.sparse_table_configs` decide; a table without them has Paddle's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_sparse.core.criteria import HOTTEST, Criterion
from fleet_sparse.worker.control.save import FULL

from .accessor_config import AccessorConfig
from .save_calls import shrink
from .session import Session

BASE = 2
"""Paddle's mode of a save whose rows are chosen by score and day."""
_CACHE_RATE = 0.00055  # Paddle's sparse_table_cache_rate


def left_out_of(session: Session, mode: int) -> Mapping[str, Sequence[Criterion]]:
    """By table, criteria of the rows that a save with this mode does not have."""
    if mode != BASE:
        return {}
    accessors = session.catalog.accessors
    return {name: accessors.get(name, AccessorConfig()).left_out for name in session.catalog.tables}


def shrink_tables(session: Session, threshold: int | None) -> None:
    """Shrinks all tables, each by its own settings. A `threshold` takes the place of `delete_after_unseen_days`."""
    accessors, groups = session.catalog.accessors, dict[tuple[int | None, float | None, float], list[str]]()
    days: int | None
    for name in session.catalog.tables if accessors else ():
        config = accessors.get(name, AccessorConfig())
        days = config.delete_after_unseen_days if threshold is None else threshold
        settings = days, config.delete_threshold or None, config.show_click_decay_rate
        groups.setdefault(settings, []).append(name)
    if not groups:
        shrink(threshold)
    for (days, min_score, decay), names in groups.items():
        shrink(days, min_score=min_score, decay=decay, tables=names)


def save_cache_model(session: Session, dirname: str, table: int | str) -> int:
    """Saves the rows of a table that a base model has and that have the most shows: a share as large as Paddle's cache.

    Returns:
        Their number on worker 0, -1 on the others.
    """
    connection, name = session.connection("save_cache_model"), session.catalog.name_of_table(table)
    left_out = (*left_out_of(session, BASE)[name], Criterion(HOTTEST, _CACHE_RATE))
    num_rows = session.snapshots.save(
        connection, dirname, FULL, keep_last=None, tables=[name], left_out={name: left_out}, caller="save_cache_model"
    )
    return num_rows if connection.role.is_first else -1
