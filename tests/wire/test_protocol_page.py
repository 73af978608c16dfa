"""docs/protocol.md against the code: its tables and examples are read here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.net import streams
from fleet_sparse.settings import Settings
from fleet_sparse.wire import control
from fleet_sparse.wire.control import CONTROL_VERSION
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOCKS,
    MAX_DIM,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    PROTOCOL_VERSION,
    Action,
    Column,
    Frame,
    Op,
)
from fleet_sparse.wire.row_dtype import RowDtype, from_frame
from fleet_sparse.wire.stream import MAGIC as STREAM_MAGIC
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.requests import Requests
from fleet_sparse.worker.rows.deduplicator import UniqueIds
from fleet_sparse.worker.rows.row_exchange import RowChange

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f64": 8, "4 bytes": 4, "16 bytes": 16}
SCHEMA_HASH = 0x1122334455667788
EXAMPLES = ["pull", "rows", "rows_bfloat16", "push", "push_counts", "push_dense_bfloat16", "ack", "push_dense_part"]
OF_VERSIONS = ["read", "changed", "version_gone"]
OF_COPIES = ["ask", "answer", "change", "change_without_states", "assign_rows"]
VERSION, NEWEST = 0x9F62A0C0711376C5, 0x34AB30ABC43EDFEF
TABLE_ID = xxhash.xxh3_64_intdigest(b"fleet_sparse/table/emb") & 0xFFFFFFFF
DENSE_ID = xxhash.xxh3_64_intdigest(b"fleet_sparse/table/dense.0") & 0xFFFFFFFF


def table_under(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, as texts."""
    section = re.split(r"^#+ ", PAGE.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def example(name: str) -> list[bytes]:
    """The parts of an example, from the bytes on the page."""
    text = re.search(rf"```frame {name}\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    parts: list[bytes] = []
    for line in text.group(1).splitlines():
        if line.startswith("part "):
            assert line == f"part {len(parts)}"
            parts.append(b"")
            continue
        offset, data = line[:4], line[6:53]
        assert int(offset, 16) == len(parts[-1])
        parts[-1] += bytes.fromhex(data)
    return parts


def decoded(name: str) -> Frame:
    return decode(example(name), max_bytes=1 << 20)


def test_stream_message_has_the_layout_of_the_page() -> None:
    section = PAGE.split("## Streams\n", 1)[1].split("| offset |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[2:]]
    fields = [["0", "4 bytes", "magic"], ["4", "u32", "num_parts"], ["8", "u64", "num_bytes"]]
    assert [row[:3] for row in rows[:3]] == fields
    assert rows[0][3] == f'`{STREAM_MAGIC.hex(" ")}`, "{STREAM_MAGIC.decode()}"'
    assert rows[3][:3] == ["16", "u64 x num_parts", "lengths"]


def test_limits_of_streams_are_those_of_the_page() -> None:
    section = PAGE.split("## Streams\n", 1)[1].split("\n## ", 1)[0]
    for text in (
        f"first message in {streams.GREETING_S:g} s",
        f"in {streams.STALL_S:g} s nothing moved",
        f"up to {streams.MAX_WAITING_REPLIES} of them",
        f"more than {streams.PAUSE_BYTES >> 20} MiB wait",
    ):
        assert text in " ".join(section.split()), text
    assert streams.MAX_WAITING_FRAMES == 4
    assert "four times the limit of a frame" in " ".join(section.split())


@pytest.mark.parametrize("name", EXAMPLES + OF_VERSIONS + OF_COPIES)
def test_an_example_is_encoded_to_its_bytes(name: str) -> None:
    assert [bytes(part) for part in encode(decoded(name))] == example(name)


def test_the_page_names_the_version_of_the_control_plane() -> None:
    assert f"version of the control plane, {CONTROL_VERSION}, and" in " ".join(PAGE.split())


def test_numbers_without_a_meaning_are_those_of_the_page() -> None:
    (block,) = decoded("pull").blocks
    numbers = [block.learning_rate, block.optimizer_step, block.gradient_scale]
    assert numbers == [0, 0, 1]
    assert "a sender writes {:g}, {:g} or {:g}.".format(*numbers) in " ".join(PAGE.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_of_one_client_and_shard(name: str) -> None:
    header = decoded(name).header
    assert (header.cluster_id, header.shard, header.incarnation) == (0xC0FFEE, 1, 0x0102030405060708)
    assert (header.placement_version, header.step) == (1, 3)
    assert (header.part, header.num_parts) == ((1, 2) if name == "push_dense_part" else (0, 1))
    assert (header.client_id, header.client_epoch) == (bytes(range(0xA0, 0xB0)), 1)


def test_the_pull_on_the_page_decodes() -> None:
    frame = decoded("pull")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.PULL, 41, 0)
    assert frame.header.push_floor == 8
    (block,) = frame.blocks
    assert (block.action, block.table_id, block.schema_hash) == (Action.PULL, TABLE_ID, SCHEMA_HASH)
    assert block.rows is None
    np.testing.assert_array_equal(block.ids, [7, -1])


def test_the_reply_on_the_page_decodes() -> None:
    frame = decoded("rows")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.ROWS, 41, 8)
    assert frame.header.push_floor == 0
    (block,) = frame.blocks
    assert (block.action, block.table_id, block.schema_hash) == (Action.ROWS, TABLE_ID, SCHEMA_HASH)
    assert block.ids is None
    np.testing.assert_array_equal(block.rows, [[0.5, -0.25], [1, 2]])


def test_the_shorter_reply_on_the_page_has_the_same_rows() -> None:
    (block,) = decoded("rows_bfloat16").blocks
    assert (block.dtype, block.rows is not None) == (RowDtype.BFLOAT16, True)
    np.testing.assert_array_equal(from_frame(block.rows, block.dtype), [[0.5, -0.25], [1, 2]])  # type: ignore[arg-type]


def test_the_push_on_the_page_decodes() -> None:
    frame = decoded("push")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.PUSH, 42, 9)
    (block,) = frame.blocks
    assert (block.action, block.table_id, block.schema_hash) == (Action.PUSH, TABLE_ID, SCHEMA_HASH)
    assert (block.learning_rate, block.optimizer_step, block.gradient_scale) == (0.05, 4, 1.0)
    np.testing.assert_array_equal(block.ids, [7, -1])
    np.testing.assert_array_equal(block.rows, [[0.5, 1], [-1, 0]])


def test_the_dense_push_on_the_page_decodes() -> None:
    frame = decoded("push_dense_bfloat16")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.PUSH, 42, 9)
    (block,) = frame.blocks
    assert (block.action, block.dtype, block.count, block.dim) == (Action.PUSH, RowDtype.BFLOAT16, 4, 1)
    assert (block.table_id, block.ids, block.gradient_scale) == (DENSE_ID, None, 512.0)
    np.testing.assert_array_equal(from_frame(block.rows, block.dtype), [[0.5], [1], [-1], [0]])  # type: ignore[arg-type]


