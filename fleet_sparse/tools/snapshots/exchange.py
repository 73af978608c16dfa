"""Exports snapshots as files for other programs (npz, Parquet), and imports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Annotated, NamedTuple
from urllib.parse import quote, unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import Directory, directory_at, new_file, read
from fleet_sparse.snapshot.manifest import WorkerPosition
from fleet_sparse.snapshot.reader import DenseContent, SnapshotReader, TableContent
from fleet_sparse.snapshot.row_merge import DuplicateId
from fleet_sparse.snapshot.row_sort import SortedRows
from fleet_sparse.snapshot.rows import Rows

from .export_file import FORMAT, VERSION, Description, Format, ImportFile, Versioned, check_version, columns_to_read
from .npz import NPZ
from .parquet import PARQUET

EXPORT = "EXPORT.json"
"""Lists the files of an export. Written first, so that a missing file is noticed."""
FORMATS = {"npz": NPZ, "parquet": PARQUET}
_MAX_BYTES = 64 << 20
_TABLE, _DENSE = "table", "dense"


class ExportedFile(NamedTuple):
    """A file of an export."""

    file: str
    """Name of the file, without directory."""
    kind: str
    """`table` or `dense`."""
    name: str
    """Name of the table or dense array."""
    num_rows: int
    """Number of rows, or of values of a dense array."""


# Export


def export(
    content: SnapshotReader, target: Directory, how: Format, *, tables: Collection[str] = (), replace: bool = False
) -> list[ExportedFile]:
    """Writes one file for each table and dense array, and a file that lists them.

    Args:
        content: The snapshot.
        target: Created if missing; otherwise it must be empty.
        how: One of `FORMATS`.
        tables: Names of the only tables to export; empty for all tables and dense arrays.
        replace: True to remove an export that is there first.

    Raises:
        SnapshotCorrupt: Bytes of the content are wrong.
        SnapshotError: The target has files, there is no such table, or the system refused.
    """
    names = list(tables) or list(content.tables)
    described = {name: Description(*content.table(name)) for name in names}
    dense = {} if tables else content.dense
    described |= {
        name: Description(each.spec, each.optimizer_step, assigned=each.assigned) for name, each in dense.items()
    }
    _clear(target, replace=replace)
    target.make()
    files = {name: _file_name(each.spec, how) for name, each in described.items()}
    target.put(EXPORT, _list_of(content, files, described, is_complete=content.is_complete and not tables))
    exported = [_export_one(content, target, how, files[name], each) for name, each in described.items()]
    target.sync()
    return exported


def _export_one(
    content: SnapshotReader, target: Directory, how: Format, file_name: str, description: Description
) -> ExportedFile:
    spec = description.spec
    with new_file(target, file_name) as file:
        if isinstance(spec, TableSpec):
            num_rows = how.write_table(file, description, content.rows(spec.name))
        else:
            how.write_dense(file, description, *content.dense_values(spec.name))
            num_rows = spec.num_values
        file.finish()
    return ExportedFile(file_name, _kind_of(spec), spec.name, num_rows)


def _clear(target: Directory, *, replace: bool) -> None:
    names = target.names()
    if not names:
        return
    if not replace:
        raise SnapshotError(f"{target}: it has files, should be empty. Name another, or replace it by --force")
    known = (EXPORT, *(each.suffix for each in FORMATS.values()))
    if EXPORT not in names or not all(name.endswith(known) for name in names):
        raise SnapshotError(f"{target}: it has files of others than an export. Name another directory")
    target.parent().remove_child(target.name)


def _list_of(
    content: SnapshotReader, files: Mapping[str, str], described: Mapping[str, Description], *, is_complete: bool
) -> bytes:
    value = {
        "format": FORMAT,
        "version": VERSION,
        "snapshot": content.manifest.name,
        "saved_at": content.manifest.saved_at,
        "num_shards": content.manifest.num_shards,
        "is_whole": is_complete,
        "workers": [msgspec.structs.asdict(position) for position in content.workers],
        "files": [{"file": file, "kind": _kind_of(described[name].spec), "name": name} for name, file in files.items()],
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def _kind_of(spec: TableSpec | DenseSpec) -> str:
    return _TABLE if isinstance(spec, TableSpec) else _DENSE


def _file_name(spec: TableSpec | DenseSpec, how: Format) -> str:
    return f"{_kind_of(spec)}-{quote(spec.name, safe='')}{how.suffix}"


# Import


class _List(NamedTuple):
    """The files to import, and what is known about all of them."""

    files: tuple[str, ...]
    num_shards: int
    is_complete: bool
    workers: tuple[WorkerPosition, ...]


class Export:
    """Files to import, as one source that a snapshot can be written from.

    Attributes:
        tables: Tables by name.
        dense: Dense arrays by name.
        workers: Positions of the workers.
        is_complete: True if all tables and dense arrays of the job are in it.
        num_shards: Number of shards of the exported snapshot; 1 for files of other programs.
        num_bytes: Size of the files.
    """

    def __init__(
        self,
        where: str,
        specs: Mapping[str, TableSpec | DenseSpec],
        table: str | None,
        stack: ExitStack,
        on_progress: Callable[[int], None],
    ) -> None:
        directory, listed = _files_at(where)
        self.tables: dict[str, TableContent] = {}
        self.dense: dict[str, DenseContent] = {}
        self.workers, self.is_complete, self.num_shards = listed.workers, listed.is_complete, listed.num_shards
        self.num_bytes = 0
        self._files: dict[str, ImportFile] = {}
        self._sorted: dict[str, SortedRows] = {}
        self._stack = stack
        self._on_progress = on_progress
        self._num_bytes_read = 0
        if table is not None and len(listed.files) > 1:
            raise SnapshotError(
                f"{where}: it has {len(listed.files)} files; a table can be given for one file only. Name it"
            )
        for name in listed.files:
            self._open(directory, name, specs, table)

    def rows(self, table: str, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """Yields the rows of a table, each id once, in the order of their hash, block by block.

        The first call sorts all rows in a temporary file, because the imported file may have any order.

        Args:
            table: Its name.
            owned: `(NUM_BUCKETS,)`, the buckets whose rows are wanted; None for all.

        Raises:
            SnapshotError: The file cannot be read, has an id twice, or there is no room.
        """
        content = self.tables[table]
        try:
            if table not in self._sorted:
                rows_of_table = self._stack.enter_context(SortedRows(content.spec, content.columns))
                for rows in self._files[table].rows(content.spec, content.columns):
                    days = rows.columns.get(LAST_UPDATE_DAY.name)
                    if days is not None and (days > content.num_days).any():
                        raise SnapshotError(
                            f"table {table!r}: a row has a last_update_day after num_days {content.num_days}"
                        )
                    rows_of_table.add(rows)
                self._sorted[table] = rows_of_table
            yield from self._sorted[table].rows(owned)
        except DuplicateId as error:
            raise SnapshotError(f"table {table!r}: {error}, should be there once") from error

    def dense_values(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the values `[begin, end)` of a dense array, `(end - begin,)`, and states `(num_states, end - begin)`.

        Raises:
            SnapshotError: The file cannot be read.
        """
        values, states = self._files[name].dense_values(self.dense[name].spec)
        return values[begin:end], states[:, begin:end]

    def _open(
        self, directory: Directory, file_name: str, specs: Mapping[str, TableSpec | DenseSpec], table: str | None
    ) -> None:
        how = next(each for each in FORMATS.values() if file_name.endswith(each.suffix))
        file = self._stack.enter_context(closing(directory.open(file_name)))
        opened = self._stack.enter_context(how.open(file, self._note_read))
        description = _described(opened, file.name, specs, table or _name_of(file_name, how, opened))
        spec = description.spec
        if spec.name in self._files:
            raise SnapshotError(f"{file.name}: another file has {_kind_of(spec)} {spec.name!r} already")
        self._files[spec.name] = opened
        self.num_bytes += file.size
        if isinstance(spec, TableSpec):
            columns = columns_to_read(opened.description, spec)
            self.tables[spec.name] = TableContent(spec, description.optimizer_step, description.num_days, columns)
        else:
            self.dense[spec.name] = DenseContent(spec, description.optimizer_step, description.assigned)

    def _note_read(self, num_bytes: int) -> None:
        self._num_bytes_read += num_bytes
        self._on_progress(self._num_bytes_read)


