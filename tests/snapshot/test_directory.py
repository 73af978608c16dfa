from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot import directory as snapshot_directory
from fleet_sparse.snapshot.directory import Directory, LocalDirectory, RemoteDirectory, directory_at, read

DIGITS = b"0123456789"

# What holds of every directory


def local(tmp_path: Path) -> Directory:
    return directory_at(tmp_path / "model")


def memory(tmp_path: Path) -> Directory:
    return directory_at(f"memory://{tmp_path}/model")


def behind_fsspec(tmp_path: Path) -> Directory:
    return RemoteDirectory(fsspec.filesystem("file"), str(tmp_path / "model"))


@pytest.fixture(params=[local, memory, behind_fsspec])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Directory]:
    made: Directory = request.param(tmp_path)
    made.make()
    yield made
    fsspec.filesystem("memory").store.clear()


def test_buffer_may_be_reused_after_a_write(directory: Directory) -> None:
    buffer = bytearray(b"before")
    file = directory.create("a")
    file.write(memoryview(buffer))
    buffer[:] = b"after!"
    file.write(b"0123")
    file.finish()
    assert read(directory, "a", 10) == b"before0123"


def test_any_bytes_of_a_file_are_read(directory: Directory) -> None:
    directory.put("a", DIGITS)
    buffer = bytearray(4)
    with closing(directory.open("a")) as file:
        file.read_into(3, memoryview(buffer))
        assert (file.size, file.name) == (directory.size_of("a"), f"{directory}/a")
    assert buffer == b"3456"


def test_file_that_ends_early_is_corrupt(directory: Directory) -> None:
    directory.put("a", DIGITS)
    with closing(directory.open("a")) as file, pytest.raises(SnapshotCorrupt) as caught:
        file.read_into(8, memoryview(bytearray(4)))
    assert (caught.value.path, caught.value.offset) == (f"{directory}/a", 10)


def test_file_that_is_larger_than_may_be_is_not_read(directory: Directory) -> None:
    directory.put("a", DIGITS)
    with pytest.raises(SnapshotCorrupt):
        read(directory, "a", 9)


def test_name_that_is_taken_is_refused(directory: Directory) -> None:
    directory.put("a", DIGITS)
    with pytest.raises(SnapshotError):
        directory.create("a")
    with pytest.raises(SnapshotError):
        directory.put("a", b"other")
    assert read(directory, "a", 10) == b"0123456789"


def test_names_are_those_of_files_and_directories_in_order(directory: Directory) -> None:
    directory.put("b", DIGITS)
    directory.child("c").make()
    directory.child("c").put("inside", DIGITS)
    directory.put("a", DIGITS)
    assert directory.names() == ["a", "b", "c"]


def test_directory_that_is_not_there_has_no_names(directory: Directory) -> None:
    assert directory.child("none").names() == []


def test_directory_is_made_with_those_it_is_in(directory: Directory) -> None:
    inner = directory.child("x").child("y")
    inner.make()
    inner.put("a", DIGITS)
    inner.make()
    assert directory.child("x").names() == ["y"]


def test_parent_of_a_child_is_the_directory(directory: Directory) -> None:
    child = directory.child("x")
    assert (str(child), child.name, str(child.parent())) == (f"{directory}/x", "x", str(directory))


def test_directory_is_found_again_by_its_text(directory: Directory) -> None:
    directory.put("a", DIGITS)
    assert directory_at(str(directory)).names() == ["a"]


@pytest.mark.parametrize("name", ["x", "missing"])
def test_directory_or_nothing_is_no_file(directory: Directory, name: str) -> None:
    directory.child("x").make()
    directory.child("x").put("a", DIGITS)
    for method in (directory.size_of, directory.open):
        with pytest.raises(SnapshotError):
            method(name)


def test_abandoned_file_is_not_there(directory: Directory) -> None:
    file = directory.create("a")
    file.write(b"0123456789")
    file.finish()
    for _ in range(2):
        file.abandon()
    assert directory.names() == []


def test_directory_is_removed_with_its_files(directory: Directory) -> None:
    child = directory.child("x")
    child.make()
    child.put("a", DIGITS)
    child.put("MANIFEST.json", DIGITS)
    directory.put("b", DIGITS)
    for name in ("x", "missing"):
        directory.remove_child(name)
    assert (directory.names(), child.names()) == (["b"], [])


