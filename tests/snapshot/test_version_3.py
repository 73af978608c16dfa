"""Snapshots of format version 3, which know no entry policies. `data/version_3` has a full one and a delta."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.store import SnapshotStore, open_chain
from support.snapshots import DELTA, random_model, save, saved_model

OLD = Path(__file__).parent / "data" / "version_3"


def test_a_chain_of_version_3_has_its_rows() -> None:
    first, second, found = random_model(5, 20, days=3), random_model(6, 6, days=4), saved_model(OLD)
    removed = list(first.tables[1].rows)[:3]
    for table, old, new in zip(found.tables, first.tables, second.tables, strict=True):
        rows = {id_: row for id_, row in old.rows.items() if old.spec.name != "sgd" or id_ not in removed}
        assert table.rows == {**rows, **new.rows}
    assert found.dense[0].values.tobytes() == second.dense[0].values.tobytes()


def test_a_manifest_of_version_3_keeps_its_version_and_bytes() -> None:
    for path in OLD.glob("*/MANIFEST.json"):
        manifest = SnapshotStore(directory_at(OLD)).manifest(path.parent.name)
        assert (manifest.version, manifest.to_json()) == (3, path.read_bytes())


def test_a_delta_of_version_4_may_have_a_base_of_version_3(tmp_path: Path) -> None:
    old = Path(shutil.copytree(OLD, tmp_path / "model"))
    save(old, random_model(3, 7, days=5), 3, kind=DELTA)
    assert [manifest.version for _, manifest in open_chain(directory_at(old))] == [3, 3, 4]
