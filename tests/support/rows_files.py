"""Rows files and manifests without a shard: made of plain arrays, read back whole, or from bytes in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.snapshot.checksum import Checksum
from fleet_sparse.snapshot.directory import Directory, OutputFile, corrupt
from fleet_sparse.snapshot.manifest import Base, Manifest, ShardFile, WorkerPosition
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_reader import RowsFile, open_rows_file
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.snapshot.store import Plan

TABLE = TableSpec(name="C1", dim=2, rule="adagrad", initializer=constant(0.0))
DENSE = DenseSpec("dense", "sgd", (), (Segment("w", 0, 3, 1.0),))


class Table(NamedTuple):
    """What a file has of a table."""

    spec: TableSpec
    rows: Rows
    days: int = 0
    removed: NDArray[np.int64] = np.zeros(0, np.int64)
    optimizer_step: int = 7


class Dense(NamedTuple):
    """What a file has of a dense array."""

    spec: DenseSpec
    begin: int
    end: int
    values: NDArray[np.float32]
    states: NDArray[np.float32]
    assigned: bool = True
    optimizer_step: int = 7


class SnapshotReader(NamedTuple):
    """All of a file, in a shape that `==` compares bit by bit."""

    tables: dict[str, tuple[Any, ...]]
    dense: dict[str, tuple[Any, ...]]


class BytesInput:
    """An input file in memory."""

    def __init__(self, content: bytes, name: str = "shard-0-of-1.fss") -> None:
        self.content = content
        self.name = name
        self.size = len(content)
        self.is_closed = False

    def read_into(self, offset: int, buffer: memoryview) -> None:
        found = self.content[offset : offset + len(buffer)]
        if len(found) != len(buffer):
            raise corrupt(self.name, "it ends early", offset)
        buffer[:] = found

    def close(self) -> None:
        self.is_closed = True


class BytesOutput:
    """An output file in memory."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_finished = False

    def write(self, data: bytes | memoryview) -> None:
        self.content += data

    def finish(self) -> None:
        self.is_finished = True

    def abandon(self) -> None:
        self.content.clear()


def in_hash_order(ids: Iterable[int], spec: TableSpec) -> NDArray[np.int64]:
    array = np.array(sorted(set(ids)), np.int64)
    return array[np.argsort(hash_ids(array, spec.salt))]


def rows_of(spec: TableSpec, ids: Iterable[int], *, days: int = 0, seed: int = 0) -> Rows:
    """Rows with random values, in the order of a file."""
    rng = np.random.default_rng(seed)
    ordered = in_hash_order(ids, spec)
    count, num_states = len(ordered), spec.update_rule.num_states
    rows = Rows.of(
        ordered,
        rng.standard_normal((count, spec.dim), np.float32),
        rng.random((count, num_states, spec.dim), np.float32),
    )
    if not days:
        return rows
    return Rows(ordered, {**rows.columns, LAST_UPDATE_DAY.name: rng.integers(0, days + 1, count).astype(np.uint16)})


def dense_of(spec: DenseSpec, begin: int, end: int, *, seed: int = 0) -> Dense:
    rng = np.random.default_rng(seed)
    shape = (spec.update_rule.num_states, end - begin)
    return Dense(spec, begin, end, rng.random(end - begin, np.float32), rng.random(shape, np.float32))


def writer_to(file: OutputFile, *, shard: int = 0, num_shards: int = 1, save_id: str = "one") -> RowsWriter:
    return RowsWriter(
        file,
        shard=shard,
        num_shards=num_shards,
        cluster_id=0xC0FFEE,
        incarnation=3,
        placement_version=1,
        save_id=save_id,
    )


def write(
    file: OutputFile,
    tables: Sequence[Table] = (),
    dense: Sequence[Dense] = (),
    *,
    shard: int = 0,
    num_shards: int = 1,
    save_id: str = "one",
) -> ShardFile:
    """Writes a whole file."""
    writer = writer_to(file, shard=shard, num_shards=num_shards, save_id=save_id)
    for table in tables:
        writer.begin_table(table.spec, optimizer_step=table.optimizer_step, num_days=table.days)
        writer.write_rows(table.rows)
        writer.write_removed(table.removed)
        writer.end_table()
    for array in dense:
        writer.write_dense(**array._asdict())
    return writer.finish()


