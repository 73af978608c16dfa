from __future__ import annotations

import gc
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.errors import ErrorCode, ProtocolError, SettingError
from fleet_sparse.wire.frame_format import MAX_PARTS
from fleet_sparse.wire.stream import (
    GREETING,
    MAGIC,
    Buffer,
    FrameMemory,
    FrameReader,
    FrameWriter,
    is_trusted,
    set_up,
    socket_to,
)
from support.streams import pair

MAX_BYTES = 1 << 20
LARGE = 200_000  # bytes of a part that does not fit into what is read at once

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = pair()
    yield made
    for end in made:
        end.close()


def message(*parts: Buffer) -> bytes:
    """As docs/protocol.md has it, made without the writer."""
    body = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return struct.pack("<4sIQ", b"FSS1", len(parts), len(lengths) + len(body)) + lengths + body


def read_all(reader: FrameReader, end: socket.socket) -> list[list[bytes]]:
    """All frames that are here."""
    frames = []
    while True:
        frame = reader.next_frame()
        if frame is not None:
            frames.append([bytes(part) for part in frame])
            continue
        try:
            if not reader.read(end):
                return frames
        except BlockingIOError:
            return frames


def passed(parts: list[list[bytes]], ends: Ends) -> list[list[bytes]]:
    """What a reader makes of what a writer sends."""
    writer, reader = FrameWriter(), FrameReader(MAX_BYTES, FrameMemory())
    for each in parts:
        writer.put(each)
    frames: list[list[bytes]] = []
    while not writer.write(ends[0]):
        frames += read_all(reader, ends[1])
    return frames + read_all(reader, ends[1])


def test_a_writer_sends_what_the_page_says(ends: Ends) -> None:
    parts = [b"head5678", b"", b"abc", bytes(range(256))]
    writer = FrameWriter()
    writer.put(parts)
    assert writer.write(ends[0])
    assert ends[1].recv(1 << 16) == message(*parts)


def test_a_greeting_is_a_message_without_a_frame(ends: Ends) -> None:
    assert message() == GREETING
    reader = FrameReader(MAX_BYTES, FrameMemory())
    ends[0].sendall(GREETING + message(b"x") + GREETING)
    assert read_all(reader, ends[1]) == [[b"x"]]
    assert (reader.num_messages, reader.is_within_message) == (3, False)


@given(st.lists(st.lists(st.integers(0, 100_000), min_size=1, max_size=5), max_size=5), st.sampled_from([None, 1]))
def test_frames_of_any_sizes_pass_unchanged(sizes: list[list[int]], buffer_bytes: int | None) -> None:
    frames = [[bytes([index + 1]) * size for index, size in enumerate(each)] for each in sizes]
    made = pair(buffer_bytes)
    assert passed(frames, made) == frames
    for end in made:
        end.close()


def test_a_large_frame_that_is_here_is_received_at_once(ends: Ends) -> None:
    ends[0].sendall(message(b"x" * LARGE) + message(b"y"))
    reader = FrameReader(MAX_BYTES, FrameMemory())
    assert reader.receive(ends[1]) == [b"x" * LARGE]
    assert reader.receive(ends[1]) == [b"y"]
    assert not reader.may_have_more
    assert reader.num_bytes == len(message(b"x" * LARGE) + message(b"y"))


def test_to_receive_from_a_stream_that_ended_is_an_error(ends: Ends) -> None:
    ends[0].sendall(message(b"x"))
    ends[0].close()
    reader = FrameReader(MAX_BYTES, FrameMemory())
    assert reader.receive(ends[1]) == [b"x"]
    with pytest.raises(ConnectionResetError):
        reader.receive(ends[1])


def test_a_reader_that_is_closed_reads_no_more(ends: Ends) -> None:
    reader = FrameReader(MAX_BYTES, FrameMemory())
    ends[0].sendall(message(b"x", b"y")[:30])
    reader.read(ends[1])
    reader.close()
    ends[0].sendall(message(b"x", b"y")[30:])
    assert reader.read(ends[1]) == 0
    assert reader.next_frame() is None


def test_more_parts_than_the_kernel_takes_at_once_pass(ends: Ends) -> None:
    parts = [bytes([number % 251]) * (number % 3) for number in range(MAX_PARTS)]
    assert passed([parts, [b"next"]], ends) == [parts, [b"next"]]


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 1000])
def test_frames_that_come_in_pieces_are_whole(ends: Ends, chunk: int) -> None:
    frames = [[b"a" * 40, b"b" * 7], [b"c"], [b"d" * (300 * chunk), b"e"]]
    data, reader = b"".join(message(*each) for each in frames), FrameReader(MAX_BYTES, FrameMemory())
    found = []
    for begin in range(0, len(data), chunk):
        ends[0].sendall(data[begin : begin + chunk])
        found += read_all(reader, ends[1])
    assert found == frames


