from __future__ import annotations

import io
import json
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.columns import columns_of
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot import row_sort
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots import parquet
from fleet_sparse.tools.snapshots.exchange import EXPORT, FORMATS, ExportedFile, export, open_export
from fleet_sparse.tools.snapshots.export_file import Description, Format
from fleet_sparse.tools.snapshots.reshard import write_full
from support.snapshots import (
    ADAM,
    SGD,
    Model,
    TableModel,
    assert_same,
    random_dense,
    random_model,
    random_row,
    save,
    saved_model,
)

HOWS = [pytest.param(how, id=name) for name, how in FORMATS.items()]
EDGES = [0, -1, 2**63 - 1, -(2**63)]
PLAIN = TableSpec(name="plain", dim=2, rule="sgd", initializer=constant(0.0))
MOMENTS = TableSpec(
    name="moments",
    dim=2,
    rule="adagrad",
    hyperparameters=(("initial_accumulator_value", 0.25),),
    initializer=constant(0.0),
)


def exported(source: Path, target: Path, how: Format, **arguments: Any) -> list[ExportedFile]:
    with open_content(str(source)) as content:
        return export(content, directory_at(target), how, **arguments)


def imported(source: Path, target: Path, num_shards: int | None = None, **arguments: Any) -> Manifest:
    with open_export(str(source), **arguments) as opened:
        return write_full(opened, directory_at(target), num_shards or opened.num_shards)


@settings(max_examples=25)
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(0, 3),
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=20),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.integers(0, 2**32),
)
def test_every_bit_comes_back(
    tmp_path_factory: pytest.TempPathFactory, how: str, days: int, ids: list[int], num_shards: int, seed: int
) -> None:
    where, rng = tmp_path_factory.mktemp("exchange"), np.random.default_rng(seed)
    tables = [
        TableModel(
            spec, {one: random_row(rng, spec, int(rng.integers(0, days + 1))) for one in {*ids, *EDGES}}, seed, days
        )
        for spec in (ADAM, SGD)
    ]
    empty = TableModel(PLAIN, {})
    model = Model((*tables, empty), (random_dense(rng, optimizer_step=seed),), random_model(1).workers)
    save(where / "model", model, num_shards)
    exported(where / "model", where / "export", FORMATS[how])
    manifest = imported(where / "export", where / "other")
    assert manifest.num_shards == num_shards
    assert_same(saved_model(where / "other"), model)


@pytest.mark.parametrize("how", HOWS)
def test_some_tables_alone_are_no_whole_snapshot(tmp_path: Path, how: Format) -> None:
    model = random_model(1)
    save(tmp_path / "model", model, 2)
    files = exported(tmp_path / "model", tmp_path / "export", how, tables=[SGD.name])
    assert files == [ExportedFile(f"table-sgd{how.suffix}", "table", "sgd", 100)]
    assert not imported(tmp_path / "export", tmp_path / "other").is_complete
    assert saved_model(tmp_path / "other").tables == model.tables[1:]


@pytest.mark.parametrize("how", HOWS)
def test_equal_content_makes_equal_files(tmp_path: Path, how: Format) -> None:
    save(tmp_path / "model", random_model(1))
    for name in ("one", "other"):
        exported(tmp_path / "model", tmp_path / name, how)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == 4
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in names)


def test_npz_is_read_by_numpy(tmp_path: Path) -> None:
    model = random_model(1, days=1)
    save(tmp_path / "model", model, 3)
    exported(tmp_path / "model", tmp_path / "export", FORMATS["npz"])
    with np.load(tmp_path / "export" / "table-a%2Fb%401.npz", allow_pickle=False) as arrays:
        assert arrays["ids"].dtype == np.int64
        assert (arrays["rows"].dtype, arrays["rows"].shape) == (np.float32, (100, 3))
        assert arrays["states"].shape == (100, 2, 3)
        assert arrays["last_update_day"].dtype == np.uint16
        rows = {
            one: (row.tobytes(), states.tobytes(), int(day))
            for one, row, states, day in zip(
                arrays["ids"].tolist(), arrays["rows"], arrays["states"], arrays["last_update_day"], strict=True
            )
        }
    assert rows == model.tables[0].rows
    with np.load(tmp_path / "export" / "dense-dense.npz", allow_pickle=False) as arrays:
        assert arrays["values"].tobytes() == model.dense[0].values.tobytes()
        assert arrays["states"].tobytes() == model.dense[0].states.tobytes()