def written(tables: Sequence[Table] = (), dense: Sequence[Dense] = ()) -> tuple[bytes, ShardFile]:
    """The bytes of a file, and how a manifest names it."""
    file = BytesOutput()
    told = write(file, tables, dense)
    return bytes(file.content), told


def opened_bytes(content: bytes, expected: ShardFile) -> RowsFile:
    return open_rows_file(BytesInput(content), expected)


def everything_in(file: RowsFile) -> SnapshotReader:
    """Reads all of a file."""
    tables = {}
    for table in file.tables:
        pieces = list(file.rows(table))
        tables[table.spec.name] = (
            table.spec,
            table.optimizer_step,
            table.num_days,
            b"".join(piece.ids.tobytes() for piece in pieces),
            {each.name: b"".join(piece.columns[each.name].tobytes() for piece in pieces) for each in table.columns},
            b"".join(ids.tobytes() for ids in file.removed(table)),
        )
    dense = {}
    for array in file.dense:
        values, states = file.dense_values(array)
        dense[array.spec.name] = (
            array.spec,
            array.optimizer_step,
            (array.begin, array.end, array.assigned),
            values.tobytes(),
            states.tobytes(),
        )
    return SnapshotReader(tables, dense)


def content_of(tables: Sequence[Table] = (), dense: Sequence[Dense] = ()) -> SnapshotReader:
    """What `everything_in` should find."""
    return SnapshotReader(
        {
            table.spec.name: (
                table.spec,
                table.optimizer_step,
                table.days,
                table.rows.ids.tobytes(),
                {name: array.tobytes() for name, array in table.rows.columns.items()},
                table.removed.tobytes(),
            )
            for table in tables
        },
        {
            array.spec.name: (
                array.spec,
                array.optimizer_step,
                (array.begin, array.end, array.assigned),
                array.values.tobytes(),
                array.states.tobytes(),
            )
            for array in dense
        },
    )


def manifest_of(
    plan: Plan, files: Sequence[ShardFile], *, save_id: str = "one", is_complete: bool = True, **changes: Any
) -> Manifest:
    """The manifest of a planned snapshot."""
    manifest = Manifest(
        plan.number,
        plan.kind,
        plan.base,
        save_id,
        "2026-03-01T10:15:00+00:00",
        ("C1",),
        is_complete,
        tuple(files),
        (WorkerPosition(0, 1200, {"epoch": 0, "batch": 1200}), WorkerPosition(1, 1187)),
    )
    return msgspec.structs.replace(manifest, **changes)


def forged(manifest: Manifest, **changes: Any) -> bytes:
    """A manifest's file with other fields, and a checksum that fits them."""
    value = {**json.loads(manifest.to_json()), **changes}
    del value["checksum"]
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return json.dumps({**value, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}).encode()


MARK = Watermark(bytes(range(16)), 1, 1200)
A_FILE = ShardFile(0, "shard-0-of-1.fss", 800, 3, 0, Checksum(0x0123456789ABCDEF), (MARK,))
FULL_PLAN = Plan(1, "full", None)
DELTA_PLAN = Plan(2, "delta", Base(1, "full", Checksum(5)))


def contents_of(chain: Sequence[tuple[Directory, Manifest]]) -> list[Mapping[str, Any]]:
    """Everything in every file of a chain."""
    contents = []
    for directory, manifest in chain:
        for expected in manifest.files:
            file = open_rows_file(directory.open(expected.file), expected)
            contents.append(everything_in(file)._asdict())
            file.close()
    return contents


def changed_rows(rows: Rows, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Rows:
    """Rows of which ids and every column are changed."""
    return Rows(change(rows.ids), {name: change(array) for name, array in rows.columns.items()})
