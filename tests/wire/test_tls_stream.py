"""Frames over TLS: every size, with buffers that are full, and columns that are placed."""

from __future__ import annotations

import random
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fleet_sparse.keys import SERVER_NAME, read_keys
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import Connection, FrameMemory
from fleet_sparse.wire.tls_stream import client_context, server_context
from support.job_keys import make_keys

MAX_BYTES = 64 << 20
RECORD = 16 << 10


def shaken(client: ssl.SSLSocket, server: ssl.SSLSocket) -> None:
    """Completes the handshake of two ends in one thread."""
    waiting = [client, server]
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected ends with small buffers that never block."""
    directory = str(make_keys(tmp_path / "keys"))
    plain = socket.socketpair()
    for end in plain:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client = client_context(read_keys(directory, "trainer")).wrap_socket(
        plain[0], do_handshake_on_connect=False, server_hostname=SERVER_NAME
    )
    server = server_context(read_keys(directory, "pserver")).wrap_socket(
        plain[1], do_handshake_on_connect=False, server_side=True
    )
    shaken(client, server)
    yield client, server
    client.close()
    server.close()


def connection(stream: socket.socket, place: Callable[..., list[memoryview] | None] | None = None) -> Connection:
    return Connection(stream, MAX_BYTES, FrameMemory(), lambda: None, place=place)


def passed(sender: Connection, receiver: Connection, frames: Sequence[Sequence[Buffer]]) -> list[list[bytes]]:
    """What arrives of frames, if each end only acts when it is polled, as in the loops of pservers and workers."""
    received: list[list[bytes]] = []
    waiting = list(frames)
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    while len(received) < len(frames):
        if not sender.writer.num_waiting and waiting:
            sender.writer.send(waiting.pop(0), sender.socket)
        elif sender.writer.num_waiting:
            sender.flush()
        is_ready = bool(poll.poll(0))
        assert is_ready or waiting or sender.writer.num_waiting, "nothing moves"
        while is_ready:
            try:
                frame = receiver.receive()
            except BlockingIOError:
                break
            if frame is not None:
                received.append([bytes(part) for part in frame])
            is_ready = receiver.may_have_more
    return received


def frames_of(seed: int) -> list[list[bytes]]:
    draw = random.Random(seed)
    sizes = [0, 1, 8, 100, RECORD - 24, RECORD, RECORD + 1, 3 * RECORD, 100_000]
    return [
        [draw.randbytes(max(draw.choice(sizes) + draw.randint(-40, 40), 0)) for _ in range(draw.randint(1, 5))]
        for _ in range(40)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_frames_of_any_size_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket], seed: int) -> None:
    frames = frames_of(seed)
    assert passed(connection(ends[0]), connection(ends[1]), frames) == frames


@pytest.mark.parametrize("num_bytes", [100, RECORD - 48, RECORD, RECORD + 8, 5 * RECORD, 1 << 20])
def test_columns_arrive_where_they_belong(ends: tuple[socket.socket, socket.socket], num_bytes: int) -> None:
    places: list[bytearray] = []

    def place(head: bytes, lengths: Sequence[int]) -> list[memoryview]:
        places[:] = [bytearray(length) for length in lengths]
        return [memoryview(each) for each in places]

    head, columns = b"h" * 128, [random.Random(1).randbytes(num_bytes) for _ in range(2)]
    following = [[b"small"], [b"x" * RECORD]]
    sent = [[head, *columns], *following]
    assert passed(connection(ends[0]), connection(ends[1], place), sent) == sent
    assert [bytes(each) for each in places] == columns


def test_the_end_of_a_stream_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    receiver = connection(ends[1])
    connection(ends[0]).writer.send([b"last"], ends[0])
    ends[0].shutdown(socket.SHUT_RDWR)
    assert receiver.receive() == [b"last"]
    with pytest.raises(OSError, match="ended"):
        receiver.receive()


def test_changed_bytes_end_a_stream(ends: tuple[socket.socket, socket.socket]) -> None:
    socket.socket.send(ends[0], b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that no key has made
    with pytest.raises(ssl.SSLError):
        connection(ends[1]).receive()
