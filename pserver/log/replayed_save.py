"""ReplayedSave: a save of the job in a log, which decides what the next delta contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_sparse.core.criteria import Criterion

from ..engine.shard import Shard


class ReplayedSave:
    """The changes of the tables up to the cut of a save, held back until it is known whether they were saved.

    Args:
        shard: A shard that replays its log.
        left_out: By table, criteria of the rows that the save left out.
    """

    def __init__(self, shard: Shard, left_out: Mapping[str, Sequence[Criterion]]) -> None:
        tables = [entry.table for entry in shard.tables.values() if entry.table.is_incremental]
        self._cuts = [
            table.capture(only_changed=False, ends_day=False, left_out=left_out.get(table.spec.name, ()))
            for table in tables
        ]
        for cut in self._cuts:
            cut.release()

    def end(self, *, is_kept: bool) -> None:
        """Ends the save. Without `is_kept` the next delta contains its changes, too."""
        for cut in self._cuts:
            cut.end(kept=is_kept)
