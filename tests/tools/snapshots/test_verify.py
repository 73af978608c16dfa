from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import DELTA
from fleet_sparse.tools.snapshots.verify import SnapshotReport, Verification
from support.snapshots import (
    SGD,
    random_model,
    save,
)


def reports_of(where: Path) -> list[SnapshotReport]:
    return list(Verification(directory_at(where)).reports())


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """A full snapshot of two shards, and a delta of three."""
    save(tmp_path, random_model(1, 20, days=1), 2)
    save(tmp_path, random_model(2, 5, days=2), 3, kind=DELTA, removed={SGD.name: [1, 2, 3]})
    return tmp_path


def flip(path: Path, at: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def test_every_file_of_every_snapshot_is_reported(series: Path) -> None:
    reports = reports_of(series)
    assert [(report.name, report.is_good) for report in reports] == [("000001-full", True), ("000002-delta", True)]
    names = [Path(file.path).relative_to(series).as_posix() for report in reports for file in report.files]
    assert names == [
        "000001-full/MANIFEST.json",
        "000001-full/shard-0-of-2.fss",
        "000001-full/shard-1-of-2.fss",
        "000002-delta/MANIFEST.json",
        "000002-delta/shard-0-of-3.fss",
        "000002-delta/shard-1-of-3.fss",
        "000002-delta/shard-2-of-3.fss",
    ]


def test_all_bytes_are_told(series: Path) -> None:
    told: list[int] = []
    verification = Verification(directory_at(series), told.append)
    list(verification.reports())
    assert told == sorted(told)
    assert told[-1] == verification.num_bytes == sum(path.stat().st_size for path in series.rglob("*.fss"))


def test_a_flipped_byte_is_found_in_its_file_wherever_it_is(series: Path) -> None:
    path = series / "000002-delta" / "shard-1-of-3.fss"
    for at in range(0, path.stat().st_size, 7):
        flip(path, at)
        bad = [file for report in reports_of(series / "000002-delta") for file in report.files if file.error]
        assert [file.path for file in bad] == [str(path)], at
        assert bad[0].offset is not None
        assert f"at byte {bad[0].offset}" in str(bad[0].error)
        flip(path, at)


def test_the_other_files_are_read_where_one_is_bad_or_missing(series: Path) -> None:
    (series / "000001-full" / "shard-0-of-2.fss").unlink()
    flip(series / "000001-full" / "shard-1-of-2.fss", 64)
    report = reports_of(series)[0]
    assert not report.is_good
    assert [file.error is None for file in report.files] == [True, False, False]
    assert [file.offset for file in report.files] == [None, None, 64]


def test_a_bad_manifest_is_bad(series: Path) -> None:
    path = series / "000001-full" / "MANIFEST.json"
    path.write_text(path.read_text().replace('"num_rows": 40', '"num_rows": 41'))
    full, delta = reports_of(series)
    assert [file.offset for file in full.files] == [0]
    assert "checksum mismatch" in str(full.files[0].error)
    assert "000001-full" in str(delta.error), "it is the base of the delta"


def test_a_gap_in_the_chain_is_bad(series: Path) -> None:
    for path in (series / "000001-full").iterdir():
        path.unlink()
    (report,) = reports_of(series)
    assert all(file.error is None for file in report.files)
    assert "gap" in str(report.error)


# Error paths


def test_a_snapshot_that_did_not_come_to_its_end_is_an_error(series: Path) -> None:
    (series / "000002-delta" / "MANIFEST.json").unlink()
    with pytest.raises(SnapshotError):
        reports_of(series / "000002-delta")