def test_parquet_is_read_by_pandas(tmp_path: Path) -> None:
    model = random_model(1, days=1)
    save(tmp_path / "model", model, 3)
    exported(tmp_path / "model", tmp_path / "export", FORMATS["parquet"])
    frame = pandas.read_parquet(tmp_path / "export" / "table-a%2Fb%401.parquet")
    assert list(frame.columns) == ["id", "row", "state", "last_update_day"]
    rows = {
        one: (np.asarray(row, np.float32).tobytes(), np.asarray(state, np.float32).tobytes(), int(day))
        for one, row, state, day in frame.itertuples(index=False)
    }
    assert rows == model.tables[0].rows
    dense = pandas.read_parquet(tmp_path / "export" / "dense-dense.parquet")
    assert dense["value"].to_numpy().tobytes() == model.dense[0].values.tobytes()


def test_memory_of_parquet_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = TableSpec(name="wide", dim=256, rule="sgd", initializer=constant(0.0))
    row = random_row(np.random.default_rng(1), wide)
    save(tmp_path / "model", Model((TableModel(wide, dict.fromkeys(range(60_000), row)),)))
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 4 << 20)
    monkeypatch.setattr(row_sort, "_RUN_BYTES", 4 << 20)
    tracemalloc.start()
    exported(tmp_path / "model", tmp_path / "export", FORMATS["parquet"])
    _, peak_of_export = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    assert imported(tmp_path / "export", tmp_path / "other").num_rows == 60_000
    _, peak_of_import = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(peak_of_export, peak_of_import) < 30 << 20, "the table has 62 MB"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    """An export of `random_model(1)`."""
    save(tmp_path / "model", random_model(1))
    exported(tmp_path / "model", tmp_path / "export", FORMATS["npz"])
    return tmp_path / "export"


# Files that others made


def write_npz(path: Path, ids: Iterable[int], rows: Any, **more: Any) -> Path:
    np.savez(path, ids=np.array(list(ids), np.int64), rows=np.asarray(rows, np.float32), **more)
    return path


def test_ids_in_any_order_are_put_in_order(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).permutation(1000)
    path = write_npz(tmp_path / "table-plain.npz", ids, np.stack([ids, -ids], 1))
    assert imported(path, tmp_path / "model", 3, specs={"plain": PLAIN}).num_rows == 1000
    rows = saved_model(tmp_path / "model").tables[0].rows
    assert all(rows[one][0] == np.array([one, -one], np.float32).tobytes() for one in range(1000))


@pytest.mark.parametrize("name", ["rows.npz", "rows.parquet"])
def test_rows_without_states_get_those_of_new_rows(tmp_path: Path, name: str) -> None:
    write_npz(tmp_path / "rows.npz", [7], [[1, 2]])
    table = pyarrow.table({"id": pyarrow.array([7]), "row": lists([1.0, 2.0])})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    imported(tmp_path / name, tmp_path / "model", specs={"moments": MOMENTS}, table="moments")
    row, states, _ = saved_model(tmp_path / "model").tables[0].rows[7]
    assert row == np.array([1, 2], np.float32).tobytes()
    assert states == np.full(2, 0.25, np.float32).tobytes()


