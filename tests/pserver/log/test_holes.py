from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.pserver.log.holes import is_zero

FAR = 1 << 33
"""More than could be read in the time of a test."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of which only the ends were written: `begin`, a hole and `end`."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"begin")
        file.seek(FAR)
        file.write(b"end")
    return path


def test_a_hole_is_zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(FAR)
    assert is_zero(path, len(b"begin"))


def test_what_comes_before_the_offset_does_not_count(path: Path) -> None:
    assert not is_zero(path, len(b"begin") - 1)


def test_a_byte_behind_a_hole_counts(path: Path) -> None:
    assert not is_zero(path, len(b"begin"))


def test_zeros_that_were_written_are_zero(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    assert is_zero(tmp_path / "file", 1)


def test_nothing_behind_the_end_is_zero(path: Path) -> None:
    assert is_zero(path, FAR + len(b"end"))
