"""Import of checkpoints of PaddlePaddle 2.6's parameter server: writes them as a full snapshot.

The text contains rows and their states only, so the caller gives table, dim, rule and so on. The states of Paddle's
rules are those of ours, with these differences:

- Adagrad: `g2sum` is added to `initial_accumulator_value`, the state of a new row here. Paddle's step is
  `lr g sqrt(G / (G + g2sum))` with `initial_g2sum` G: ours is as long, up to the gradient of the step itself, with
  `initial_accumulator_value` G and a learning rate of `lr sqrt(G)`. SparseAdaGradSGDRule has one sum for all values
  of a row but the first; each of them gets this sum, so that the next step is as long as Paddle's.
- Adam: moments are unchanged. Paddle counts the pushes of each row, a table here those of all rows: its count is the
  largest count of a row. SparseSharedAdamSGDRule has one pair of moments, which each value gets.
- Slot, show, click and delta score are not imported; days since the last push are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import LAST_UPDATE_DAY, columns_of, row_columns
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.directory import Directory, corrupt
from fleet_sparse.snapshot.manifest import Manifest, WorkerPosition
from fleet_sparse.snapshot.reader import DenseContent, TableContent
from fleet_sparse.snapshot.row_merge import DuplicateId
from fleet_sparse.snapshot.row_sort import SortedRows
from fleet_sparse.snapshot.rows import Rows

from .paddle_text import (
    PADDLE_RULES,
    Layout,
    PaddleRows,
    ProgressCallback,
    TableFiles,
    after,
    layouts_of,
    read_dense,
    read_rows,
    table_files,
)
from .reshard import write_full

_TABLE = re.compile(r"\d{3,}")
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
# What a dense table was trained with, by its number of columns.
_DENSE_RULES = {1: "sgd", 3: "adam"}


class PaddleTable(NamedTuple):
    """A sparse table to import."""

    directory: str
    """Directory of the table in the checkpoint, such as "000"."""
    spec: TableSpec
    """Spec that the job registers. With another rule than Paddle's, the states are initial ones."""
    paddle_rule: str | None = None
    """A key of `PADDLE_RULES`; None to read it from the files."""


class PaddleDense(NamedTuple):
    """A dense table to import."""

    directory: str
    """Directory of the array in the checkpoint, such as "001"."""
    spec: DenseSpec
    """Spec that the job registers."""
    optimizer_step: int = 0
    """Number of trained steps. Adam needs it, and Paddle does not save it."""
    order: tuple[str, ...] = ()
    """Names of all segments of `spec` in the order of the files; empty if they are sorted, as in Paddle."""


class ImportedTable(NamedTuple):
    """An imported sparse table."""

    name: str
    directory: str
    paddle_rule: str
    num_rows: int
    num_short: int
    """Number of rows with their first value only; the other values are 0."""
    optimizer_step: int
    days: int


class ImportedDense(NamedTuple):
    """An imported dense table."""

    name: str
    directory: str
    num_values: int


class Imported(NamedTuple):
    """Result of an import."""

    manifest: Manifest
    """Manifest of the new snapshot."""
    tables: tuple[ImportedTable, ...]
    dense: tuple[ImportedDense, ...]
    notes: tuple[str, ...]
    """One sentence for each thing that could not be converted."""

    @property
    def snapshot(self) -> str:
        """Name of its directory."""
        return self.manifest.name


class PaddleDirectory(NamedTuple):
    """A table of a checkpoint, as its files describe it."""

    name: str
    kind: str
    """"table" or "dense"."""
    num_files: int
    num_bytes: int
    """Size of all files."""
    num_fields: tuple[int, ...]
    """Numbers of fields of a line, ascending."""
    fits: tuple[tuple[str, int], ...]
    """Pairs of Paddle rule and dim with such lines; empty for a dense table."""


def paddle_directories(source: Path) -> list[PaddleDirectory]:
    """The tables of a checkpoint.

    Raises:
        SnapshotCorrupt, SnapshotError: As `import_paddle`.
    """
    found = []
    for name in _names(source):
        files = table_files(source / name)
        fits = tuple((layout.rule.name, layout.dim) for layout in layouts_of(files.counts)) if files.is_sparse else ()
        kind = "table" if files.is_sparse else "dense"
        fields = tuple(count + files.is_sparse for count in files.counts)
        found.append(PaddleDirectory(name, kind, len(files.files), sum(files.sizes), fields, fits))
    return found


