from __future__ import annotations

from pathlib import Path

import pytest

from fleet_sparse.errors import SnapshotError
from fleet_sparse.pserver.admin.root import resolve_under


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def resolved(root: Path | str, dirname: str) -> str:
    return str(resolve_under(str(root), dirname))


def test_relative_name_lies_under_the_root(root: Path) -> None:
    assert resolved(root, "a/model") == f"{root}/a/model"


def test_absolute_path_may_lie_under_the_root(root: Path) -> None:
    assert resolved(root, f"{root}/model") == f"{root}/model"


def test_root_itself_is_allowed(root: Path) -> None:
    assert resolved(root, ".") == resolved(root, str(root)) == str(root)


def test_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "link").symlink_to("real")
    assert resolved(root, "link/model") == f"{root}/real/model"


def test_link_that_the_root_is_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("root")
    assert resolved(tmp_path / "link", "model") == f"{root}/model"
    assert resolved(tmp_path / "link", f"{tmp_path}/link/model") == f"{root}/model"


def test_relative_root_is_that_of_the_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert resolved(".", "model") == resolved("", "model") == f"{root}/model"


def test_root_may_be_the_url_of_a_path(root: Path) -> None:
    assert resolved(f"file://{root}", "model") == f"{root}/model"
    assert resolved(root, f"file://{root}/model") == f"{root}/model"


NOT_UNDER_A_PATH = [
    *("..", "a/../../x", "a/..", "/root/../etc"),
    *("/", "/etc", "/tmp", "{root}2", "s3://bucket/model"),
    *("out", "out/model", "loop/model"),
    *("", "a\0b", "x" * 300, "x/" * 3000),
]


@pytest.mark.parametrize("dirname", NOT_UNDER_A_PATH)
def test_directory_outside_of_the_root_is_refused(root: Path, tmp_path: Path, dirname: str) -> None:
    (root / "out").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    with pytest.raises(SnapshotError):
        resolved(root, dirname.format(root=root))


# A root behind a URL

URL = "memory://bucket/job"


@pytest.mark.parametrize("root", [URL, f"{URL}/"])
def test_relative_name_lies_under_the_url(root: str) -> None:
    assert resolved(root, "a/model") == resolved(root, "./a//model/") == resolved(f"{URL}/a", "model")


@pytest.mark.parametrize("dirname", [".", URL, f"{URL}/"])
def test_url_of_the_root_itself_is_allowed(dirname: str) -> None:
    assert resolved(URL, dirname) == resolved("memory://bucket", "job")


def test_url_may_lie_under_the_root() -> None:
    assert resolved(URL, f"{URL}/a/model") == resolved(URL, "a/model")


@pytest.mark.parametrize("root", [URL, f"{URL}/", "memory://"])
def test_a_directory_may_be_named_as_it_names_itself(root: str) -> None:
    assert resolved(root, resolved(root, "a/model")) == resolved(root, "a/model")


def test_root_may_be_a_whole_file_system() -> None:
    assert resolved("memory://", "memory://a/model") == resolved("memory://", "a/model")


def test_name_has_no_meaning_but_a_name() -> None:
    where = resolve_under(URL, "simplecache::file:/etc")
    assert (where.name, where.parent().name) == ("etc", "simplecache::file:")


@pytest.mark.parametrize(
    "dirname",
    [
        *(
            f"{URL}2",
            f"{resolved(URL, '.')}2",
            "memory://bucket",
            "memory://other/job/model",
            "s3://bucket/job",
            "/job",
        ),
        *("..", "a/../../x", f"{URL}/../x"),
    ],
)
def test_directory_outside_of_the_url_is_refused(dirname: str) -> None:
    with pytest.raises(SnapshotError):
        resolved(URL, dirname)
