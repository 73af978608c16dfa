"""docs/log.md says what the code does: its kinds, offsets and example are read here."""

from __future__ import annotations

import re
from pathlib import Path

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.pserver.engine.progress import NO_PROGRESS
from fleet_sparse.pserver.log.control_state import BarrierOpening
from fleet_sparse.pserver.log.log_format import HEAD_BYTES, HEADER_BYTES, MARK_BYTES, Kind, LogIdentity
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.log.log_writer import LogWriter
from fleet_sparse.pserver.log.shard_log import ShardLog
from fleet_sparse.pserver.tables.mutations import Push
from support.shards import floats, ids_of, make_shard

PAGE = (Path(__file__).parents[3] / "docs" / "log.md").read_text(encoding="utf-8")
SIZES = {"4 bytes": 4, "16 bytes": 16, "u16": 2, "u32": 4, "u64": 8}
TABLE = TableSpec(name="C1", dim=1, rule="sgd", initializer=constant(0.0))


def section(heading: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def example(directory: Path) -> bytes:
    """Writes the log of the page; returns the used part of its segment."""
    writer = LogWriter(directory, LogIdentity(0, 1, 0, 5, 6), generation=1, sync_s=1000.0, segment_bytes=4096)
    shard = make_shard(TABLE)
    mark = Watermark(bytes(range(16)), 1, 9)
    change = Push(TABLE.table_id, ids_of(7, -1), floats([1.0], [2.0]), 0.5, 3)
    log = ShardLog(writer, shard.tables)
    log.commit([mark], [change], NO_PROGRESS, [], {})
    log.void()
    writer.sync()
    log.note(BarrierOpening("b", {0: 3, 1: 2}, contributions=((b"\x01\x02",), ())))
    writer.close()
    reader = LogReader(directory)
    list(reader.records())
    return reader.paths[0].read_bytes()[: reader.end]


def dumped() -> list[tuple[int, bytes]]:
    (text,) = re.findall(r"```segment\n(.*?)```", section("A worked example"), re.DOTALL)
    return [(int(line[:4], 16), bytes.fromhex(line[6:53])) for line in text.splitlines()]


def test_the_segment_is_what_the_writer_makes_of_it(tmp_path: Path) -> None:
    lines = dumped()
    assert b"".join(data for _, data in lines) == example(tmp_path)
    at = 0
    for offset, data in lines:
        assert offset == at
        at += len(data)


def test_fields_follow_one_another() -> None:
    lengths = []
    for heading in ("Segment header", "Record"):
        end = 0
        for offset, kind in re.findall(r"^\| (\d+) \| ([^|]+) \|", section(heading), re.MULTILINE):
            if int(offset) == 0 and end:
                lengths.append(end)
                end = 0
            assert int(offset) == end
            end += SIZES[kind]
        lengths.append(end)
    assert lengths == [HEADER_BYTES, HEAD_BYTES, MARK_BYTES]


def test_kinds_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", section("Kinds"), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(int(kind), kind.name) for kind in Kind]
