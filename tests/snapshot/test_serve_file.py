"""SERVE.json against the page that defines it, and damaged."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from fleet_sparse.core.version import Version
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.checked_json import decode_checked, encode_checked
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.serve_file import NAME, ServeFile, read_serve_file, write_serve_file

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
SECTION = PAGE.split("\n### SERVE.json\n", 1)[1].split("\n### ", 1)[0]
(EXAMPLE,) = re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)
BEFORE, AFTER = Version(5, 0x0123456789ABCDEF), Version(7, 0xFEDCBA9876543210)


def content() -> ServeFile:
    empty = ServeFile()
    promoted = empty.changed("promote", BEFORE, None, changed_at="2026-03-01T10:00:00+00:00")
    return promoted.changed("promote", AFTER, BEFORE, changed_at="2026-03-01T10:15:00+00:00")


def test_the_example_of_the_page_is_what_is_written() -> None:
    assert encode_checked(content()).decode() == EXAMPLE


def test_the_table_of_the_page_has_every_field() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)) == sorted(json.loads(EXAMPLE))


def test_versions_are_read_from_the_example() -> None:
    read = decode_checked(EXAMPLE.encode(), ServeFile, NAME)
    assert (read.pinned, read.way_back, read.sequence) == (AFTER, BEFORE, 2)


@pytest.mark.parametrize("where", ["{}", "memory://{}"])
def test_a_file_replaces_the_one_before(tmp_path: Path, where: str) -> None:
    series = directory_at(where.format(tmp_path))
    series.make()
    assert read_serve_file(series) == ServeFile()
    write_serve_file(series, ServeFile().changed("unpin", None, None, changed_at=""))
    write_serve_file(series, content())
    assert read_serve_file(series) == content()
    fsspec.filesystem("memory").store.clear()


def test_two_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    series, contents = directory_at(tmp_path), [content(), ServeFile(sequence=1)]
    write_serve_file(series, contents[0])

    def write(mine: ServeFile) -> None:
        for _ in range(100):
            write_serve_file(series, mine)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, each) for each in contents]
        while not all(each.done() for each in writers):
            assert read_serve_file(series) in contents
        for each in writers:
            each.result()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    good, series = EXAMPLE.encode(), directory_at(tmp_path)
    for at in [at for at, byte in enumerate(EXAMPLE) if not byte.isspace()]:
        (tmp_path / NAME).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(SnapshotCorrupt) as raised:
            read_serve_file(series)
        assert raised.value.path == str(tmp_path / NAME)


@pytest.mark.parametrize("damage", [b"", b"{}", EXAMPLE.encode()[:-20], b" " * (65 << 10)])
def test_a_torn_or_large_file_is_corrupt(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / NAME).write_bytes(damage)
    with pytest.raises(SnapshotCorrupt):
        read_serve_file(directory_at(tmp_path))


def test_another_version_of_the_file_is_refused(tmp_path: Path) -> None:
    newer = ServeFile(version=2)
    (tmp_path / NAME).write_bytes(encode_checked(newer))
    with pytest.raises(SnapshotError, match="its version is 2, this build reads 1"):
        read_serve_file(directory_at(tmp_path))
