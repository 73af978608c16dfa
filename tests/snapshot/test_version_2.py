"""Snapshots of format version 2, which fleet_sparse 0.1 wrote. `data/version_2` has a full one and a delta."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.store import SnapshotStore, open_chain
from support.snapshots import DELTA, Model, random_model, save, saved_model

OLD = Path(__file__).parent / "data" / "version_2"
DIGEST = "4cbd8d67ee2fce01569c6d24abe49d164edbed8f9ddcc5b7926aa01380ea5176"


def digest(model: Model) -> str:
    """Of every id, row, state and day of all tables."""
    found = hashlib.sha256()
    for table in model.tables:
        found.update(repr((table.spec.name, table.optimizer_step, table.days, sorted(table.rows.items()))).encode())
    for dense in model.dense:
        found.update(dense.values.tobytes() + dense.states.tobytes())
    return found.hexdigest()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "model"))


def test_a_chain_of_version_2_has_its_rows_and_dense_values() -> None:
    model = saved_model(OLD)
    assert {table.spec.name: (len(table.rows), table.days) for table in model.tables} == {
        "a/b@1": (25, 4),
        "sgd": (22, 4),
    }
    assert digest(model) == DIGEST


def test_a_manifest_of_version_2_keeps_its_version_and_bytes() -> None:
    for path in OLD.glob("*/MANIFEST.json"):
        manifest = SnapshotStore(directory_at(OLD)).manifest(path.parent.name)
        assert (manifest.version, manifest.to_json()) == (2, path.read_bytes())


def test_a_delta_of_version_4_may_have_a_base_of_version_2(old: Path) -> None:
    before = saved_model(old)
    changed = random_model(3, 7, days=5)
    save(old, changed, 3, kind=DELTA)
    assert [manifest.version for _, manifest in open_chain(directory_at(old))] == [2, 2, 4]
    found = {table.spec.name: table.rows for table in saved_model(old).tables}
    for table, update in zip(before.tables, changed.tables, strict=True):
        assert found[table.spec.name] == {**table.rows, **update.rows}


def test_a_table_of_version_2_has_the_columns_of_its_age() -> None:
    with open_content(str(OLD / "000001-full")) as content:
        names = {name: [column.name for column in table.columns] for name, table in content.tables.items()}
    assert names == {"a/b@1": ["rows", "states"], "sgd": ["rows", "states", "last_update_day"]}