def test_the_part_of_a_dense_push_on_the_page_decodes() -> None:
    frame = decoded("push_dense_part")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.PUSH, 43, 10)
    (block,) = frame.blocks
    assert (block.action, block.dtype, block.count, block.offset) == (Action.PUSH, RowDtype.FLOAT32, 2, 4)
    assert (block.table_id, block.ids) == (DENSE_ID, None)
    np.testing.assert_array_equal(block.rows, [[0.5], [-0.25]])


def test_the_push_with_counts_on_the_page_decodes() -> None:
    (block,) = decoded("push_counts").blocks
    assert {name: values.tolist() for name, values in block.statistics.items()} == {"counts": [2, 1]}
    np.testing.assert_array_equal(block.rows, decoded("push").blocks[0].rows)


def test_the_read_on_the_page_is_the_pull_of_a_version() -> None:
    frame, pull = decoded("read"), decoded("pull")
    assert (frame.header.op, frame.header.push_seq, frame.header.push_floor) == (Op.READ, 0, 0)
    assert frame.header.step == VERSION
    np.testing.assert_array_equal(frame.blocks[0].ids, pull.blocks[0].ids)


def test_the_ask_on_the_page_decodes() -> None:
    frame = decoded("ask")
    assert (frame.header.op, frame.header.request_id, frame.header.push_floor) == (Op.PULL, 43, 9)
    (block,) = frame.blocks
    np.testing.assert_array_equal(block.ids, [7, -1, 12])
    np.testing.assert_array_equal(block.copies["versions"], [40, NO_VERSION, 64])


