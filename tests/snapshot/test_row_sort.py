from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.columns import columns_of
from fleet_sparse.core.ids import NUM_BUCKETS, bucket_of, hash_ids
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot import row_sort
from fleet_sparse.snapshot.row_merge import DuplicateId
from fleet_sparse.snapshot.row_sort import SortedRows
from fleet_sparse.snapshot.rows import Rows, joined

SPEC = TableSpec(name="emb", dim=2, rule="adam", initializer=constant(0.0))
COLUMNS = columns_of(SPEC, 1)


def rows_of(ids: list[int]) -> Rows:
    """Rows whose values tell their id."""
    array = np.array(ids, np.int64)
    rows = np.stack([array % 1000, array % 7], axis=1).astype(np.float32)
    states = np.stack([rows + 1, rows + 2], axis=1)
    return Rows.of(array, rows, states, last_update_day=(array % 65536).astype(np.uint16))


def ids_in_order(ids: list[int]) -> NDArray[np.int64]:
    array = np.array(ids, np.int64)
    return array[np.argsort(hash_ids(array, SPEC.salt))]


@given(ids=st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1), run_rows=st.integers(1, 9), size=st.integers(1, 9))
def test_rows_come_in_the_order_of_their_hash(ids: set[int], run_rows: int, size: int) -> None:
    order = list(ids)
    with pytest.MonkeyPatch.context() as patch, SortedRows(SPEC, COLUMNS) as rows:
        patch.setattr(row_sort, "_RUN_BYTES", run_rows * 34)
        for begin in range(0, len(order), size):
            rows.add(rows_of(order[begin : begin + size]))
        assert rows.num_rows == len(order)
        found = joined(list(rows.rows()))
    expected = rows_of(ids_in_order(order).tolist())
    np.testing.assert_array_equal(found.ids, expected.ids)
    for name, array in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], array)


def test_blocks_of_a_run_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sort, "_BLOCK_BYTES", 340)
    with SortedRows(SPEC, COLUMNS) as rows:
        rows.add(rows_of(list(range(95))))
        assert [len(block.ids) for block in rows.rows()] == [10] * 9 + [5]


def test_only_rows_of_owned_buckets_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sort, "_BLOCK_BYTES", 340)
    ids = list(range(1000))
    owned = np.zeros(NUM_BUCKETS, bool)
    owned[5000:9000] = True
    with SortedRows(SPEC, COLUMNS) as rows:
        rows.add(rows_of(ids))
        found = joined(list(rows.rows(owned)))
    expected = ids_in_order(ids)
    np.testing.assert_array_equal(found.ids, expected[owned[bucket_of(expected, SPEC.salt)]])
    assert 0 < len(found.ids) < 500


@pytest.mark.parametrize("run_bytes", [1, 1 << 20], ids=["two runs", "one run"])
def test_an_id_that_occurs_twice_is_found(monkeypatch: pytest.MonkeyPatch, run_bytes: int) -> None:
    monkeypatch.setattr(row_sort, "_RUN_BYTES", run_bytes)
    with SortedRows(SPEC, COLUMNS) as rows, pytest.raises(DuplicateId, match="4"):
        rows.add(rows_of([1, 4, 2]))
        rows.add(rows_of([9, 4]))
        list(rows.rows())


def test_a_system_without_room_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SnapshotError, match="TMPDIR"):
        SortedRows(SPEC, COLUMNS)


def test_a_disk_that_is_full_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # `SortedRows` closes it
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    with SortedRows(SPEC, COLUMNS) as rows:
        rows.add(rows_of([1, 2]))
        with pytest.raises(SnapshotError, match="No space left on device"):
            list(rows.rows())