def import_paddle(
    source: Path,
    target: Directory,
    *,
    tables: Sequence[PaddleTable],
    dense: Sequence[PaddleDense] = (),
    num_shards: int = 1,
    on_progress: ProgressCallback = lambda num_bytes: None,
) -> Imported:
    """Writes tables of a checkpoint as one full snapshot. All text is read before anything is written.

    Args:
        source: The checkpoint's directory.
        target: The directory of snapshots that the new one is added to; created if missing.
        tables: Sparse tables to import; the others are left out.
        dense: Dense tables to import; the others are left out.
        num_shards: Number of shards of the new snapshot, 1 to 16384.
        on_progress: Called now and then with the number of bytes read so far from files of sparse tables.

    Returns:
        What was imported, and what could not be converted.

    Raises:
        SnapshotCorrupt: A file is wrong; `path` is its path, `offset` the byte of its uncompressed text.
        SnapshotError: A table is missing, its lines do not fit the given dim and rule, or the system refused. The
            target is unchanged.
        ValueError: A directory or name is given twice, or numbers are out of range.
    """
    _check(tables, dense)
    with ExitStack() as stack:
        sorted_tables: dict[str, _ReadTable] = {}
        notes = ["Values are text of six digits there, so each may be off by five of the seventh."]
        num_read = 0
        for table in tables:
            files = _sparse_files(source, table)
            read_table = _ReadTable(table, files, stack, after(num_read, on_progress))
            num_read += sum(files.sizes)
            sorted_tables[table.spec.name] = read_table
            notes += read_table.notes()
        dense_arrays = {}
        for one in dense:
            array = _ReadDense(one, _dense_files(source, one))
            dense_arrays[one.spec.name] = array
            notes += array.notes()
        given = {*(table.directory for table in tables), *(one.directory for one in dense)}
        readable = _Checkpoint(sorted_tables, dense_arrays, is_complete=given == set(_names(source)))
        manifest = write_full(readable, target, num_shards)
        found = tuple(each.found() for each in sorted_tables.values())
        arrays = tuple(ImportedDense(n, a.given.directory, len(a.values)) for n, a in dense_arrays.items())
    return Imported(manifest, found, arrays, tuple(notes))