def test_every_part_is_aligned_to_8_bytes(ends: Ends) -> None:
    for size in (3, LARGE + 3):
        ends[0].sendall(message(b"x" * size, b"y" * 16))
        reader = FrameReader(MAX_BYTES, FrameMemory())
        frame = None
        while frame is None:
            reader.read(ends[1])
            frame = reader.next_frame()
        for part in frame:
            assert np.frombuffer(part, np.uint8).ctypes.data % 8 == 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"FSS2" + bytes(12),
        struct.pack("<4sIQ", MAGIC, MAX_PARTS + 1, 8 * (MAX_PARTS + 1)),
        struct.pack("<4sIQ", MAGIC, 1, 7),
        struct.pack("<4sIQ", MAGIC, 0, 8),
        struct.pack("<4sIQ", MAGIC, 1, 2**63),
        struct.pack("<4sIQ", MAGIC, 1, MAX_BYTES + 17),
        struct.pack("<4sIQQ", MAGIC, 1, 16, 9) + bytes(8),
        struct.pack("<4sIQQ", MAGIC, 1, 16, 0) + bytes(8),
        struct.pack("<4sIQQ", MAGIC, 1, 16, 2**64 - 1) + bytes(8),
        struct.pack("<4sIQQQ", MAGIC, 2, 16, 2**63, 2**63),
        struct.pack("<4sIQQ", MAGIC, 1, LARGE + 8, LARGE + 9) + bytes(LARGE),
        message(bytes(MAX_BYTES // 2), bytes(MAX_BYTES // 2), b"x"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    made = socket.socketpair()
    made[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_BYTES)
    made[1].setblocking(False)
    made[0].sendall(data)
    with pytest.raises(ProtocolError, match=r"^stream: ") as caught:
        read_all(FrameReader(MAX_BYTES, FrameMemory()), made[1])
    assert caught.value.code is ErrorCode.MALFORMED
    for end in made:
        end.close()


def test_nothing_is_allocated_for_a_message_past_the_limit(ends: Ends) -> None:
    class NoMemory(FrameMemory):
        def lend(self, num_bytes: int) -> memoryview:
            raise AssertionError(f"{num_bytes} bytes")

    ends[0].sendall(struct.pack("<4sIQ", MAGIC, 1, MAX_BYTES + 100))
    reader = FrameReader(MAX_BYTES, NoMemory())
    reader.read(ends[1])
    with pytest.raises(ProtocolError):
        reader.next_frame()


# Memory


def test_a_frame_that_is_held_keeps_its_values(ends: Ends) -> None:
    memory = FrameMemory()
    reader = FrameReader(MAX_BYTES, memory)
    held = []
    for number in range(1, 8):
        for size in (100, LARGE):
            ends[0].setblocking(True)
            ends[0].sendall(message(bytes([number]) * size))
            frame = None
            while frame is None:
                reader.read(ends[1])
                frame = reader.next_frame()
            held.append((number, size, np.frombuffer(frame[0], np.uint8)))
    for number, size, values in held:
        assert values.tobytes() == bytes([number]) * size


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_lent_again_when_the_last_view_is_dropped() -> None:
    memory = FrameMemory()
    lent = memory.lend(LARGE)
    first, part = address_of(lent), np.frombuffer(lent[8:16], np.uint8)
    del lent
    other = memory.lend(LARGE)
    assert address_of(other) != first
    del part
    gc.collect()
    assert address_of(memory.lend(LARGE - 1)) == first


# What waits


def test_a_message_sent_in_part_begins_again_elsewhere(ends: Ends) -> None:
    writer = FrameWriter()
    small, fresh = pair(1), ends
    writer.put([b"a" * LARGE])
    writer.put([b"b"])
    waiting = writer.num_bytes
    assert not writer.write(small[0])
    assert 0 < writer.num_bytes < waiting
    writer.begin_again()
    assert writer.num_bytes == waiting
    reader, frames = FrameReader(MAX_BYTES, FrameMemory()), []
    while not writer.write(fresh[0]):
        frames += read_all(reader, fresh[1])
    assert frames + read_all(reader, fresh[1]) == [[b"a" * LARGE], [b"b"]]
    assert (writer.num_waiting, writer.num_bytes) == (0, 0)
    for end in small:
        end.close()


def test_what_is_cleared_is_not_sent(ends: Ends) -> None:
    writer = FrameWriter()
    writer.put([b"a"])
    writer.clear()
    assert writer.write(ends[0])
    assert (writer.num_waiting, writer.num_bytes) == (0, 0)
    with pytest.raises(BlockingIOError):
        ends[1].recv(1)


# Sockets


@pytest.mark.parametrize("endpoint", ["", "unix:", "udp:1.2.3.4:5", "tcp:1.2.3.4", "1.2.3.4:5"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingError):
        socket_to(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "family", "address"),
    [
        ("unix:a:b", socket.AF_UNIX, "\0a:b"),
        ("tcp:10.0.0.1:80", socket.AF_INET, ("10.0.0.1", 80)),
        ("tcp:[::1]:80", socket.AF_INET6, ("::1", 80)),
    ],
)
def test_an_endpoint_names_a_family_and_an_address(endpoint: str, family: int, address: object) -> None:
    made, found = socket_to(endpoint)
    with made:
        assert (made.family, found) == (family, address)


def test_the_own_user_is_trusted_and_another_is_not(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_trusted(ends[0])
    credentials = struct.pack("3i", 1, 4_000_000_000 - 2**32, 1)
    other = type("Other", (), {"family": socket.AF_UNIX, "getsockopt": lambda *_: credentials})()
    assert not is_trusted(other)


def test_a_peer_that_is_gone_ends_its_connection_soon() -> None:
    with socket.socket() as stream:
        set_up(stream, 1, gone_after_s=2.5)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500


def test_tcp_sends_at_once() -> None:
    with socket.socket() as stream:
        set_up(stream, 1)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not stream.getblocking()
