"""Save: writes one shard's part of a snapshot: its content at the cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory, new_file
from fleet_sparse.snapshot.manifest import ShardFile, file_name
from fleet_sparse.snapshot.rows_writer import RowsWriter

from ..engine.shard import Shard
from ..log.checkpoint import Checkpoint, may_be_checkpoint
from ..log.control_state import CutSave
from ..tables.table import OnChanged, Post, Table, TableCut


class _Saved(NamedTuple):
    """A table of the save. The shard may replace the table while it is saved."""

    table: Table
    cut: TableCut


class Save:
    """A save that has not ended. `cut`, `write` and `end` are called once each, in this order; `end` may come earlier.

    Args:
        shard: The shard to save.
        save_id: Id of the save.
        base: Checksum of the manifest of the delta's base; None for a full snapshot.
        tables: Names of the only tables to save; empty for all tables and dense arrays.
        ends_day: True if a day of the tables ends with the save: in the file, and in the stores once it is committed.
        left_out: By table, checked criteria of the rows that are not saved.
        is_logged: True if the log of the shard notes the save, and what it means for days and the next delta.
    """

    def __init__(
        self,
        shard: Shard,
        save_id: str,
        *,
        base: int | None,
        tables: Collection[str] = (),
        ends_day: bool = False,
        left_out: Mapping[str, Sequence[Criterion]] = MappingProxyType({}),
        is_logged: bool = False,
    ) -> None:
        self.save_id = save_id
        self._shard = shard
        self._base = base
        self._names = frozenset(tables)
        self._ends_day = ends_day
        self._left_out = left_out
        self._log = shard.log if is_logged else None
        self._has_base = False  # a delta may follow the cut
        self._is_cut = False
        self._ended_table_ids: list[int] = []  # of the tables whose day is to end
        self._saved: list[_Saved] = []
        self._watermarks: list[Watermark] = []
        self._given_up = threading.Event()

    @property
    def is_complete(self) -> bool:
        """True if all tables and dense arrays of the shard are saved."""
        return not self._names

    @property
    def is_given_up(self) -> bool:
        """True once `give_up` was called."""
        return self._given_up.is_set()

    @property
    def ends_day(self) -> bool:
        """True if a day of the tables ends with the save."""
        return self._ends_day

    @property
    def lacks_rows(self) -> bool:
        """True if rows may be left out."""
        return bool(self._left_out)

    @property
    def is_full(self) -> bool:
        """True unless it is a delta."""
        return self._base is None

    def may_be_checkpoint(self, newest: Checkpoint | None) -> bool:
        """Returns whether the file of this save has what a checkpoint of the log needs, with the newest one below."""
        return may_be_checkpoint(
            newest,
            base=self._base,
            is_complete=self.is_complete,
            ends_day=self._ends_day,
            lacks_rows=self.lacks_rows,
        )

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the saved tables that can be loaded alone, once the save is cut."""
        return tuple(table.spec.name for table, _ in self._saved if table.is_selectable)

    def cut(self, clients: Collection[bytes] | None = None) -> bool:
        """Fixes the content of the snapshot, in the time that a copy of the dense arrays takes.

        To be called in the thread that owns the shard.

        Args:
            clients: Ids of the clients whose watermarks are saved; None for all.

        Returns:
            False if this shard does not know what changed since the base. Nothing was begun then.

        Raises:
            SnapshotError: The values of the shard are wrong, or a table does not exist or is too old. Nothing was
                begun.
        """
        shard = self._shard
        if shard.fault:
            raise SnapshotError(f"shard {shard.shard_index}: not saved: {shard.fault}")
        if self._base is not None and self._base != shard.base:
            return False
        tables = [entry.table for entry in shard.tables.values()]
        selectable = sorted(table.spec.name for table in tables if table.is_selectable)
        if missing := sorted(self._names.difference(selectable)):
            raise SnapshotError(
                f"table {missing[0]!r}: shard {shard.shard_index} has no such table; its tables are "
                f"{', '.join(selectable) or 'none'}"
            )
        try:
            for table in tables:
                if self.is_complete or table.spec.name in self._names:
                    left_out = self._left_out.get(table.spec.name, ())
                    cut = table.capture(only_changed=self._base is not None, ends_day=self._ends_day, left_out=left_out)
                    self._saved.append(_Saved(table, cut))
            if self._log is not None:
                cut_save = CutSave(self.save_id, self._ends_day, tuple(sorted(self._names)))
                self._log.cut_save(cut_save, self._left_out)
        except BaseException:
            self.end(None)
            raise
        watermarks = shard.ledger.watermarks()
        self._has_base, self._is_cut = shard.base is not None, True
        self._watermarks = [each for each in watermarks if clients is None or each.client_id in clients]
        return True

    def write(self, directory: Directory, post: Post, on_changed: OnChanged | None = None) -> ShardFile:
        """Writes the shard's file, which is durable when this returns.

        To be called in any thread but the one that owns the shard.

        Args:
            directory: The directory of the file.
            post: Runs tasks in the thread that owns the shard.
            on_changed: Called with what a delta would contain, unless there is no base for one.

        Raises:
            SnapshotError: The system refused, pushes needed too much memory for pre-images, or the save was given up.
                The file is removed.
        """
        shard = self._shard
        name = file_name(shard.shard_index, shard.num_shards)

        def posted(task: Callable[[], Any]) -> Future[Any]:
            if self._given_up.is_set():
                raise SnapshotError(f"save {self.save_id}: given up")
            return post(task)

        for _, cut in self._saved:
            cut.back_memory()
        try:
            with new_file(directory, name) as file:
                writer = RowsWriter(
                    file,
                    shard=shard.shard_index,
                    num_shards=shard.num_shards,
                    cluster_id=shard.cluster_id,
                    incarnation=shard.incarnation,
                    placement_version=shard.placement.version,
                    save_id=self.save_id,
                )
                for _, cut in self._saved:
                    cut.export(writer, posted, on_changed if self._has_base else None)
                written = writer.finish()
        except CancelledError:
            raise SnapshotError(f"{directory}: {name} is incomplete: the pserver is stopping") from None
        directory.sync()
        return msgspec.structs.replace(written, clients=tuple(self._watermarks))

    def give_up(self) -> None:
        """Makes `write` fail soon. Thread-safe."""
        self._given_up.set()

    def end(self, committed_as: int | None) -> bool:
        """Ends the save; if it was committed, `end_day` follows. To be called in the thread that owns the shard, not
        while `write` runs.

        Args:
            committed_as: Checksum of the manifest that names the file; None if the save failed: what changed up to the
                cut still counts as changed then.

        Returns:
            False if the log of the shard should have the end, and has it not.
        """
        is_logged = not self._is_cut or self._log is None or self._log.end_save(self.save_id, committed_as)
        for _, cut in self._saved:
            cut.end(kept=committed_as is not None and self.is_complete)
        if committed_as is not None and self._ends_day:
            self._ended_table_ids = [table.spec.table_id for table, _ in self._saved]
        if committed_as is not None and self.is_complete:
            self._shard.note_saved(committed_as)
        self._saved, self._is_cut = [], False
        return is_logged

    def end_day(self) -> None:
        """Ends a day of the tables of a committed save that ends one; otherwise, and if it is called again, nothing.

        Raises:
            LogFull: As `Shard.end_day`.
        """
        self._shard.end_day(self._ended_table_ids, self.save_id)
        self._ended_table_ids = []