def test_the_answer_on_the_page_is_that_to_the_ask() -> None:
    slack, due, entering = decoded("answer").blocks
    assert slack.copies["slack"].tolist() == [4, STATES_FOLLOW, ROW_FOLLOWS]
    assert [block.count for block in (slack, due, entering)] == [3, 1, 1]
    assert (due.rows is not None, due.copies["versions"].tolist()) == (True, [71])
    assert (entering.copies["versions"].tolist(), entering.copies["states"].tolist()) == ([3], [[[0.75, 0.5]]])
    np.testing.assert_array_equal(entering.rows, [[0.5, -0.25]])


def test_the_change_on_the_page_decodes() -> None:
    (block,) = decoded("change").blocks
    assert (block.action, block.learning_rate, block.optimizer_step) == (Action.CHANGE, 1.0, 12)
    assert (block.statistics["counts"].tolist(), block.copies["versions"].tolist()) == ([5], [9])
    np.testing.assert_array_equal(block.rows, [[-0.5, 0.25]])
    np.testing.assert_array_equal(block.copies["states"], [[[2, 1]]])


def test_the_change_without_states_on_the_page_decodes() -> None:
    (block,), (whole,) = decoded("change_without_states").blocks, decoded("change").blocks
    assert (block.action, block.learning_rate, block.optimizer_step) == (Action.CHANGE, 1.0, 12)
    assert not block.copies
    np.testing.assert_array_equal(block.statistics["counts"], whole.statistics["counts"])
    np.testing.assert_array_equal(block.rows, whole.rows)


def test_the_assigned_row_on_the_page_decodes() -> None:
    (block,) = decoded("assign_rows").blocks
    assert (block.action, block.optimizer_step, block.statistics) == (Action.ASSIGN, 12, {})
    assert (block.ids is not None, block.ids.tolist()) == (True, [7])
    np.testing.assert_array_equal(block.rows, [[0.25, 0.75]])
    np.testing.assert_array_equal(block.copies["states"], [[[2.5, 1.25]]])


@pytest.mark.parametrize("name", ["change", "change_without_states", "assign_rows"])
def test_a_worker_sends_the_changes_on_the_page(name: str) -> None:
    (block,), is_whole = decoded(name).blocks, name == "assign_rows"
    assert block.ids is not None
    spec: Any = SimpleNamespace(table_id=block.table_id, schema_hash=block.schema_hash, dim=block.dim)
    counts = block.statistics.get("counts", np.ones(1, np.uint32))
    states, num_updates = block.copies.get("states"), block.copies.get("versions", np.ones(1, np.uint32))
    unique = UniqueIds(block.ids, np.array([0, 1]))
    rows: Any = block.rows
    requests = Requests([Request(Op.PUSH, shard=shard) for shard in range(2)])
    requests.add_change(RowChange(spec, unique, rows, counts, states, num_updates, 1.0, 12, is_whole))
    head, *columns = example(name)
    assert bytes(requests.all[1].table) == head[HEADER_BYTES:]
    assert [bytes(column) for column in requests.all[1].columns] == columns
    assert requests.all[0].is_empty


def test_the_changed_ids_on_the_page_decode() -> None:
    frame = decoded("changed")
    assert (frame.header.op, frame.header.step) == (Op.ROWS, VERSION)
    (block,) = frame.blocks
    assert (block.action, block.table_id, block.rows) == (Action.ROWS, TABLE_ID, None)
    np.testing.assert_array_equal(block.ids, [7, -1])