def _check(tables: Sequence[PaddleTable], dense: Sequence[PaddleDense]) -> None:
    if not tables and not dense:
        raise ValueError("nothing to import: name at least one table")
    every: list[PaddleTable | PaddleDense] = [*tables, *dense]
    for what in ([one.directory for one in every], [one.spec.name for one in every]):
        if twice := [name for name in what if what.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is given twice; a table has one directory and one name")
    for table in tables:
        if table.paddle_rule is not None and table.paddle_rule not in PADDLE_RULES:
            raise ValueError(
                f"{table.directory}: rule {table.paddle_rule!r}, should be one of {', '.join(PADDLE_RULES)}"
            )
    for one in dense:
        names = sorted(segment.name for segment in one.spec.segments)
        if one.order and sorted(one.order) != names:
            raise ValueError(f"{one.directory}: order should name each of {', '.join(names)} once")
        if one.optimizer_step < 0:
            raise ValueError(f"{one.directory}: optimizer step is {one.optimizer_step}, should be at least 0")


def _names(source: Path) -> list[str]:
    try:
        names = sorted(path.name for path in source.iterdir() if path.is_dir() and _TABLE.fullmatch(path.name))
    except OSError as error:
        raise SnapshotError(f"{source}: cannot be listed: {error}") from error
    if not names:
        raise SnapshotError(f"{source}: is no checkpoint of Paddle's parameter server: it has no directory 000")
    return names


def _sparse_files(source: Path, table: PaddleTable) -> TableFiles:
    files = _files(source, table.directory)
    if not files.is_sparse:
        raise SnapshotError(f"{files.directory}: is a dense table, {table.spec.name!r} is not")
    return files


def _dense_files(source: Path, dense: PaddleDense) -> TableFiles:
    files = _files(source, dense.directory)
    if files.is_sparse:
        raise SnapshotError(f"{files.directory}: is a sparse table, {dense.spec.name!r} is not")
    return files


def _files(source: Path, name: str) -> TableFiles:
    if name not in _names(source):
        raise SnapshotError(f"{source}: has no directory {name!r}; there are {', '.join(_names(source))}")
    return table_files(source / name)


def _layout(table: PaddleTable, files: TableFiles) -> Layout:
    """Returns the layout of the lines of a table.

    A layout is certain if the sample has full lines of it. If it has only short lines, the layout of our rule or of the
    given one is assumed.
    """
    every = [Layout(rule, table.spec.dim) for rule in PADDLE_RULES.values()]
    possible = [layout for layout in every if table.paddle_rule in (None, layout.rule.name)]
    ours = [layout for layout in possible if layout.rule.rule == table.spec.rule]
    if not files.counts:
        return (ours or possible)[0]
    # Where no layout has all lines a few of them may be damaged; reading them tells which.
    common = [count for count, num_lines in files.counts.items() if num_lines * 100 > sum(files.counts.values())]
    counts = list(files.counts) if any(layout.has(files.counts) for layout in possible) else common
    fitting = [layout for layout in possible if layout.has(counts)]
    sure = [layout for layout in fitting if layout.num_full in counts]
    likely = [layout for layout in fitting if layout in sure or layout in ours or table.paddle_rule]
    if not likely:
        raise _misfit(table, files)
    if found := [layout for layout in sure if layout in ours]:
        return found[0]
    if len({layout.rule.rule for layout in likely}) > 1:
        names = " or ".join(layout.rule.name for layout in likely)
        raise SnapshotError(f"{files.directory}: may be of Paddle's rule {names}. Say which")
    return likely[0]


def _misfit(table: PaddleTable, files: TableFiles) -> SnapshotError:
    counts = " or ".join(str(count) for count in files.counts)
    fits = ", ".join(f"{layout.rule.name} of dim {layout.dim}" for layout in layouts_of(files.counts)) or "no rule"
    rule = "" if table.paddle_rule is None else f" and rule {table.paddle_rule}"
    return SnapshotError(
        f"{files.directory}: lines have {counts} numbers behind their id, which does not fit dim {table.spec.dim}"
        f"{rule}; it fits {fits}. With CtrCommonAccessor the layer is wider by 2, show and click, than its rows"
    )


class _ReadTable:
    """A sparse table that was read and is sorted."""

    def __init__(self, table: PaddleTable, files: TableFiles, stack: ExitStack, on_progress: ProgressCallback) -> None:
        self.given = table
        self._directory = files.directory
        self._layout = _layout(table, files)
        # In the sorted rows, this column is the number of days since the last push.
        self._sorted = stack.enter_context(SortedRows(table.spec, (*row_columns(table.spec), LAST_UPDATE_DAY)))
        self._num_short = 0
        self._num_not_finite = 0
        self._days = 0
        self._least_power, self._largest_power = 1.0, 0.0
        for rows in read_rows(files, self._layout, on_progress):
            self._add(rows)

    @property
    def content(self) -> TableContent:
        """The table without its rows."""
        spec, step = self.given.spec, self._optimizer_step(self._least_power)
        return TableContent(spec, step, self._days, columns_of(spec, self._days))

    def rows(self, owned: NDArray[np.bool_] | None) -> Iterator[Rows]:
        """As `Readable`."""
        try:
            for rows in self._sorted.rows(owned):
                days = self._days - rows.columns[LAST_UPDATE_DAY.name]
                aged = Rows(rows.ids, {**rows.columns, LAST_UPDATE_DAY.name: days})
                yield aged.with_columns(self.content.columns)
        except DuplicateId as error:
            raise self._twice(error) from error

    def found(self) -> ImportedTable:
        """Returns the result for the user."""
        content, rule = self.content, self._layout.rule.name
        counts = (self._sorted.num_rows, self._num_short, content.optimizer_step, content.num_days)
        return ImportedTable(content.spec.name, self.given.directory, rule, *counts)

    def notes(self) -> Iterator[str]:
        """Yields what could not be converted."""
        where, rule, spec = f"Table {self.given.spec.name!r}: ", self._layout.rule, self.given.spec
        yield f"{where}slot, show, click and delta score were not imported."
        if self._num_short:
            yield (
                f"{where}{self._num_short} of {self._sorted.num_rows} rows had only their first value; the others are "
                "0, as Paddle's lookup answers."
            )
        if self._num_not_finite:
            yield f"{where}{self._num_not_finite} rows have values or state that are not finite, and keep them."
        if rule.rule != spec.rule:
            if rule.num_states(1) or spec.update_rule.num_states:
                yield f"{where}states of Paddle's rule {rule.name} do not fit {spec.rule}; they are initial ones now."
            return
        if not rule.per_value and rule.per_part:
            yield f"{where}the common state of all values of a row but the first is now the state of each of them."
        if spec.rule == "adagrad":
            yield (
                f"{where}for steps as long as Paddle's, set initial_accumulator_value, now "
                f"{dict(spec.hyperparameters)['initial_accumulator_value']:g}, to its initial_g2sum, and multiply the "
                "learning rate by the root of that."
            )
        if spec.rule == "adam" and self._sorted.num_rows:
            least, most = self._optimizer_step(self._largest_power), self._optimizer_step(self._least_power)
            yield f"{where}Paddle counts the pushes of each row, {least} to {most}; here all rows continue from {most}."

    def _add(self, rows: PaddleRows) -> None:
        states = self._states(rows)
        if self._layout.rule.rule == "adam" and len(rows.ids):
            powers = rows.first_state[:, -1]
            self._least_power = min(self._least_power, float(powers.min()))
            self._largest_power = max(self._largest_power, float(powers.max()))
        is_finite = np.isfinite(rows.rows).all(axis=1) & np.isfinite(states).all(axis=(1, 2))
        self._num_not_finite += int(np.count_nonzero(~is_finite))
        self._num_short += int(np.count_nonzero(~rows.has_others))
        self._days = max(self._days, int(rows.unseen_days.max(initial=0)))
        try:
            self._sorted.add(Rows.of(rows.ids, rows.rows, states, **{LAST_UPDATE_DAY.name: rows.unseen_days}))
        except DuplicateId as error:
            raise self._twice(error) from error

    def _states(self, rows: PaddleRows) -> NDArray[np.float32]:
        """Returns the states for our rule, `(n, num_states, dim)`."""
        spec, rule = self.given.spec, self._layout.rule
        states = np.empty((len(rows.ids), spec.update_rule.num_states, spec.dim), np.float32)
        states[:] = np.array(spec.update_rule.initial_state(dict(spec.hyperparameters)), np.float32)[:, np.newaxis]
        if rule.rule == spec.rule:
            width = spec.dim - 1 if rule.per_value else 1
            for k in range(spec.update_rule.num_states):
                states[:, k, :1] += rows.first_state[:, k : k + 1]
                states[:, k, 1:] += rows.other_state[:, k * width : (k + 1) * width]
        return states

    def _optimizer_step(self, power: float) -> int:
        """Returns the number of pushes of a row with this beta2^(t+1)."""
        beta2 = dict(self.given.spec.hyperparameters).get("beta2", 1.0)
        if self._layout.rule.rule != self.given.spec.rule or not 0 < beta2 < 1 or not self._sorted.num_rows:
            return 0
        return max(round(math.log(max(power, _SMALLEST)) / math.log(beta2)) - 1, 0)

    def _twice(self, error: DuplicateId) -> SnapshotCorrupt:
        return corrupt(str(self._directory), f"{error} in its files", 0)


class _ReadDense:
    """A dense table that was read, in the order of its spec."""

    def __init__(self, dense: PaddleDense, files: TableFiles) -> None:
        self.given = dense
        columns = read_dense(files)
        num_values, spec = len(columns), dense.spec
        if num_values != spec.num_values:
            raise SnapshotError(
                f"{files.directory}: has {num_values} values, {spec.name!r} has {spec.num_values}: name the parameters "
                "that Paddle trained, and no others"
            )
        self._rule = _DENSE_RULES.get(columns.shape[1], "unknown")
        columns = columns[_places(dense)]
        self.values = np.ascontiguousarray(columns[:, 0])
        num_states = spec.update_rule.num_states
        if self._rule == spec.rule:
            self.states = np.ascontiguousarray(columns[:, 1:].T)
        else:
            initial = np.array(spec.update_rule.initial_state(dict(spec.hyperparameters)), np.float32)
            self.states = np.repeat(initial, num_values).reshape(num_states, num_values)
        if spec.rule == "adam" and self._rule == "adam" and not dense.optimizer_step:
            raise SnapshotError(
                f"{files.directory}: has Adam's moments without their number of steps, which Paddle does not save. "
                "Give the optimizer step"
            )

    @property
    def content(self) -> DenseContent:
        """The table without its rows."""
        return DenseContent(self.given.spec, self.given.optimizer_step, assigned=True)

    def notes(self) -> Iterator[str]:
        """Yields what could not be converted."""
        where, rule = f"Dense {self.given.spec.name!r}: ", self.given.spec.rule
        if self._rule != rule:
            yield f"{where}states of Paddle's rule do not fit {rule}; they are initial ones now."
        elif self._rule == "adam":
            yield f"{where}the optimizer step is {self.given.optimizer_step}, as given; Paddle does not save it."


def _places(dense: PaddleDense) -> NDArray[np.int64]:
    """Returns the line of each value of the spec."""
    segments = {segment.name: segment for segment in dense.spec.segments}
    order = dense.order or sorted(segments)
    places = np.empty(dense.spec.num_values, np.int64)
    line = 0
    for name in order:
        segment = segments[name]
        places[segment.offset : segment.offset + segment.size] = np.arange(line, line + segment.size)
        line += segment.size
    return places


class _Checkpoint:
    """A checkpoint as `write_full` reads it."""

    workers: tuple[WorkerPosition, ...] = ()

    def __init__(
        self, tables: Mapping[str, _ReadTable], arrays: Mapping[str, _ReadDense], *, is_complete: bool
    ) -> None:
        self._read_tables = tables
        self._arrays = arrays
        self.is_complete = is_complete
        self.tables = {name: table.content for name, table in tables.items()}
        self.dense = {name: array.content for name, array in arrays.items()}

    def rows(self, table: str, owned: NDArray[np.bool_] | None = None) -> Iterator[Rows]:
        """As `Readable`."""
        return self._read_tables[table].rows(owned)

    def dense_values(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As `Readable`."""
        return self._arrays[name].values[begin:end], self._arrays[name].states[:, begin:end]
