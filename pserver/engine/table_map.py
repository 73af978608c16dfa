"""TableMap: the tables of one shard, by their number on the wire."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PlanError, TableMismatch
from fleet_sparse.wire.control import TableState

from ..storage.virtual_memory import MAX_TABLES
from ..tables.kinds import make_table
from ..tables.table import Table, TableContext


@dataclass(slots=True, eq=False)
class TableEntry:
    """A table of a shard, and which specs requests may name it by.

    Attributes:
        table: The table.
        declared_by: The process that declared its spec first, for error messages.
        schema_hashes: Schema hashes that requests may carry; True if those requests may push.
        is_loaded: True if a snapshot declared its spec, and no process since then.
    """

    table: Table
    declared_by: str
    schema_hashes: dict[int, bool] = field(default_factory=dict)
    is_loaded: bool = False

    @property
    def spec(self) -> TableSpec | DenseSpec:
        """Spec of the table; of several compatible ones the one that trains."""
        return self.table.spec


class TableMap(dict[int, TableEntry]):
    """All tables of a shard.

    Args:
        context: What the tables share.
    """

    def __init__(self, context: TableContext) -> None:
        super().__init__()
        self._context = context

    def declare(self, spec: TableSpec | DenseSpec, declared_by: str, *, is_loaded: bool = False) -> TableEntry:
        """Makes a table, or checks that the existing one has the same spec.

        A table that was loaded takes over the entry of the first process that declares it. A spec with rule "read_only"
        is compatible with one that trains; the latter is used, whichever comes first.

        Raises:
            TableMismatch: As `check`.
            PlanError: As `check`, or a dense array does not fit into memory.
        """
        self.check([spec], declared_by, is_loaded=is_loaded)
        entry = self.get(spec.table_id)
        if entry is None:
            entry = self[spec.table_id] = TableEntry(make_table(spec, self._context), declared_by, is_loaded=is_loaded)
        elif entry.is_loaded and not is_loaded and _differ_in_entry(entry.spec, spec):
            _adopt_entry(entry, spec)
            entry.schema_hashes.clear()
            entry.declared_by, entry.is_loaded = declared_by, False
            return self.declare(spec, declared_by)
        elif entry.spec.rule == read_only.name != spec.rule:
            # Nothing was ever written to it, so nothing is lost.
            table = make_table(spec, self._context)
            entry.table.close()
            entry.table, entry.declared_by = table, declared_by
        self._context.layout.change()
        entry.schema_hashes[spec.schema_hash] = spec.rule != read_only.name
        entry.is_loaded &= is_loaded
        return entry

    def check(self, specs: Sequence[TableSpec | DenseSpec], declared_by: str, *, is_loaded: bool = False) -> None:
        """Checks that tables may be declared, before the first one is made.

        Raises:
            TableMismatch: A table exists with another spec; the message names both sides.
            PlanError: There would be more than `MAX_TABLES`.
        """
        new: dict[int, str] = {}
        for spec in specs:
            entry = self.get(spec.table_id)
            if entry is None:
                of_number, named_by = new.setdefault(spec.table_id, spec.name), declared_by
            else:
                of_number, named_by = entry.spec.name, entry.declared_by
            if of_number != spec.name:
                raise TableMismatch(
                    f"table {spec.name!r}: {declared_by} declares it, and {named_by} declared "
                    f"{of_number!r}, which has the same number on the wire. Rename one"
                )
            if len(self) + len(new) > MAX_TABLES:
                raise PlanError(
                    f"table {spec.name!r}: shard {self._context.shard} has {len(self)} tables, it should have at "
                    f"most {MAX_TABLES}. Let several fields share one table"
                )
            if entry is None or (entry.is_loaded and not is_loaded and _differ_in_entry(entry.spec, spec)):
                continue
            if spec != entry.spec and (differences := entry.spec.differences(spec)):
                raise TableMismatch(
                    f"{entry.table.where}: {entry.declared_by} and {declared_by} describe it differently: "
                    f"{', '.join(differences)}. Make them the same; of a snapshot, compatible tables can be loaded "
                    "alone, by fleet.load_one_table"
                )

    def check_swap(self, other: TableMap) -> None:
        """Checks that `swap_in` may be called.

        Raises:
            TableMismatch: A table exists with another spec; the message names both sides.
        """
        for theirs in other.values():
            ours = self.get(theirs.spec.table_id)
            differences = [] if ours is None else ours.spec.differences(theirs.spec)
            if ours is not None and differences and not _differ_in_entry(ours.spec, theirs.spec):
                raise TableMismatch(
                    f"{theirs.table.where}: {ours.declared_by} and {theirs.declared_by} describe it differently: "
                    f"{', '.join(differences)}"
                )

    def swap_in(self, other: TableMap) -> None:
        """Takes the tables of another map, which is empty afterwards. Tables that it does not have stay.

        Raises:
            TableMismatch: As `check_swap`. Nothing changed.
        """
        self.check_swap(other)
        self._context.layout.change()
        for table_id, theirs in other.items():
            ours = self.get(table_id)
            if ours is None:
                self[table_id] = theirs
                continue
            if _differ_in_entry(theirs.spec, ours.spec):
                _adopt_entry(theirs, ours.spec)
            spec, table = ours.spec, theirs.table
            if spec.rule != read_only.name == table.spec.rule:  # nothing was ever written to theirs
                table = make_table(spec, self._context)
                table.optimizer_step = theirs.table.optimizer_step
                theirs.table.close()
            ours.table.close()
            ours.table = table
            ours.schema_hashes.update(theirs.schema_hashes)
        other.clear()

    def states(self) -> list[TableState]:
        """Returns the state of every table, in the order of their declaration."""
        return [entry.table.state for entry in self.values()]

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, values and states, estimated."""
        return sum(entry.table.num_bytes for entry in self.values())

    def remove(self, table_ids: Collection[int]) -> None:
        """Frees tables, with their rows."""
        self._context.layout.change()
        for table_id in table_ids:
            self.pop(table_id).table.close()

    def close(self) -> None:
        """Frees all tables."""
        self.remove([*self])


def _differ_in_entry(spec: TableSpec | DenseSpec, other: TableSpec | DenseSpec) -> bool:
    """Returns whether two tables would be the same with the same entry, which they do not have."""
    if not isinstance(spec, TableSpec) or not isinstance(other, TableSpec) or spec.entry == other.entry:
        return False
    return not replace(spec, entry=other.entry).differences(other)


def _adopt_entry(entry: TableEntry, spec: TableSpec | DenseSpec) -> None:
    """Gives a table the entry of another spec."""
    assert isinstance(entry.spec, TableSpec), "checked by _differ_in_entry"
    assert isinstance(spec, TableSpec), "checked by _differ_in_entry"
    entry.table.adopt(replace(entry.spec, entry=spec.entry))
