from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.root import resolve_under


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def test_relative_name_lies_under_the_root(root: Path) -> None:
    assert resolve_under(root, "a/model") == root / "a" / "model"


def test_absolute_path_may_lie_under_the_root(root: Path) -> None:
    assert resolve_under(root, str(root / "model")) == root / "model"


def test_root_itself_is_allowed(root: Path) -> None:
    assert resolve_under(root, ".") == root


def test_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "link").symlink_to("real")
    assert resolve_under(root, "link/model") == root / "real" / "model"


def test_relative_root_is_that_of_the_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert resolve_under(Path(), "model") == root / "model"


@pytest.mark.parametrize("dirname", ["..", "a/../../x", "a/..", "/root/../etc"])
def test_two_dots_are_refused(root: Path, dirname: str) -> None:
    with pytest.raises(SnapshotError, match=r"contains '\.\.'"):
        resolve_under(root, dirname)


@pytest.mark.parametrize("dirname", ["/", "/etc", "/tmp"])
def test_absolute_path_elsewhere_is_refused(root: Path, dirname: str) -> None:
    with pytest.raises(SnapshotError, match="should lie under"):
        resolve_under(root, dirname)


def test_neighbour_whose_name_begins_alike_is_refused(root: Path) -> None:
    with pytest.raises(SnapshotError, match="should lie under"):
        resolve_under(root, f"{root}2")


@pytest.mark.parametrize("dirname", ["out", "out/model"])
def test_link_out_of_the_root_is_refused(root: Path, tmp_path: Path, dirname: str) -> None:
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(SnapshotError, match="should lie under"):
        resolve_under(root, dirname)


@pytest.mark.parametrize("dirname", ["", "a\0b"])
def test_no_name_is_refused(root: Path, dirname: str) -> None:
    with pytest.raises(SnapshotError, match="should be a name"):
        resolve_under(root, dirname)


def test_link_to_itself_is_refused(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    with pytest.raises(SnapshotError, match="cannot be resolved"):
        resolve_under(root, "loop/model")
