"""Snapshots written from a model of what they say, without pservers; and what a snapshot says, as such a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.columns import LAST_UPDATE_DAY
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.ids import NUM_BUCKETS, hash_ids
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.snapshot.directory import MANIFEST, Directory, directory_at
from fleet_sparse.snapshot.manifest import DELTA, FULL, Manifest, ShardFile, WorkerPosition, file_name
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.snapshot.store import Plan, SnapshotStore
from fleet_sparse.tools.snapshots.reshard import Readable

ADAM = TableSpec(name="a/b@1", dim=3, rule="adam", initializer=uniform(-1.0, 1.0), seed=3)
SGD = TableSpec(name="sgd", dim=2, rule="sgd", initializer=constant(0.5))
DENSE = DenseSpec("dense", "adam", (), (Segment("w", 0, 7, 1.0), Segment("b", 7, 4, 2.0)))
SPECS: tuple[TableSpec | DenseSpec, ...] = (ADAM, SGD, DENSE)
SAVED_AT = "2026-03-01T10:15:00+00:00"

Row = tuple[bytes, bytes, int]
"""Bytes of the row and of its states, and the day of its last push."""


class TableModel(NamedTuple):
    """What is said about a table."""

    spec: TableSpec
    rows: Mapping[int, Row]
    optimizer_step: int = 0
    days: int = 0


class DenseModel(NamedTuple):
    """What is said about a dense array."""

    spec: DenseSpec
    values: NDArray[np.float32]
    states: NDArray[np.float32]
    optimizer_step: int = 0
    assigned: bool = True


class Model(NamedTuple):
    """What a snapshot says."""

    tables: tuple[TableModel, ...] = ()
    dense: tuple[DenseModel, ...] = ()
    workers: tuple[WorkerPosition, ...] = ()


def random_floats(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Of all bits that a float32 can have: NaNs with payloads, infinities, -0.0, subnormals."""
    return rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)


def random_row(rng: np.random.Generator, spec: TableSpec, day: int = 0) -> Row:
    """A row of any bits."""
    states = random_floats(rng, spec.update_rule.num_states, spec.dim)
    return random_floats(rng, spec.dim).tobytes(), states.tobytes(), day


def random_dense(rng: np.random.Generator, spec: DenseSpec = DENSE, *, optimizer_step: int = 0) -> DenseModel:
    """Values and states of any bits."""
    states = random_floats(rng, spec.update_rule.num_states, spec.num_values)
    return DenseModel(spec, random_floats(rng, spec.num_values), states, optimizer_step)


def random_model(seed: int, num_rows: int = 100, *, days: int = 0) -> Model:
    """All of `SPECS`, with the same number of rows in each table."""
    rng = np.random.default_rng(seed)
    tables = [
        TableModel(
            spec,
            {
                int(one): random_row(rng, spec, int(rng.integers(0, days + 1)))
                for one in rng.integers(-(2**63), 2**63, num_rows)
            },
            optimizer_step=seed + 10,
            days=days,
        )
        for spec in (ADAM, SGD)
    ]
    workers = (WorkerPosition(0, 12, {"epoch": 1}), WorkerPosition(1, 11))
    return Model(tuple(tables), (random_dense(rng, optimizer_step=seed + 10),), workers)


def rows_of(table: TableModel, ids: Iterable[int]) -> Rows:
    """Rows of some ids, in the order of their hash."""
    spec = table.spec
    ordered = in_order(ids, spec)
    found = [table.rows[one] for one in ordered.tolist()]
    shape = (len(ordered), spec.update_rule.num_states, spec.dim)
    days = {LAST_UPDATE_DAY.name: np.array([day for *_, day in found], np.uint16)} if table.days else {}
    return Rows.of(
        ordered,
        np.frombuffer(b"".join(row for row, _, _ in found), np.float32).reshape(len(ordered), spec.dim),
        np.frombuffer(b"".join(states for _, states, _ in found), np.float32).reshape(shape),
        **days,
    )


def in_order(ids: Iterable[int], spec: TableSpec) -> NDArray[np.int64]:
    """Ids in the order of their hash."""
    array = np.array(list(ids), np.int64)
    return array[np.argsort(hash_ids(array, spec.salt))]


