"""Every size that a peer says is compared before memory of it is allocated: a list of the places."""

from __future__ import annotations

import ast
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.errors import ErrorCode, FleetSparseError, PlanError, ProtocolError, SettingError
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import answer
from fleet_sparse.pserver.net.straight_path import StraightPath
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import (
    CHECKSUM_OFFSET,
    HEADER_BYTES,
    MAX_PARTS,
    Buffer,
    Frame,
    Op,
    checksum_of,
    without_checksum,
)
from fleet_sparse.wire.stream import MAGIC, FrameMemory, FrameReader
from support.allocations import allocations_in, function_named
from support.controls import HeldControl, registration
from support.shards import DENSE, SGD, FrameClient, floats, ids_of, make_shard, pull, push
from support.sources import ROOT
from support.straight import message_of

PACKAGES = (
    "fleet_sparse/wire",
    "fleet_sparse/worker/net",
    "fleet_sparse/worker/control",
    "pserver/net",
    "pserver/engine",
    "pserver/tables",
    "pserver/admin",
    "pserver/read_only",
)
"""Where bytes of a peer are read, or what they say is carried out."""
MAX_BYTES = 1 << 20
COUNT_OFFSET = 16
MEMORY_BYTES = 256 << 10
"""Most that may be allocated for a request that is refused."""


class Place(NamedTuple):
    """An allocation whose size a peer says."""

    where: str
    check: tuple[str, str]
    """Where the size is compared before, and how."""
    attack: str
    """Name of the attack whose size is past that."""


FRAME = "fleet_sparse/wire/stream.py FrameReader.next_message", "0 <= num_bytes - 8 * num_parts <= self._max_bytes"
PARTS = "fleet_sparse/wire/stream.py FrameReader.next_message", "0 < num_parts <= MAX_PARTS"
PLACED = "fleet_sparse/wire/stream.py FrameReader._place_columns", "num_parts > _MAX_PLACED or at > here"
REPLY = "fleet_sparse/wire/decode.py decode_blocks", "reply_bytes > max_bytes"
PLAIN = "pserver/engine/plain_frames.py PlainFrames.find", "num_rows > MAX_UNCHECKED_IDS"
WORKERS = "pserver/admin/membership.py Membership.check", "num_workers > MAX_WORKERS"
ARRAY = "pserver/tables/dense.py DenseRange.__init__", "needed > available"

