"""Segments and records: what is read is what was written, or a prefix of it, or it is refused."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from fleet_sparse.errors import LeaseLost, LogCorrupt, LogFailed, LogFull
from fleet_sparse.pserver.log.log_directory import locked
from fleet_sparse.pserver.log.log_format import (
    HEADER_BYTES,
    VERSION,
    Kind,
    LogIdentity,
    SegmentHeader,
    next_segment_name,
    segment_name,
)
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.log.segment_ahead import SegmentAhead
from support.logs import IDENTITY, small_writer
from support.waits import wait_until


def bodies(directory: Path, first_lsn: int | None = None) -> list[bytes]:
    return [record.body for record in LogReader(directory, first_lsn).records()]


def append(writer: LogWriter, *texts: bytes) -> None:
    for text in texts:
        writer.append(Kind.TABLE, body_bytes=len(text), parts=[text, bytes(-len(text) % 8)])


def write(directory: Path, texts: list[bytes], **changes: Any) -> None:
    writer = small_writer(directory, **changes)
    append(writer, *texts)
    writer.close()


TEXTS = [b"%d " % number * (number % 7) for number in range(24)]


def used(directory: Path) -> None:
    """Cuts the zeros at the ends of the segments off."""
    reader = LogReader(directory)
    list(reader.records())
    reader.cut_off()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A log of three segments, without zeros at the end."""
    directory = tmp_path / "small"
    write(directory, TEXTS, segment_bytes=900)
    used(directory)
    assert len(LogReader(directory).paths) > 2
    return directory


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    assert bodies(tmp_path) == TEXTS


def test_a_record_may_be_larger_than_a_segment(tmp_path: Path) -> None:
    texts = [b"x", b"y" * 10_000, b"z"]
    write(tmp_path, texts, segment_bytes=512)
    assert bodies(tmp_path) == texts


@pytest.mark.guarantee("W4")
def test_every_cut_of_the_last_segment_leaves_a_prefix(small: Path) -> None:
    last = LogReader(small).paths[-1]
    content, before = last.read_bytes(), bodies(small)
    found, refused = set(), []
    for length in range(len(content)):
        last.write_bytes(content[:length])
        try:
            read = bodies(small)
        except LogCorrupt:
            refused.append(length)
            continue
        assert read == before[: len(read)]
        found.add(len(read))
    assert len(found) > 3
    assert refused == [*range(HEADER_BYTES)]


def test_every_cut_of_another_segment_is_refused(small: Path) -> None:
    first = LogReader(small).paths[0]
    content, num_refused = first.read_bytes(), 0
    for length in range(len(content)):
        first.write_bytes(content[:length])
        try:
            assert bodies(small) == TEXTS
            assert not any(content[length:])
        except LogCorrupt:
            num_refused += 1
    assert num_refused > len(content) // 2


def flip(small: Path, num_flips: int) -> None:
    paths, before = LogReader(small).paths, bodies(small)
    contents = [path.read_bytes() for path in paths]
    generator = random.Random(7)
    num_refused = 0
    for _ in range(num_flips):
        number = generator.randrange(len(paths))
        changed = bytearray(contents[number])
        bit = generator.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        paths[number].write_bytes(changed)
        try:
            read = bodies(small)
            assert read == before[: len(read)]
            assert number == len(paths) - 1
            assert len(read) < len(before)
        except LogCorrupt:
            num_refused += 1
        paths[number].write_bytes(contents[number])
    assert num_refused > num_flips / 2


@pytest.mark.guarantee("W4")
def test_a_flipped_bit_leaves_a_prefix_or_is_refused(small: Path) -> None:
    flip(small, 1000)


@pytest.mark.slow
def test_ten_thousand_flipped_bits_leave_a_prefix(small: Path) -> None:
    flip(small, 10_000)


def test_a_torn_end_is_reported_and_can_be_cut_off(small: Path) -> None:
    last = LogReader(small).paths[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-8])
    reader = LogReader(small)
    num_read = len(list(reader.records()))
    assert reader.torn is not None
    assert (reader.torn.path, reader.torn.offset + reader.torn.num_bytes) == (last, len(content) - 8)
    reader.cut_off()
    lsn, checksum = reader.newest_lsn, reader.newest_checksum
    write(small, [b"behind"], newest_lsn=lsn, newest_checksum=checksum)
    assert bodies(small) == [*TEXTS[:num_read], b"behind"]