def test_files_without_a_list_are_all_taken(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_npz(tmp_path / "in" / "table-plain.npz", [7], [[1, 2]])
    write_npz(tmp_path / "in" / "table-moments.npz", [7], [[1, 2]])
    manifest = imported(tmp_path / "in", tmp_path / "model", specs={"plain": PLAIN, "moments": MOMENTS})
    assert sorted(manifest.tables) == ["moments", "plain"]
    assert not manifest.is_complete


def test_a_given_spec_takes_the_place_of_that_in_the_file(tmp_path: Path, npz: Path) -> None:
    other = TableSpec(name="sgd", dim=2, rule="sgd", initializer=constant(2.0))
    imported(npz, tmp_path / "other", specs={"sgd": other})
    found = {table.spec.name: table for table in saved_model(tmp_path / "other").tables}
    assert found["sgd"].spec == other
    assert found["sgd"].rows == random_model(1).tables[1].rows


# Targets that have files


@pytest.mark.parametrize("how", HOWS)
def test_an_export_that_is_there_is_replaced_only_if_told(tmp_path: Path, how: Format) -> None:
    save(tmp_path / "model", random_model(1))
    exported(tmp_path / "model", tmp_path / "export", how, tables=[SGD.name])
    before = (tmp_path / "export" / EXPORT).read_bytes()
    with pytest.raises(SnapshotError):
        exported(tmp_path / "model", tmp_path / "export", how)
    assert (tmp_path / "export" / EXPORT).read_bytes() == before
    exported(tmp_path / "model", tmp_path / "export", how, replace=True)
    imported(tmp_path / "export", tmp_path / "other")
    assert_same(saved_model(tmp_path / "other"), random_model(1))


@pytest.mark.parametrize("name", ["000001-full", "notes.txt", EXPORT + ".old"])
def test_what_is_no_export_is_never_removed(tmp_path: Path, npz: Path, name: str) -> None:
    (npz / name).write_text("mine")
    with pytest.raises(SnapshotError):
        exported(tmp_path / "model", npz, FORMATS["npz"], replace=True)
    assert (npz / name).read_text() == "mine"


# Error paths


@pytest.mark.parametrize("how", HOWS)
def test_an_export_stops_where_the_snapshot_is_wrong(tmp_path: Path, how: Format) -> None:
    name = save(tmp_path / "model", random_model(1))
    path = tmp_path / "model" / name / "shard-0-of-1.fss"
    content = bytearray(path.read_bytes())
    content[64] ^= 1
    path.write_bytes(content)
    with pytest.raises(SnapshotCorrupt):
        exported(tmp_path / "model", tmp_path / "export", how)
    assert [file.name for file in (tmp_path / "export").iterdir()] == [EXPORT]


def flip_a_row(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(next(iter(random_model(1).tables[1].rows.values()))[0])] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1000), flip_a_row])
def test_a_damaged_file_is_told(tmp_path: Path, how: Format, damage: Callable[[Path], None]) -> None:
    save(tmp_path / "model", random_model(1))
    exported(tmp_path / "model", tmp_path / "export", how)
    damage(tmp_path / "export" / f"table-sgd{how.suffix}")
    with pytest.raises(SnapshotError):
        imported(tmp_path / "export", tmp_path / "other")
    assert not list((tmp_path / "other").glob("*"))


ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (None, ONES, "'ids'"),
        (np.arange(2), np.ones((2, 3), np.float32), r"'rows' is float32 \(2, 3\), should be float32 \(2, 2\)"),
        (np.arange(2), np.ones((2, 2)), r"'rows' is float64 \(2, 2\), should be float32 \(2, 2\)"),
        (np.arange(2, dtype=np.int32), ONES, r"'ids' is int32 \(2,\), should be int64 \(2,\)"),
        (np.arange(3), ONES, r"'rows' is float32 \(2, 2\), should be float32 \(3, 2\)"),
        (np.array([1, None]), ONES, "npz"),
        (np.array([5, 5]), ONES, "5"),
    ],
)
def test_arrays_of_another_kind_are_told(tmp_path: Path, ids: Any, rows: Any, message: str) -> None:
    np.savez(tmp_path / "table-plain.npz", rows=rows, **({} if ids is None else {"ids": ids}))
    with pytest.raises(SnapshotError, match=message):
        imported(tmp_path / "table-plain.npz", tmp_path / "model", specs={"plain": PLAIN})
    assert not list((tmp_path / "model").glob("*"))


def lists(values: list[float | None]) -> Any:
    return pyarrow.array([values], pyarrow.list_(pyarrow.float32(), len(values)))