def test_manifest_is_removed_first(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    child = directory.child("x")
    child.make()
    for name in ("A", "MANIFEST.json", "z"):
        child.put(name, DIGITS)
    real, removed = os.unlink, []

    def refuse_the_second(path: Any, **arguments: Any) -> None:
        if removed:
            raise OSError(errno.EIO, "Input/output error")
        removed.append(path)
        real(path, **arguments)

    file_system = getattr(directory, "_file_system", None)
    if file_system is None:
        monkeypatch.setattr(os, "unlink", refuse_the_second)
    else:
        real = file_system.rm_file
        monkeypatch.setattr(type(file_system), "rm_file", lambda self, path: refuse_the_second(path))
    with pytest.raises(SnapshotError):
        directory.remove_child("x")
    assert child.names() == ["A", "z"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_name_that_leads_elsewhere_is_refused(directory: Directory, name: str) -> None:
    for method in (
        directory.child,
        directory.create,
        directory.open,
        directory.size_of,
        directory.remove_child,
        lambda name: directory.rename_child("x", name),
    ):
        with pytest.raises(SnapshotError):
            method(name)
    assert directory.names() == []


def test_name_is_no_pattern(directory: Directory) -> None:
    for name in ("x[1]", "x1", "*"):
        directory.child(name).make()
        directory.child(name).put("a*", DIGITS)
    directory.remove_child("x[1]")
    directory.remove_child("*")
    assert directory.names() == ["x1"]


# On this machine


@pytest.fixture
def here(tmp_path: Path) -> LocalDirectory:
    return LocalDirectory(tmp_path)


def test_directory_gets_another_name(here: LocalDirectory) -> None:
    here.child("x").make()
    here.child("x").put("a", DIGITS)
    here.rename_child("x", "y")
    assert (here.names(), here.child("y").names()) == (["y"], ["a"])


@pytest.mark.parametrize("kind", ["empty directory", "directory", "file", "link"])
def test_name_that_is_taken_is_not_given_to_a_directory(here: LocalDirectory, tmp_path: Path, kind: str) -> None:
    here.child("x").make()
    if "directory" in kind:
        here.child("y").make()
    if kind == "directory":
        here.child("y").put("a", DIGITS)
    elif kind == "file":
        here.put("y", DIGITS)
    elif kind == "link":
        (tmp_path / "y").symlink_to("nowhere")
    with pytest.raises(SnapshotError):
        here.rename_child("x", "y")
    assert here.names() == ["x", "y"]


def test_directory_behind_a_link_is_refused(here: LocalDirectory, tmp_path: Path) -> None:
    here.child("real").make()
    here.child("real").put("a", DIGITS)
    (tmp_path / "link").symlink_to("real")
    link = here.child("link")
    for use in (link.names, link.sync, lambda: link.open("a"), lambda: link.create("b"), lambda: link.size_of("a")):
        with pytest.raises(SnapshotError):
            use()
    with pytest.raises(SnapshotError):
        here.remove_child("link")
    assert here.child("real").names() == ["a"]


def test_file_behind_a_link_is_refused(here: LocalDirectory, tmp_path: Path) -> None:
    here.put("a", DIGITS)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "dangling").symlink_to("victim")
    for method in (here.open, here.size_of, here.create):
        for name in ("link", "dangling"):
            with pytest.raises(SnapshotError):
                method(name)
    assert not (tmp_path / "victim").exists()


def test_nobody_waits_for_a_named_pipe(here: LocalDirectory, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotError):
        here.open("pipe")


def test_links_of_the_path_that_a_user_gives_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert str(directory_at(tmp_path / "link" / "model")) == str(tmp_path / "real" / "model")


def test_url_of_a_file_is_a_path(tmp_path: Path) -> None:
    assert isinstance(directory_at(f"file://{tmp_path}"), LocalDirectory)
    assert str(directory_at(f"file://{tmp_path}")) == str(tmp_path)


def test_path_through_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SnapshotError):
        directory_at(tmp_path / "loop" / "model")


