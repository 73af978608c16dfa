"""A version that is held inside the process, against the model of its snapshot."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import NO_VERSION
from fleet_sparse.errors import ErrorCode, ProtocolError, SnapshotError
from fleet_sparse.serving.local_reader import LocalReader
from fleet_sparse.snapshot.reader import open_content
from support import saves
from support.admissions import FIRST, CountedJob, count_filter
from support.snapshots import (
    ADAM,
    DENSE,
    SGD,
    DenseModel,
    Model,
    TableModel,
    random_dense,
    random_model,
    random_row,
    save,
)

EXTREME = np.array([-(2**63), 2**63 - 1, -1, 0, 7])


def opened(where: Path) -> LocalReader:
    with open_content(str(where)) as content:
        return LocalReader(content)


def expected(spec: TableSpec, model: TableModel, ids: np.ndarray) -> bytes:
    initial = initial_rows(spec.initializer, ids, dim=spec.dim, seed=spec.seed, salt=spec.salt)
    return b"".join(
        model.rows[id_][0] if id_ in model.rows else row.tobytes()
        for id_, row in zip(ids.tolist(), initial, strict=True)
    )


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3000])
def test_each_row_has_the_bits_of_the_snapshot(tmp_path: Path, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    model = random_model(1, num_rows)
    rows = [dict(table.rows) | {int(EXTREME[0]): random_row(rng, table.spec)} for table in model.tables]
    tables = tuple(table._replace(rows=its) for table, its in zip(model.tables, rows, strict=True))
    save(tmp_path, model._replace(tables=tables), 2)
    reader = opened(tmp_path)
    for table in tables:
        ids = np.concatenate([EXTREME, rng.permutation(np.array([*table.rows] * 2, np.int64)), rng.integers(0, 99, 9)])
        reading = reader.read({table.spec.name: ids})
        assert reading.rows[table.spec.name].shape == (len(ids), table.spec.dim)
        assert reading.rows[table.spec.name].tobytes() == expected(table.spec, table, ids)


def test_deltas_and_removed_ids_are_part_of_a_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = random_model(2, 50)
    save(tmp_path, model, 3)
    (adam, sgd), gone = model.tables, [*model.tables[1].rows][:5]
    new = {id_: random_row(rng, SGD) for id_ in [*range(5), [*sgd.rows][9]]}
    dense = (random_dense(rng),)
    save(
        tmp_path, Model((adam._replace(rows={}), sgd._replace(rows=new)), dense), 3, kind="delta", removed={"sgd": gone}
    )
    reader = opened(tmp_path)
    sgd = sgd._replace(rows={id_: row for id_, row in sgd.rows.items() if id_ not in gone} | new)
    ids = np.array([*gone, *sgd.rows], np.int64)
    reading = reader.read({"sgd": ids, ADAM.name: ids}, ["dense"], version=reader.newest())
    assert reading.version == reader.version
    assert reading.version.number == 2
    assert reading.rows["sgd"].tobytes() == expected(SGD, sgd, ids)
    assert reading.rows[ADAM.name].tobytes() == expected(ADAM, adam, ids)
    assert reading.values["dense"].tobytes() == dense[0].values.tobytes()


def test_ids_of_a_table_with_an_entry_read_zeros(tmp_path: Path) -> None:
    job = CountedJob(count_filter(2))
    job.push(EXTREME[:3])
    job.push(EXTREME[:2])
    job.push(EXTREME[:2])
    saves.save(job.shards, tmp_path)
    reader = opened(tmp_path)
    assert list(reader.tables) == ["emb"]
    assert reader.read({"emb": EXTREME}).rows["emb"][:, 0].tolist() == [FIRST - 0.25] * 2 + [0.0] * 3


def test_what_is_not_held_is_refused_by_name_or_code(tmp_path: Path) -> None:
    size = DENSE.num_values
    unassigned = DenseModel(DENSE, np.zeros(size, np.float32), np.zeros((2, size), np.float32), assigned=False)
    save(tmp_path, Model((TableModel(SGD, {}),), (unassigned,)))
    reader = opened(tmp_path)
    for wanted in ({"ids": {"absent": EXTREME}}, {"ids": {}, "arrays": ["absent"]}):
        with pytest.raises(ValueError, match="'absent'"):
            reader.read(**wanted)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError) as not_ready:
        reader.read({}, ["dense"])
    with pytest.raises(ProtocolError) as gone:
        reader.read({"sgd": EXTREME}, version=NO_VERSION)
    assert [raised.value.code for raised in (not_ready, gone)] == [ErrorCode.NOT_READY, ErrorCode.VERSION_GONE]


def test_a_snapshot_of_some_tables_is_no_version(tmp_path: Path) -> None:
    name = save(tmp_path, Model((TableModel(SGD, {}),)), is_complete=False)
    with pytest.raises(SnapshotError):
        opened(tmp_path / name)


def test_a_call_that_waits_for_a_version_ends_at_close(tmp_path: Path) -> None:
    save(tmp_path, Model((TableModel(SGD, {}),)))
    with opened(tmp_path) as reader:
        assert reader.await_version(NO_VERSION) == reader.version
        waiting = threading.Thread(target=reader.await_version, args=[reader.version])
        waiting.start()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