def record_of(directory: Path, text: bytes) -> tuple[Path, int]:
    """Returns the segment with a record, and the offset of its body."""
    for path in LogReader(directory).paths:
        if (offset := path.read_bytes().find(text)) >= 0:
            return path, offset
    raise AssertionError(f"{text!r} is in no record")


def make_hole(directory: Path, text: bytes) -> None:
    """Makes zeros of the body of a record."""
    path, offset = record_of(directory, text)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(len(text)))


def write_four_records(directory: Path, synced: int) -> LogWriter:
    """Appends the records one to four, and syncs before the one with the index `synced`."""
    writer = small_writer(directory)
    for number, text in enumerate([b"one", b"two", b"three", b"four"]):
        if number == synced:
            writer.sync()
        append(writer, text)
    return writer


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("synced", [0, 1])
def test_a_hole_in_what_was_not_synced_is_a_torn_end(tmp_path: Path, synced: int) -> None:
    durable_lsn = write_four_records(tmp_path, synced).durable_lsn
    make_hole(tmp_path, b"two")
    reader = LogReader(tmp_path)
    assert [record.body for record in reader.records()] == [b"one"]
    assert reader.newest_lsn == 1 >= durable_lsn
    assert reader.torn is not None
    reader.cut_off()
    assert bodies(tmp_path) == [b"one"]


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("synced", [2, 3])
def test_a_hole_in_what_a_record_behind_calls_durable_is_refused(tmp_path: Path, synced: int) -> None:
    write_four_records(tmp_path, synced)
    make_hole(tmp_path, b"two")
    with pytest.raises(LogCorrupt):
        bodies(tmp_path)


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("text", [b"one", b"two"])
def test_a_hole_in_a_segment_that_another_follows_is_refused(tmp_path: Path, text: bytes) -> None:
    writer = small_writer(tmp_path)
    append(writer, b"one", b"two")
    writer.begin_segment()
    make_hole(tmp_path, text)
    with pytest.raises(LogCorrupt):
        bodies(tmp_path)


def test_zeros_in_the_place_of_durable_records_are_refused(tmp_path: Path) -> None:
    writer = small_writer(tmp_path)
    append(writer, b"one")
    writer.begin_segment()
    first = LogReader(tmp_path).paths[0]
    first.write_bytes(first.read_bytes()[:HEADER_BYTES].ljust(4096, b"\0"))
    with pytest.raises(LogCorrupt):
        bodies(tmp_path)


def test_a_missing_segment_is_refused(small: Path) -> None:
    LogReader(small).paths[1].unlink()
    with pytest.raises(LogCorrupt):
        bodies(small)


def test_a_log_is_read_from_the_segment_of_a_checkpoint(small: Path) -> None:
    second = int(LogReader(small).paths[1].stem)
    assert bodies(small, second) == TEXTS[second - 1 :]
    LogReader(small).paths[0].unlink()
    assert bodies(small, second) == TEXTS[second - 1 :]
    with pytest.raises(LogCorrupt):
        bodies(small, 1)


def test_a_segment_of_another_log_is_refused(small: Path, tmp_path: Path) -> None:
    path = LogReader(small).paths[-1]
    other = tmp_path / "other"
    write(other, [b"x"], newest_lsn=int(path.stem) - 1)
    shutil.copy(LogReader(other).paths[0], path)
    with pytest.raises(LogCorrupt):
        bodies(small)
    writer = small_writer(tmp_path / "third", newest_lsn=0)
    writer.close()
    assert LogReader(tmp_path / "third").identity == IDENTITY == LogIdentity(0, 1, 0, 77, 99)


@pytest.mark.guarantee("W11")
def test_a_writer_cannot_continue_a_log_of_a_later_one(tmp_path: Path) -> None:
    former = small_writer(tmp_path, generation=1)
    append(former, b"one")
    reader = LogReader(tmp_path)
    assert len(list(reader.records())) == 1
    later = small_writer(tmp_path, generation=2, newest_lsn=reader.newest_lsn, newest_checksum=reader.newest_checksum)
    append(former, b"not acked")  # it does not know that it has lost its lease
    append(later, b"two")
    with pytest.raises(LeaseLost):
        former.begin_segment()
    with pytest.raises(LeaseLost), former.exclusive():
        pass
    former.close()
    append(later, b"three")
    later.begin_segment()
    append(later, b"four")
    later.close()
    assert bodies(tmp_path) == [b"one", b"two", b"three", b"four"]