def write_file(
    directory: Directory,
    model: Model,
    *,
    shard: int,
    num_shards: int,
    save_id: str = "save",
    removed: Mapping[str, Iterable[int]] | None = None,
    placement: Placement | None = None,
    clients: tuple[Watermark, ...] = (),
) -> ShardFile:
    """What one pserver writes of a model."""
    placement = placement or Placement.even(num_shards)
    file = directory.create(file_name(shard, num_shards))
    writer = RowsWriter(
        file,
        shard=shard,
        num_shards=num_shards,
        cluster_id=77,
        incarnation=88,
        placement_version=placement.version,
        save_id=save_id,
    )

    def owned(ids: Iterable[int], spec: TableSpec) -> NDArray[np.int64]:
        array = np.array(list(ids), np.int64)
        return array[placement.shard_of(array, spec.salt) == shard]

    for table in model.tables:
        writer.begin_table(table.spec, optimizer_step=table.optimizer_step, num_days=table.days)
        writer.write_rows(rows_of(table, owned(table.rows, table.spec).tolist()))
        if removed is not None:
            gone = owned(removed.get(table.spec.name, ()), table.spec)
            writer.write_removed(in_order(gone.tolist(), table.spec))
        writer.end_table()
    for dense in model.dense:
        begin, end = dense.spec.range_of(shard, num_shards)
        writer.write_dense(
            dense.spec,
            optimizer_step=dense.optimizer_step,
            begin=begin,
            end=end,
            assigned=dense.assigned,
            values=dense.values[begin:end],
            states=dense.states[:, begin:end],
        )
    return msgspec.structs.replace(writer.finish(), clients=clients)


def save(
    where: str | Path,
    model: Model,
    num_shards: int = 1,
    *,
    kind: str = FULL,
    removed: Mapping[str, Iterable[int]] | None = None,
    placement: Placement | None = None,
    clients: Sequence[tuple[Watermark, ...]] | None = None,
    is_complete: bool = True,
) -> str:
    """Saves a model, or a delta, as the next snapshot of a series; returns the snapshot's name."""
    series, save_id = SnapshotStore(directory_at(where)), f"save-{np.random.default_rng().integers(1 << 60)}"
    plan = series.plan(kind, save_id)
    assert plan.kind == kind
    target = series.target(plan, save_id)
    files = [
        write_file(
            target,
            model,
            shard=shard,
            num_shards=num_shards,
            save_id=save_id,
            removed=(removed or {}) if kind == DELTA else None,
            placement=placement,
            clients=clients[shard] if clients else (),
        )
        for shard in range(num_shards)
    ]
    names = tuple(table.spec.name for table in model.tables)
    version = (placement or Placement.even(num_shards)).version
    manifest = Manifest(
        plan.number, kind, plan.base, save_id, SAVED_AT, names, is_complete, tuple(files), model.workers, version
    )
    return series.commit(plan, manifest)


def model_of(source: Readable) -> Model:
    """What a snapshot, or an export of one, says. Fails if an id is there twice, or rows are not in order."""
    tables = []
    for name, table in source.tables.items():
        rows: dict[int, Row] = {}
        last = -1
        for block in source.rows(name):
            hashes = hash_ids(block.ids, table.spec.salt)
            assert int(hashes[0]) > last
            assert (hashes[1:] > hashes[:-1]).all()
            last = int(hashes[-1])
            last_days = block.columns.get(LAST_UPDATE_DAY.name)
            assert (last_days is None) == (table.num_days == 0)
            days = [0] * len(block.ids) if last_days is None else last_days.tolist()
            for id_, row, states, day in zip(block.ids.tolist(), block.rows, block.states, days, strict=True):
                rows[id_] = (row.tobytes(), states.tobytes(), day)
        tables.append(TableModel(table.spec, rows, table.optimizer_step, table.num_days))
    dense = [
        DenseModel(each.spec, *source.dense_values(name), each.optimizer_step, each.assigned)
        for name, each in source.dense.items()
    ]
    return Model(tuple(tables), tuple(dense), source.workers)


def saved_model(where: str | Path) -> Model:
    """What the newest snapshot of a series says, or the one snapshot."""
    with open_content(str(where)) as content:
        return model_of(content)


def assert_same(found: Model, expected: Model) -> None:
    """Two models are equal, bit for bit."""
    assert found.tables == expected.tables
    assert found.workers == expected.workers
    what = [[(each.spec, each.optimizer_step, each.assigned) for each in model.dense] for model in (found, expected)]
    assert what[0] == what[1]
    for one, other in zip(found.dense, expected.dense, strict=True):
        assert one.values.tobytes() == other.values.tobytes()
        assert one.states.tobytes() == other.states.tobytes()


def commit_unchecked(store: SnapshotStore, plan: Plan, manifest: Manifest) -> None:
    """Makes written files a snapshot as `SnapshotStore.commit`, whatever is wrong with them."""
    target = store.target(plan, manifest.save_id)
    target.put(MANIFEST, manifest.to_json())
    target.parent().rename_child(target.name, plan.name)


def save_one_id_twice(where: Path) -> None:
    """A full snapshot in which the files of both shards have id 5 of `SGD`."""
    model = Model((TableModel(SGD, {5: random_row(np.random.default_rng(1), SGD)}),))
    store = SnapshotStore(directory_at(where))
    plan = store.plan(FULL, "save")
    target = store.target(plan, "save")
    files = [
        write_file(
            target, model, shard=shard, num_shards=2, placement=Placement(2, 2, np.full(NUM_BUCKETS, shard, np.int32))
        )
        for shard in (0, 1)
    ]
    commit_unchecked(store, plan, Manifest(1, FULL, None, "save", SAVED_AT, (), True, tuple(files), (), 2))