PLACES = (
    Place("fleet_sparse/wire/stream.py FrameReader._begin_large: self._memory.lend(num_bytes)", FRAME, "large frame"),
    Place("fleet_sparse/wire/stream.py FrameMemory.lend: self._memory.lend(num_bytes)", FRAME, "large frame"),
    Place(
        "fleet_sparse/wire/stream.py FrameReader.split: struct.unpack_from(f'<{num_parts}Q', data)", PARTS, "many parts"
    ),
    Place("fleet_sparse/wire/stream.py FrameReader.split: bytes(message.data)", FRAME, "large frame"),
    Place(
        "fleet_sparse/wire/stream.py FrameReader._place_columns: "
        "struct.unpack_from(f'<{num_parts}Q', self._buffer, begin)",
        PLACED,
        "many placed parts",
    ),
    Place(
        "fleet_sparse/wire/stream.py FrameReader._place_columns: bytes(self._buffer[at:first])",
        ("fleet_sparse/wire/stream.py FrameReader._place_columns", "first > here or head_bytes % 8"),
        "large head",
    ),
    Place("pserver/engine/early_pulls.py EarlyPulls.add: np.zeros(block.count, np.bool_)", REPLY, "early pull"),
    Place("pserver/tables/dense.py DenseTable.changes: np.zeros(block.count, np.bool_)", REPLY, "early pull"),
    Place(
        "pserver/read_only/shard.py ReadOnlyShard._rows_of: self._memory.lend(block.count * dim)", REPLY, "large pull"
    ),
    Place("pserver/engine/plain_frames.py PlainFrames.find: np.empty(2 * num_rows, np.int64)", PLAIN, "plain frame"),
    Place(
        "pserver/engine/plain_frames.py PlainFrames.find: "
        "np.empty(2 * answer.FINGERPRINTS_PER_ID * (largest + 1), np.uint32)",
        PLAIN,
        "plain frame",
    ),
    Place("pserver/engine/plain_frames.py PlainFrames.find: np.empty(6 * largest, np.int64)", PLAIN, "plain frame"),
    Place(
        "pserver/engine/plain_frames.py PlainFrames.pull: "
        "np.empty((2, frame.num_rows + frame.num_rows // 4), np.int64)",
        PLAIN,
        "plain frame",
    ),
    Place(
        "pserver/engine/plain_frames.py PlainFrames.pull: "
        "self._context.reply_memory.lend(frame.reply_bytes // _FLOAT_BYTES)",
        (
            "pserver/net/straight_path.py StraightPath.answer",
            "head_bytes + frame.reply_column_bytes > self._max_bytes",
        ),
        "plain frame",
    ),
    Place("pserver/tables/reply_memory.py ReplyMemory.lend: np.empty(num_values, np.float32)", REPLY, "large pull"),
    Place(
        "pserver/net/straight_path.py _checksum_of: "
        "struct.unpack_from(f'<{begin // WORD_BYTES - 1}Q', data, WORD_BYTES)",
        (
            "pserver/net/straight_path.py StraightPath.answer",
            "len(data) < begin + HEADER_BYTES or len(data) % WORD_BYTES",
        ),
        "plain parts",
    ),
    Place("pserver/engine/step_clock.py StepClock.__init__: [0] * num_workers", WORKERS, "many workers"),
    Place("pserver/engine/step_clock.py StepClock.__init__: [False] * num_workers", WORKERS, "many workers"),
    Place(
        "pserver/tables/dense.py DenseRange.__init__: np.zeros(self._rule.num_states * self.size, np.float32)",
        ARRAY,
        "large array",
    ),
    # What libzmq receives before is docs/security.md's.
    Place(
        "pserver/net/data_plane.py DataPlane._answer_messages: socket.recv_multipart(zmq.NOBLOCK, copy=False)",
        (
            "pserver/net/data_plane.py DataPlane._bind",
            "self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)",
        ),
        "",
    ),
    Place(
        "fleet_sparse/worker/net/zmq_channel.py ZmqChannel.receive: "
        "self._sockets[shard].recv_multipart(zmq.DONTWAIT, copy=False)",
        ("fleet_sparse/worker/net/zmq_channel.py ZmqChannel._open", "socket.maxmsgsize = self._max_frame_bytes"),
        "",
    ),
)