@pytest.mark.guarantee("W11")
def test_a_writer_says_that_it_has_lost_its_lease(tmp_path: Path) -> None:
    former = small_writer(tmp_path, generation=1)
    lost: list[LeaseLost] = []
    former.on_lease_lost = lost.append
    later = small_writer(tmp_path, generation=2)
    with pytest.raises(LeaseLost) as raised:
        former.begin_segment()
    assert lost == [raised.value]
    for writer in (former, later):
        writer.close()


def test_a_wait_for_the_files_of_a_log_ends_with_the_lease(tmp_path: Path) -> None:
    def check() -> None:
        raise LeaseLost("a reason")

    writer = small_writer(tmp_path)
    writer.check_lease = check
    with locked(tmp_path, check), pytest.raises(LeaseLost, match="a reason"):
        writer.begin_segment()
    writer.begin_segment()
    writer.close()


def test_nothing_follows_once_the_thread_of_a_log_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise MemoryError

    writer = small_writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentAhead, "allocate", refuse)
        writer.request_sync()
        wait_until(lambda: writer.fault is not None)
    with pytest.raises(LogFailed, match="MemoryError"):
        append(writer, b"one")
    writer.close()


def without_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the disk full; returns what makes room again."""

    def refuse(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return monkeypatch.undo


def test_a_full_disk_is_met_a_segment_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small_writer(tmp_path, sync_s=0.01, segment_bytes=512)
    wait_until((tmp_path / next_segment_name(1)).exists)
    wait_until(lambda: (tmp_path / next_segment_name(1)).stat().st_size == 512)
    make_room = without_room(monkeypatch)
    writer.begin_segment()
    wait_until(lambda: writer.full_since is not None)
    assert writer.append(Kind.VOID) == 1
    with pytest.raises(LogFull):
        writer.append(Kind.TABLE, parts=[bytes(512)])
    make_room()
    assert writer.append(Kind.TABLE, parts=[bytes(512)]) == 2
    writer.close()
    assert len(bodies(tmp_path)) == 2


@pytest.mark.parametrize("room_bytes", [1 << 20, 64 << 10])
def test_a_log_continues_on_a_full_disk_in_a_small_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    writer = small_writer(tmp_path, segment_bytes=4 << 20)
    append(writer, b"before")
    writer.close()
    reader = LogReader(tmp_path)
    assert len(list(reader.records())) == 1
    allocate = os.posix_fallocate

    def allocate_little(file: int, offset: int, length: int) -> None:
        if length > room_bytes:
            raise OSError(errno.ENOSPC, "no space")
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate_little)
    changes = {"generation": 2, "newest_lsn": 1, "newest_checksum": reader.newest_checksum}
    later = small_writer(tmp_path, **changes, sync_s=0.01, segment_bytes=4 << 20)
    assert later.full_since is not None
    append(later, b"a registration")
    monkeypatch.undo()
    wait_until(lambda: later.full_since is None)
    append(later, b"a push")
    later.close()
    assert bodies(tmp_path) == [b"before", b"a registration", b"a push"]


def test_a_writer_takes_the_segment_allocated_by_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = small_writer(tmp_path, segment_bytes=4096)
    append(former, b"before")
    wait_until((tmp_path / next_segment_name(1)).exists)
    wait_until(lambda: (tmp_path / next_segment_name(1)).stat().st_size == 4096)
    former.sync()  # and it is killed
    reader = LogReader(tmp_path)
    assert len(list(reader.records())) == 1
    make_room = without_room(monkeypatch)
    changes = {"generation": 2, "newest_lsn": 1, "newest_checksum": reader.newest_checksum}
    later = small_writer(tmp_path, **changes, sync_s=0.01, segment_bytes=4096)
    append(later, b"after")
    wait_until(lambda: later.full_since is not None)
    make_room()
    wait_until(lambda: later.full_since is None)
    later.close()
    assert bodies(tmp_path) == [b"before", b"after"]


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("next_texts", [[], [b"a registration"]])
def test_a_segment_that_lost_its_new_name_counts_for_nothing(tmp_path: Path, next_texts: list[bytes]) -> None:
    former = small_writer(tmp_path)
    append(former, b"durable")
    former.begin_segment()
    append(former, b"1", b"2", b"3")
    for path in tmp_path.glob("next-*"):
        path.unlink()
    (tmp_path / segment_name(2)).rename(tmp_path / next_segment_name(1))
    reader = LogReader(tmp_path)
    assert [record.body for record in reader.records()] == [b"durable"]
    reader.cut_off()
    changes = {"newest_lsn": reader.newest_lsn, "newest_checksum": reader.newest_checksum}
    append(small_writer(tmp_path, generation=2, **changes), *next_texts)
    assert bodies(tmp_path) == [b"durable", *next_texts]


def test_the_segment_ahead_stays_if_a_larger_one_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small_writer(tmp_path, segment_bytes=512)
    ahead = tmp_path / next_segment_name(1)
    wait_until(lambda: ahead.exists() and ahead.stat().st_size == 512)
    make_room = without_room(monkeypatch)
    with pytest.raises(LogFull):
        writer.append(Kind.TABLE, parts=[bytes(1024)])
    assert ahead.stat().st_size == 512
    assert writer.append(Kind.TABLE, parts=[bytes(256)]) == 1
    assert writer.append(Kind.TABLE, parts=[bytes(256)]) == 2  # in the segment ahead
    make_room()
    assert writer.append(Kind.TABLE, parts=[bytes(1024)]) == 3
    writer.close()
    assert len(bodies(tmp_path)) == 3


@contextmanager
def without_files() -> Iterator[None]:
    """Has the system open no file more for this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_name_is_synced_while_no_file_can_be_opened(tmp_path: Path) -> None:
    writer = small_writer(tmp_path)
    writer.begin_segment()
    append(writer, b"one")
    with without_files():
        writer.sync()
    assert writer.durable_lsn == 1
    writer.close()