@pytest.mark.guarantee("F3")
def test_file_is_durable_once_it_is_finished(here: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = here.create("a")
    monkeypatch.setattr(os, "fsync", _refuse(errno.EIO))
    with pytest.raises(SnapshotError):
        file.finish()
    file.abandon()
    assert here.names() == []


def test_names_are_durable_once_they_are_synced(here: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _refuse(errno.EIO))
    for change in (here.sync, lambda: here.child("x").make(), lambda: here.rename_child("x", "y")):
        with pytest.raises(SnapshotError):
            change()


def test_file_that_cannot_be_removed_is_logged(
    here: LocalDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = here.create("a")
    monkeypatch.setattr(os, "unlink", _refuse(errno.EACCES))
    with caplog.at_level(logging.WARNING):
        file.abandon()
    assert f"cannot remove {here}/a" in caplog.text


def _refuse(number: int) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


# Behind a URL


def test_directory_of_an_object_store_renames_nothing() -> None:
    there = directory_at("memory://model")
    assert not there.renames
    with pytest.raises(SnapshotError):
        there.rename_child("x", "y")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SnapshotError):
        directory_at("s3://bucket/model")


def test_kind_of_url_that_nothing_is_installed_for_is_refused() -> None:
    with pytest.raises(SnapshotError):
        directory_at("nosuch://bucket")


class Broken:
    """A file system of which only some methods work."""

    protocol = "broken"

    def __init__(self, **methods: Any) -> None:
        vars(self).update(invalidate_cache=lambda path: None, **methods)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(f"no {name} today")

    def unstrip_protocol(self, path: str) -> str:
        return f"broken://{path}"


def test_errors_of_a_file_system_are_snapshot_errors() -> None:
    there = RemoteDirectory(Broken(), "model")
    file_system = Broken(
        exists=lambda path: False,
        open=lambda path, mode: Broken(),
        info=lambda path: {"type": "file", "size": 4},
    )
    output = RemoteDirectory(file_system, "model").create("a")
    source = RemoteDirectory(file_system, "model").open("a")
    for use in (
        there.names,
        there.make,
        lambda: there.create("a"),
        lambda: there.open("a"),
        lambda: there.size_of("a"),
        lambda: there.remove_child("x"),
        lambda: source.read_into(0, memoryview(bytearray(4))),
        lambda: output.write(b"0"),
        output.finish,
    ):
        with pytest.raises(SnapshotError):
            use()
    output.abandon()


# Writing ahead


def test_disk_begins_with_8_mb_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(snapshot_directory, "_sync_file_range", lambda _, begin, size, __: ranges.append((begin, size)))
    directory = local(tmp_path)
    directory.make()
    file = directory.create("a")
    for _ in range(20):
        file.write(bytes(1 << 20))
    file.finish()
    assert ranges == [(0, 8 << 20), (8 << 20, 8 << 20)]


def test_page_cache_forgets_what_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[tuple[int, int]] = []
    real = os.posix_fadvise

    def advise(descriptor: int, begin: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        forgotten.append((begin >> 20, (begin + size) >> 20))
        real(descriptor, begin, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    content = os.urandom(1 << 20)
    directory = local(tmp_path)
    directory.make()
    file = directory.create("a")
    for _ in range(129):
        file.write(content)
    file.finish()
    assert forgotten[0] == (0, 8)
    assert forgotten[-1] == (24, 88)  # the last 32 MB before the bytes that were begun stay
    assert read(directory, "a", 129 << 20) == content * 129


@pytest.mark.parametrize(("size", "is_forgotten"), [(1 << 20, True), (1000, False)])
def test_page_cache_forgets_large_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_forgotten: bool
) -> None:
    forgotten: list[range] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, __: forgotten.append(range(begin, begin + size)))
    content = os.urandom(2 << 20)
    directory = local(tmp_path)
    directory.make()
    directory.put("a", content)
    buffer = bytearray(size)
    with closing(directory.open("a")) as file:
        file.read_into(5000, memoryview(buffer))
    assert buffer == content[5000 : 5000 + size]
    assert forgotten == ([range(4096, 5000 + size)] if is_forgotten else [])


def test_file_system_that_takes_no_advice_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fadvise", _refuse(errno.EINVAL))
    directory = local(tmp_path)
    directory.make()
    file = directory.create("a")
    for _ in range(49):
        file.write(bytes(1 << 20))
    file.finish()
    assert read(directory, "a", 49 << 20) == bytes(49 << 20)


def test_system_without_sync_file_range_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_directory, "_sync_file_range", None)
    directory = local(tmp_path)
    directory.make()
    directory.put("a", bytes(9 << 20))
    assert directory.size_of("a") == 9 << 20