OTHERS = {
    "a copy of bytes that are in memory": {
        "fleet_sparse/wire/encode.py encode: bytes(head)",
        "fleet_sparse/wire/frame_format.py offset_fault: ' with ids' * has_ids",
        "fleet_sparse/wire/link_header.py LinkHeader.head_of: bytearray(self.template)",
        "fleet_sparse/wire/link_header.py LinkHeader.head_of: bytes(head)",
        "fleet_sparse/wire/tls_stream.py TlsSocket.sendmsg: bytes(record)",
        "fleet_sparse/wire/tls_stream.py _records: bytes(joined)",
        "fleet_sparse/worker/net/lane.py Lane.receive: "
        "bytes(self._reply_views[request.shard][:HEADER_BYTES + BLOCK_BYTES * fill[NUM_REPLY_BLOCKS]])",
        "fleet_sparse/worker/net/lane.py Lane.send: "
        "bytes(self._expected_views[request.shard][:BLOCK_BYTES * fill[NUM_REPLY_BLOCKS]])",
        "fleet_sparse/worker/net/lane.py Lane.send: bytes(self._head_views[request.shard][:head_bytes])",
        "pserver/net/straight_path.py StraightPath.answer: bytes(reply)",
        "fleet_sparse/wire/stream.py FrameReader.withdraw: "
        "self._memory.lend(8 * len(lengths) + sum((length + -length % 8 for length in lengths)))",
    },
    "a few bytes, or a pipe or file of this machine": {
        "fleet_sparse/wire/stream.py : bytes(-num_bytes % 8)",
        "fleet_sparse/wire/stream.py FrameReader._received: self.read(source)",
        "pserver/net/data_plane.py DataPlane.run: os.read(self._woken, PIPE_BYTES)",
        "pserver/admin/service.py resident_bytes: file.read()",
        "pserver/tables/row_limit.py MemoryUse.share: self.read()",
    },
    "as many as pservers of the job, or tables of this worker": {
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.empty((num_shards, BUFFER_BYTES // 8), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.full(num_shards, -1, np.int64)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.zeros((num_shards, HEAD_WORDS), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.zeros((num_shards, FILL_COLUMNS), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.zeros((num_shards, 4), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.zeros(2 * num_shards + 2, np.int32)",
        "fleet_sparse/worker/net/lane.py Lane.__init__: np.arange(num_shards)",
        "fleet_sparse/worker/net/lane.py Lane._allocate: np.zeros((num_shards, head_words), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane._allocate: "
        "np.zeros((num_shards, PREFIX_WORDS + 1 + num_columns), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane._allocate: np.zeros((num_shards, 2 * (2 + 2 * num_columns)), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane._allocate: np.zeros((num_shards, BLOCK_WORDS * num_tables), np.int64)",
        "fleet_sparse/worker/net/lane.py Lane._allocate: np.zeros((num_shards, 2 * num_columns), np.int64)",
        "fleet_sparse/worker/net/lane.py _Blocks.allocate: [None] * num_tables",
        "fleet_sparse/worker/net/lane.py _Blocks.allocate: np.zeros((num_tables, 2, BLOCK_WORDS), np.int64)",
        "fleet_sparse/worker/net/plain_rows.py PlainRows.requests: [0] * num_shards",
        "pserver/tables/merger.py Merger.__init__: np.empty(placement.num_shards, np.int64)",
    },
    "as many as ids of frames that have been received, times the width of a table": {
        "pserver/tables/admission.py ExactCounters.totals: np.empty((len(ids), self.store.spec.dim), np.float32)",
        "pserver/tables/admission.py Admission._totals: np.zeros((len(ids), self._width), np.float32)",
        "pserver/tables/dense.py DenseTable._whole: self._joined_memory.lend(size)",
        "pserver/tables/embedding.py EmbeddingTable.check_assignment: np.empty((len(ids), 0, self._dim), np.float32)",
        "pserver/tables/embedding.py EmbeddingTable.merge: np.empty((len(ids), self.spec.dim), np.float32)",
        "pserver/tables/merger.py Merger.check: np.empty(4 << bits, np.uint32)",
        "pserver/tables/merger.py Merger._distinct: np.empty(n, np.int64)",
    },
    "as many as rows or values that are here": {
        "pserver/tables/dense.py DenseRange.export_states: np.zeros((self._rule.num_states, 0), np.float32)",
        "pserver/tables/dense.py DenseTable.pull: self.range.read(block.optimizer_step)",
        "pserver/tables/dense.py DenseTable.load: np.empty((self.range.num_states, self.range.size), np.float32)",
        "pserver/read_only/content.py reversal: np.empty((len(ids), table.spec.dim), np.float32)",
        "pserver/read_only/content.py differences: np.ones(store.num_rows, np.bool_)",
        "pserver/read_only/content.py _values: np.empty(array.end - array.begin, np.float32)",
        "pserver/read_only/content.py _values: "
        "np.empty((section.spec.update_rule.num_states, len(values)), np.float32)",
        "pserver/read_only/versions.py VersionedRows.apply: np.empty((len(ids), self.spec.dim), np.float32)",
        "pserver/read_only/versions.py VersionedRows.abandon: np.empty((len(part), self.spec.dim), np.float32)",
        "pserver/read_only/versions.py VersionedRows.pull: np.empty((len(replaced), self.spec.dim), np.float32)",
        "pserver/read_only/versions.py VersionedRows.changed_ids: np.ones(self._replaced.num_rows, np.bool_)",
        "pserver/read_only/versions.py set_rows: np.empty((len(ids), 0, store.spec.dim), np.float32)",
    },
}
"""Places whose size no peer says, by what it is."""


def test_every_place_has_an_attack() -> None:
    attacks = {place.attack for place in PLACES if ".recv_multipart(" not in place.where}
    assert not [attack for attack in attacks if f"test_{attack.replace(' ', '_')}" not in globals()]


def places_in_sources() -> set[str]:
    return {
        f"{path.relative_to(ROOT)} {function}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).glob("*.py"))
        if not path.name.endswith("_pb2.py")
        for function, _, text in allocations_in(path)
    }


def test_every_place_is_listed() -> None:
    listed = {place.where for place in PLACES} | set().union(*OTHERS.values())
    found = places_in_sources()
    assert found - listed == set(), (
        "a size that a peer says belongs into PLACES, with the check before it and an attack"
    )
    assert listed - found == set(), "these are gone"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.where.split("/")[-1][:60])
def test_size_is_compared_before_it_is_allocated(place: Place) -> None:
    where, text = place.check
    assert text in texts_of(where)
    if where == place.where.split(":")[0]:
        assert texts_of(where)[text] < texts_of(where)[place.where.split(": ", 1)[1]]


def texts_of(where: str) -> dict[str, int]:
    """Returns the expressions and statements of a function, with their first lines."""
    path, function = where.split(" ")
    texts: dict[str, int] = {}
    for node in ast.walk(function_named(ROOT / path, function)):
        if isinstance(node, (ast.expr, ast.stmt)):
            text = ast.unparse(node)
            texts[text] = min(node.lineno, texts.get(text, node.lineno))
    return texts


# Attacks


@contextmanager
def flat_memory() -> Iterator[None]:
    """Fails if much memory is allocated meanwhile."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


def refused(error: type[FleetSparseError], attack: Callable[[], object], code: ErrorCode | None = None) -> None:
    with flat_memory(), pytest.raises(error) as caught:
        attack()
    if code is not None:
        assert isinstance(caught.value, ProtocolError)
        assert caught.value.code is code


def read(data: bytes, *, places: bool = False) -> FrameReader:
    """Returns a reader that has received these bytes."""
    place = (lambda head, lengths: None) if places else None
    reader = FrameReader(MAX_BYTES, FrameMemory(), place)
    ends = socket.socketpair()
    ends[0].sendall(data)
    reader.read(ends[1])
    for end in ends:
        end.close()
    return reader


def prefix(num_parts: int, num_bytes: int) -> bytes:
    return struct.pack("<4sIQ", MAGIC, num_parts, num_bytes)


def with_count(frame: Frame, count: int) -> list[Buffer]:
    """Returns the parts of a frame whose first block says another count."""
    head, *columns = encode(frame)
    changed = bytearray(head)
    struct.pack_into("<Q", changed, HEADER_BYTES + COUNT_OFFSET, count)
    checksum = checksum_of(without_checksum(changed), columns, struct.unpack_from("<H", changed, 10)[0])
    struct.pack_into("<Q", changed, CHECKSUM_OFFSET, checksum)
    return [bytes(changed), *columns]


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    made = make_shard(SGD, DENSE)
    yield made
    made.close()


def frames_of(shard: Shard) -> dict[str, Frame]:
    client = FrameClient(shard)
    return {
        "pull": client.frame(Op.PULL, pull(SGD, ids_of(7))),
        "push": client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1]))),
        "dense": client.frame(Op.PULL, pull(DENSE, count=8)),
        "early": client.frame(Op.PULL_EARLY, pull(DENSE, count=8), push_seq=0, step=1),
    }


@pytest.mark.parametrize("num_bytes", [MAX_BYTES + 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("places", [False, True])
def test_large_frame(num_bytes: int, places: bool) -> None:
    reader = read(prefix(1, num_bytes), places=places)
    refused(ProtocolError, reader.next_frame, ErrorCode.MALFORMED)


@pytest.mark.parametrize("num_parts", [MAX_PARTS + 1, 1 << 20, (1 << 32) - 1])
@pytest.mark.parametrize("places", [False, True])
def test_many_parts(num_parts: int, places: bool) -> None:
    reader = read(prefix(num_parts, 8 * num_parts + 8) + bytes(4096), places=places)
    refused(ProtocolError, reader.next_frame, ErrorCode.MALFORMED)


@pytest.mark.parametrize("num_parts", [501, MAX_PARTS])
def test_many_placed_parts(num_parts: int) -> None:
    reader = read(prefix(num_parts, 8 * num_parts) + bytes(64), places=True)
    with flat_memory():
        assert reader.next_frame() is None, "it waits for the rest, in memory of the size of the message"


@pytest.mark.parametrize("head_bytes", [1 << 20, 1 << 40, 1 << 63])
def test_large_head(head_bytes: int) -> None:
    lengths = struct.pack("<2Q", head_bytes, 8)
    reader = read(prefix(2, 16 + 64) + lengths + bytes(64), places=True)
    refused(ProtocolError, reader.next_frame, ErrorCode.MALFORMED)


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, 1 << 61, (1 << 64) - 1])
@pytest.mark.parametrize("name", ["pull", "push", "dense", "early"])
def test_large_pull(shard: Shard, name: str, count: int) -> None:
    parts = with_count(frames_of(shard)[name], count)
    code = ErrorCode.TOO_LARGE if name in ("dense", "early") else ErrorCode.MALFORMED
    refused(ProtocolError, lambda: decode(parts, max_bytes=MAX_BYTES), code)


@pytest.mark.parametrize("count", [1 << 17, 1 << 40, 1 << 61])
def test_early_pull(shard: Shard, count: int) -> None:
    parts = with_count(frames_of(shard)["early"], count)
    with flat_memory():
        reply = answer(shard, parts, MAX_BYTES)
    error = decode(reply.parts, max_bytes=MAX_BYTES).error
    assert error is not None
    assert error.code is (ErrorCode.TOO_LARGE if 4 * count > MAX_BYTES else ErrorCode.MALFORMED)


@pytest.mark.parametrize("count", [1 << 17, 1 << 39, 1 << 61])
@pytest.mark.parametrize("name", ["pull", "push"])
@pytest.mark.parametrize("lies", ["in the block", "in the lengths"])
def test_plain_frame(shard: Shard, name: str, count: int, lies: str) -> None:
    parts = with_count(frames_of(shard)[name], count)
    message = message_of(parts)
    if lies == "in the lengths":
        lengths = [8 * count] if name == "pull" else [8 * count, 8 * count]
        struct.pack_into(f"<{len(lengths)}Q", message.data, 8, *(length % (1 << 64) for length in lengths))
    path = StraightPath(shard, MAX_BYTES)
    path.answer(message)  # compiled, and its memory is there
    with flat_memory():
        assert path.answer(message) is None


@pytest.mark.parametrize("num_parts", [1 << 16, 1 << 31])
def test_plain_parts(shard: Shard, num_parts: int) -> None:
    message = message_of(encode(frames_of(shard)["pull"]))._replace(num_parts=num_parts)
    with flat_memory():
        assert StraightPath(shard, MAX_BYTES).answer(message) is None


@pytest.mark.parametrize("num_workers", [65_537, (1 << 32) - 1])
def test_many_workers(tmp_path: Path, num_workers: int) -> None:
    held = HeldControl(tmp_path)
    held.call(registration(SGD))
    refused(SettingError, lambda: held.call(registration(SGD, num_workers=num_workers, client_id=b"n" * 16)))


@pytest.mark.parametrize("num_values", [1 << 40, 1 << 60])
def test_large_array(tmp_path: Path, num_values: int) -> None:
    held = HeldControl(tmp_path)
    spec = DenseSpec("large", "adam", (), (Segment("w", 0, num_values, 1.0),))
    refused(PlanError, lambda: held.call(registration(spec)))