def test_the_error_on_the_page_names_the_newest_version() -> None:
    frame = decoded("version_gone")
    assert frame.error is not None
    assert (frame.error.code, frame.error.number, frame.header.step) == (ErrorCode.VERSION_GONE, NEWEST, NEWEST)


def test_the_ack_on_the_page_decodes() -> None:
    frame = decoded("ack")
    assert (frame.header.op, frame.header.request_id, frame.header.push_seq) == (Op.ACK, 42, 9)
    assert frame.blocks == []


@pytest.mark.parametrize(
    ("heading", "begin", "end"), [("Header", 0, HEADER_BYTES), ("Block table", 0, BLOCK_BYTES), ("Error", 128, 144)]
)
def test_the_fields_follow_each_other_without_gaps(heading: str, begin: int, end: int) -> None:
    offset = begin
    for row in table_under(heading):
        assert int(row[0]) == offset
        offset += SIZES.get(row[1], 0)
    assert offset == end


def test_the_header_has_the_layout_of_the_page() -> None:
    head = example("push")[0]
    header = decoded("push").header
    expected = {
        **{name: getattr(header, name) for name in header.__slots__},
        "magic": MAGIC,
        "version": PROTOCOL_VERSION,
        "header_bytes": HEADER_BYTES,
        "num_blocks": 1,
        "head_bytes": len(head),
        "column_bytes": 32,
        "reserved": 0,
    }
    for offset, kind, name, _ in table_under("Header"):
        data = head[int(offset) : int(offset) + SIZES[kind]]
        if name != "checksum":
            assert (data if "bytes" in kind else int.from_bytes(data, "little")) == expected[name], name


def test_the_checksum_is_the_one_of_the_page() -> None:
    parts = example("push")
    head = parts[0][:120] + bytes(8) + parts[0][128:]
    assert xxhash.xxh3_64_digest(b"".join([head, *parts[1:]]))[::-1] == parts[0][120:128]


@pytest.mark.parametrize(
    ("heading", "kind"), [("Ops", Op), ("Actions", Action), ("Error codes", ErrorCode)], ids=["op", "action", "code"]
)
def test_the_numbers_are_those_of_the_code(heading: str, kind: type[Op] | type[Action] | type[ErrorCode]) -> None:
    assert {row[1]: int(row[0]) for row in table_under(heading)} == {member.name: int(member) for member in kind}


def test_the_dtypes_are_those_of_the_code() -> None:
    rows = [(int(number), name, int(size)) for number, name, size, _ in table_under("Dtypes")]
    assert rows == [(int(dtype), dtype.name, dtype.in_frames.itemsize) for dtype in RowDtype]


def test_the_columns_are_those_of_the_code() -> None:
    assert {row[1].upper(): int(row[0], 16) for row in table_under("Columns")} == {
        column.name: int(column) for column in Column
    }


def test_the_limits_are_those_of_the_code() -> None:
    limits = {row[0]: int(re.findall(r"\d+", row[1])[0]) for row in table_under("Limits") if re.search(r"\d", row[1])}
    assert limits == {
        "bytes of a frame, all parts": Settings().max_frame_bytes,
        "blocks of a frame": MAX_BLOCKS,
        "parts of a frame": MAX_PARTS,
        "dim": MAX_DIM,
        "bytes of an error message": MAX_MESSAGE_BYTES,
    }


def test_the_calls_are_those_of_the_code() -> None:
    rows = [row for row in table_under("Control plane") if row[0] in control.METHODS]
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        name: (request.DESCRIPTOR.name, reply.DESCRIPTOR.name) for name, (request, reply) in control.METHODS.items()
    }


def test_the_statuses_are_those_of_the_code() -> None:
    statuses = {
        kind.__name__: (status, ", ".join(name for name, _ in control._ATTRIBUTES_OF.get(kind, ())))
        for kind, status in control._STATUS_OF.items()
    }
    rows = [row for row in table_under("Control plane") if row[0] in statuses]
    assert {row[0]: (row[1], row[2]) for row in rows} == statuses