@pytest.mark.parametrize(
    ("id_", "row", "name"),
    [
        (1, None, "'row'"),
        (1, lists([1.0]), r"'row' is fixed_size_list<element: float>\[1\] , should be fixed_size_list<.*>\[2\]"),
        (None, lists([1.0, 1.0]), "'id'"),
        (1, lists([1.0, None]), "'row'"),
    ],
)
def test_columns_of_another_kind_are_told(tmp_path: Path, id_: int | None, row: Any, name: str) -> None:
    columns = {"id": pyarrow.array([id_], pyarrow.int64()), **({} if row is None else {"row": row})}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "table-plain.parquet")
    with pytest.raises(SnapshotError, match=name):
        imported(tmp_path / "table-plain.parquet", tmp_path / "model", specs={"plain": PLAIN})


def test_a_day_that_has_not_been_is_told(tmp_path: Path) -> None:
    description = np.frombuffer(
        Description(PLAIN, num_days=3, columns=columns_of(PLAIN, 3)).to_json().encode(), np.uint8
    )
    arrays = {"states": np.ones((1, 0, 2), np.float32), "last_update_day": np.array([4], np.uint16)}
    write_npz(tmp_path / "table-plain.npz", [7], [[1, 2]], fleet_sparse=description, **arrays)
    with pytest.raises(SnapshotError):
        imported(tmp_path / "table-plain.npz", tmp_path / "model")


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"format": "fleet_sparse export", "version": 3}'])
def test_a_description_that_does_not_hold_together_is_told(tmp_path: Path, text: str) -> None:
    write_npz(tmp_path / "table-plain.npz", [7], [[1, 2]], fleet_sparse=np.frombuffer(text.encode(), np.uint8))
    with pytest.raises(SnapshotError):
        imported(tmp_path / "table-plain.npz", tmp_path / "model")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "table-plain.npz", "w") as archive:
        content = io.BytesIO()
        np.lib.format.write_array(content, np.array([print], object), allow_pickle=True)
        archive.writestr("ids.npy", content.getvalue())
        archive.writestr("rows.npy", content.getvalue())
    with pytest.raises(SnapshotError):
        imported(tmp_path / "table-plain.npz", tmp_path / "model", specs={"plain": PLAIN})


OTHER_RULE = TableSpec(name="sgd", dim=2, rule="adam", initializer=constant(0.5))


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("table-plain.npz", {"specs": {"moments": MOMENTS}}),
        ("export", {"specs": {"sgd": OTHER_RULE}}),
        ("export/table-sgd.npz", {"table": "C1"}),
        ("export", {"table": "C1"}),
        ("model/000001-full", {}),
    ],
    ids=["no spec", "states of another rule", "no spec of the name", "a name for several files", "no files"],
)
@pytest.mark.usefixtures("npz")
def test_an_import_that_is_not_defined_is_refused(tmp_path: Path, source: str, arguments: dict[str, Any]) -> None:
    write_npz(tmp_path / "table-plain.npz", [7], [[1, 2]])
    with pytest.raises(SnapshotError):
        imported(tmp_path / source, tmp_path / "other", **arguments)


def test_two_files_of_one_table_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model", random_model(1))
    exported(tmp_path / "model", tmp_path / "export", FORMATS["npz"], tables=[SGD.name])
    (tmp_path / "export" / EXPORT).unlink()
    (tmp_path / "export" / "copy.npz").write_bytes((tmp_path / "export" / "table-sgd.npz").read_bytes())
    with pytest.raises(SnapshotError):
        imported(tmp_path / "export", tmp_path / "other")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"version": 1},
        {"num_shards": 0},
        {"num_shards": 1 << 20},
        {"is_whole": 1},
        {"files": [{"file": "EXPORT.json"}]},
        {"files": "table-sgd.npz"},
        {"files": [{"file": "../export/table-sgd.npz", "kind": "table", "name": "sgd"}]},
        {"workers": [{"worker": 0}]},
    ],
)
def test_a_list_that_does_not_hold_together_is_told(tmp_path: Path, npz: Path, change: dict[str, Any]) -> None:
    path = npz / EXPORT
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SnapshotError):
        imported(npz, tmp_path / "other")


def test_a_missing_table_is_told_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path / "model", random_model(1))
    with pytest.raises(SnapshotError):
        exported(tmp_path / "model", tmp_path / "export", FORMATS["npz"], tables=["C1"])
    assert not (tmp_path / "export").exists()


def test_parquet_without_pyarrow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model", random_model(1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SnapshotError):
        exported(tmp_path / "model", tmp_path / "export", FORMATS["parquet"])