def test_a_segment_grows_while_no_file_can_be_opened(tmp_path: Path) -> None:
    writer = small_writer(tmp_path, segment_bytes=512)
    texts = [bytes([number]) * 200 for number in range(1, 9)]
    with without_files():
        append(writer, *texts[:4])
    assert len(LogReader(tmp_path).paths) == 1
    append(writer, *texts[4:])
    assert len(LogReader(tmp_path).paths) > 1
    writer.close()
    assert bodies(tmp_path) == texts


def test_no_segment_grows_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small_writer(tmp_path, segment_bytes=512)
    make_room = without_room(monkeypatch)
    with without_files(), pytest.raises(LogFull):
        writer.append(Kind.TABLE, parts=[bytes(512)])
    make_room()
    assert writer.append(Kind.TABLE, parts=[bytes(512)]) == 1
    writer.close()


def test_a_segment_that_could_not_begin_is_no_fault(tmp_path: Path) -> None:
    writer = small_writer(tmp_path)
    with without_files(), pytest.raises(OSError, match="Too many open files"):
        writer.begin_segment()
    append(writer, b"one")
    writer.close()
    assert bodies(tmp_path) == [b"one"]


def test_unused_room_of_a_segment_is_given_back(tmp_path: Path) -> None:
    writer = small_writer(tmp_path, segment_bytes=1 << 16)
    append(writer, b"one")
    writer.begin_segment()
    append(writer, b"two")
    first = LogReader(tmp_path).paths[0]
    wait_until(lambda: first.stat().st_size < 1024)
    writer.close()
    assert bodies(tmp_path) == [b"one", b"two"]


def test_a_segment_is_synced_before_it_ends(tmp_path: Path) -> None:
    writer = small_writer(tmp_path, segment_bytes=4096)
    append(writer, bytes(2048))
    assert writer.durable_lsn == 0
    append(writer, bytes(1600))
    wait_until(lambda: writer.durable_lsn == 2)
    writer.close()


def test_the_name_of_a_segment_is_durable_before_its_records_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = small_writer(tmp_path)

    def refuse(file: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    writer.begin_segment()  # it syncs no directory itself
    append(writer, b"one")
    with pytest.raises(LogFailed):
        writer.sync()
    assert writer.durable_lsn == 0
    monkeypatch.undo()
    writer.close()
    assert bodies(tmp_path) == []


def test_log_of_an_older_version_is_refused(tmp_path: Path) -> None:
    head = bytearray(SegmentHeader(IDENTITY, 1, 1, 0).to_bytes())
    head[4:6] = (VERSION - 1).to_bytes(2, "little")
    head[-8:] = bytes(8)
    head[-8:] = xxh3_64_intdigest(bytes(head)).to_bytes(8, "little")
    (tmp_path / "00000000000000000001.fsl").write_bytes(head)
    with pytest.raises(LogCorrupt, match=rf"version {VERSION - 1} .* {VERSION}"):
        LogReader(tmp_path)
