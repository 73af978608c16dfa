"""The commands that say which version readers serve, on a series of full snapshots and deltas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.serving.versions import Versions
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.serve_file import read_serve_file
from support.snapshots import SGD, Model, TableModel, save

EMPTY = Model((TableModel(SGD, {}),))
KINDS = ("full", "delta", "full", "delta")


@pytest.fixture
def series(tmp_path: Path) -> Path:
    for kind in KINDS:
        save(tmp_path, EMPTY, kind=kind)
    return tmp_path


def versions(series: Path) -> Versions:
    return Versions(directory_at(series))


def shown(series: Path) -> dict[int, str]:
    """For each version what it is: newest, served, pinned, way back."""
    letters = {}
    for each in versions(series).listed():
        flags = {"n": each.is_newest, "s": each.is_served, "p": each.is_pinned, "w": each.is_way_back}
        letters[each.manifest.number] = "".join(letter for letter, holds in flags.items() if holds)
    return letters


Step = Callable[[Versions], object]


def promote(number: int | None) -> Step:
    return lambda versions: versions.promote(number)


def delta(versions: Versions) -> None:
    save(str(versions.directory_of(None).parent()), EMPTY, kind="delta")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], {1: "", 2: "", 3: "w", 4: "ns"}),
        ([promote(2)], {1: "", 2: "sp", 3: "", 4: "nw"}),
        ([promote(None)], {1: "", 2: "", 3: "w", 4: "nsp"}),
        ([promote(2), promote(1)], {1: "sp", 2: "w", 3: "", 4: "n"}),
        ([promote(2), promote(1), promote(1)], {1: "sp", 2: "w", 3: "", 4: "n"}),
        ([promote(2), promote(1), Versions.rollback], {1: "w", 2: "sp", 3: "", 4: "n"}),
        ([promote(2), Versions.rollback], {1: "", 2: "", 3: "w", 4: "nsp"}),
        ([Versions.rollback], {1: "", 2: "w", 3: "sp", 4: "n"}),
        ([Versions.rollback, Versions.rollback, Versions.rollback], {1: "sp", 2: "", 3: "", 4: "n"}),
        ([Versions.pin], {1: "", 2: "", 3: "w", 4: "nsp"}),
        ([Versions.pin, delta], {1: "", 2: "", 3: "w", 4: "sp", 5: "n"}),
        ([lambda versions: versions.pin(2)], {1: "", 2: "sp", 3: "", 4: "nw"}),
        ([promote(2), Versions.pin], {1: "", 2: "sp", 3: "", 4: "nw"}),
        ([promote(2), Versions.unpin], {1: "", 2: "", 3: "w", 4: "ns"}),
        ([promote(2), Versions.unpin, delta], {1: "", 2: "", 3: "", 4: "w", 5: "ns"}),
    ],
)
def test_commands_move_what_is_served(series: Path, steps: list[Step], expected: dict[int, str]) -> None:
    for step in steps:
        step(versions(series))
    assert shown(series) == expected


def test_commands_are_counted_and_return_the_version(series: Path) -> None:
    of = versions(series)
    found = [of.promote(2), of.promote(3), of.rollback(), of.pin(), of.unpin()]
    assert [each.number for each in found] == [2, 3, 2, 2, 4]
    assert found[0] == found[2] == found[3]
    content = read_serve_file(directory_at(series))
    assert (content.sequence, content.command, content.pinned) == (5, "unpin", None)


def test_snapshots_of_some_tables_are_no_versions(series: Path) -> None:
    save(series, EMPTY, is_complete=False)
    assert shown(series)[5] == ""
    with pytest.raises(SnapshotError):
        versions(series).promote(5)
    assert versions(series).promote().number == 4


def test_a_version_before_the_oldest_is_refused(series: Path) -> None:
    versions(series).promote(1)
    versions(series).rollback()
    versions(series).promote(1)
    versions(series).unpin()
    for _ in range(3):
        versions(series).rollback()
    with pytest.raises(SnapshotError, match="snapshot 1 is served"):
        versions(series).rollback()


@pytest.mark.parametrize(
    "command", [Versions.listed, Versions.promote, Versions.pin, Versions.unpin, Versions.rollback]
)
def test_a_directory_without_snapshots_has_no_version(tmp_path: Path, command: Step) -> None:
    with pytest.raises(SnapshotError):
        command(versions(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [9, 0])
def test_an_unknown_version_changes_nothing(series: Path, number: int) -> None:
    versions(series).promote(2)
    with pytest.raises(SnapshotError, match=f"snapshot {number} does not exist"):
        versions(series).promote(number)
    assert shown(series)[2] == "sp"


def test_a_way_back_that_was_removed_is_the_next_older_one(series: Path) -> None:
    versions(series).promote(4)
    versions(series).promote(3)
    (series / "000004-delta" / "MANIFEST.json").unlink()
    assert shown(series) == {1: "", 2: "w", 3: "nsp"}


def missing(file: Path) -> None:
    file.unlink()


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [missing, torn])
def test_a_damaged_version_is_not_promoted(series: Path, damage: Callable[[Path], None]) -> None:
    damage(series / "000003-full" / "shard-0-of-1.fss")
    for step in (promote(3), promote(4), Versions.pin, Versions.rollback):
        with pytest.raises(SnapshotError):
            step(versions(series))
    assert not (series / "SERVE.json").exists()
    versions(series).promote(2)


def test_commands_do_not_replace_a_damaged_file(series: Path) -> None:
    (series / "SERVE.json").write_bytes(b"{}")
    for step in (Versions.listed, promote(2), Versions.pin, Versions.unpin, Versions.rollback):
        with pytest.raises(SnapshotCorrupt):
            step(versions(series))
    assert (series / "SERVE.json").read_bytes() == b"{}"