@contextmanager
def open_export(
    where: str,
    *,
    specs: Mapping[str, TableSpec | DenseSpec] | None = None,
    table: str | None = None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[Export]:
    """Opens what `export` or another program wrote, for a `with` block.

    Args:
        where: Path or URL of a directory, or of one file in it.
        specs: Specs of tables and dense arrays by name, for files without a description.
        table: Name of the table in the only file; by default the description or the name of the file tells.
        on_progress: Called now and then with the number of bytes read so far.

    Raises:
        SnapshotError: There is nothing to import, it cannot be read, or it has no description and no spec.
    """
    with ExitStack() as stack:
        yield Export(where, specs or {}, table, stack, on_progress)


def _files_at(where: str) -> tuple[Directory, _List]:
    suffixes = tuple(each.suffix for each in FORMATS.values())
    if where.endswith(suffixes):
        head, _, name = where.rpartition("/")
        return directory_at(head or ("/" if where.startswith("/") else ".")), _List((name,), 1, False, ())
    directory = directory_at(where)
    names = directory.names()
    if EXPORT in names:
        return directory, _read_list(directory, suffixes)
    files = tuple(name for name in names if name.endswith(suffixes))
    if not files:
        raise SnapshotError(f"{directory}: it has no {EXPORT} and no {' or '.join(suffixes)} file")
    return directory, _List(files, 1, False, ())


class _ListedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    kind: str
    name: str


class _ListFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`EXPORT.json`."""

    format: str
    version: int
    snapshot: str
    saved_at: str
    num_shards: Annotated[int, msgspec.Meta(ge=1, le=NUM_BUCKETS)]
    is_complete: bool = msgspec.field(name="is_whole")
    workers: tuple[WorkerPosition, ...]
    files: tuple[_ListedFile, ...]


def _read_list(directory: Directory, suffixes: tuple[str, ...]) -> _List:
    path = f"{directory}/{EXPORT}"
    content = read(directory, EXPORT, _MAX_BYTES)
    try:
        check_version(msgspec.json.decode(content, type=Versioned))
        listed = msgspec.json.decode(content, type=_ListFields)
        files = tuple(each.file for each in listed.files)
        if unknown := [file for file in files if not file.endswith(suffixes)]:
            raise ValueError(f"file {unknown[0]!r} should end with {' or '.join(suffixes)}")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: inconsistent: {error}") from error
    return _List(files, listed.num_shards, listed.is_complete, listed.workers)


def _name_of(file_name: str, how: Format, opened: ImportFile) -> str:
    if opened.description is not None:
        return opened.description.spec.name
    return unquote(file_name.removesuffix(how.suffix).removeprefix(f"{_TABLE}-"))


def _described(opened: ImportFile, path: str, specs: Mapping[str, TableSpec | DenseSpec], name: str) -> Description:
    """Returns what a file contains. A given spec overrides the one in the file."""
    given, own = specs.get(name), opened.description
    if own is None:
        if given is None:
            known = f"; given are {', '.join(specs)}" if specs else ""
            raise SnapshotError(f"{path}: it has no description, and {name!r} has no spec{known}. Give one")
        return Description(given)
    if given is None and own.spec.name == name:
        return own
    if given is None:
        raise SnapshotError(f"{path}: it is of {_kind_of(own.spec)} {own.spec.name!r}, and {name!r} has no spec")
    if (_kind_of(given), given.rule) != (_kind_of(own.spec), own.spec.rule):
        raise SnapshotError(
            f"{path}: it is a {_kind_of(own.spec)} with rule {own.spec.rule!r}, the given spec is a {_kind_of(given)} "
            f"with rule {given.rule!r}, whose states have another meaning"
        )
    return own._replace(spec=given)
