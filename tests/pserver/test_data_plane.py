from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
import zmq

from fleet_sparse.errors import ErrorCode, SettingError
from fleet_sparse.pserver.data_plane import DataPlane
from fleet_sparse.wire.frames import Frame, Op, decode, encode
from support.shards import SGD, FrameClient, code_of, floats, ids_of, make_shard, pull, push

MAX_BYTES = 1 << 20


class Running:
    """A data plane in a thread, and sockets to it."""

    def __init__(self) -> None:
        self.shard = make_shard(SGD)
        self.plane = DataPlane(self.shard, host="127.0.0.1", max_frame_bytes=MAX_BYTES)
        self.thread = threading.Thread(target=self.plane.run)
        self.thread.start()
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def dial(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = 20_000
        socket.connect(f"tcp://127.0.0.1:{self.plane.port}")
        self.sockets.append(socket)
        return socket

    def on_data_thread(self, task: Callable[[], Any]) -> Any:
        return self.plane.post(task).result(20)

    def close(self) -> None:
        self.plane.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        for socket in self.sockets:
            socket.close()
        self.context.term()
        self.shard.close()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


def asked(socket: zmq.Socket[bytes], frame: Frame) -> Frame:
    socket.send_multipart(encode(frame))
    return decode(socket.recv_multipart(), max_bytes=MAX_BYTES)


def test_requests_are_answered_over_tcp(running: Running) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    assert asked(socket, client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))).header.push_seq == 1
    reply = asked(socket, client.frame(Op.PULL, pull(SGD, ids_of(7))))
    assert reply.blocks[0].rows is not None
    assert reply.blocks[0].rows.tolist() == [[-0.5, -0.5]]


def test_push_sent_twice_over_tcp_is_applied_once(running: Running) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    frame = client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))
    assert [asked(socket, frame).header.push_seq for _ in range(2)] == [1, 1]
    assert running.on_data_thread(lambda: client.rows(SGD, 7)) == [[-0.5, -0.5]]


def test_rows_past_the_copy_threshold_arrive_whole(running: Running) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    ids = np.arange(50_000, dtype=np.int64)
    grads = np.repeat(np.arange(50_000, dtype=np.float32), 2).reshape(-1, 2)
    asked(socket, client.frame(Op.PUSH, push(SGD, ids, grads)))
    reply = asked(socket, client.frame(Op.PULL, pull(SGD, ids)))
    assert reply.blocks[0].rows is not None
    assert np.array_equal(reply.blocks[0].rows, 0.5 - grads)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b""], ErrorCode.MALFORMED),
        ([b"FSPW"], ErrorCode.MALFORMED),
        ([b"x" * 128], ErrorCode.MALFORMED),
        ([b"FSPW" + (9).to_bytes(2, "little") + bytes(122)], ErrorCode.VERSION),
        ([b"x"] * 100, ErrorCode.MALFORMED),
    ],
)
def test_malformed_message_gets_an_error_and_the_next_request_an_answer(
    running: Running, parts: list[bytes], code: ErrorCode
) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    socket.send_multipart(parts)
    assert code_of(decode(socket.recv_multipart(), max_bytes=MAX_BYTES)) is code
    assert code_of(asked(socket, client.frame(Op.PULL, pull(SGD, ids_of(7))))) is None


def test_message_past_the_limit_ends_its_connection_only(running: Running) -> None:
    client, bad, good = FrameClient(running.shard), running.dial(), running.dial()
    bad.send(bytes(MAX_BYTES + 1))
    assert code_of(asked(good, client.frame(Op.PULL, pull(SGD, ids_of(7))))) is None
    assert not bad.poll(0)


def test_task_runs_in_the_thread_of_the_requests(running: Running) -> None:
    assert running.on_data_thread(threading.get_ident) == running.thread.ident


def test_task_that_fails_fails_for_who_posted_it(running: Running) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        running.on_data_thread(fail)
    assert running.on_data_thread(lambda: 5) == 5


def test_task_runs_between_requests_that_never_end(running: Running) -> None:
    """A client that keeps a request in the queue at all times does not keep tasks out."""
    client, socket = FrameClient(running.shard), running.dial()
    message = encode(client.frame(Op.PULL, pull(SGD, ids_of(7))))
    done = threading.Event()

    def keep_asking() -> None:
        for _ in range(8):
            socket.send_multipart(message)
        while not done.is_set():
            socket.recv_multipart()
            socket.send_multipart(message)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        assert [running.on_data_thread(lambda: 5) for _ in range(20)] == [5] * 20
    finally:
        done.set()
        asking.join(20)


def test_bytes_of_frames_are_counted(running: Running) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    request = encode(client.frame(Op.PULL, pull(SGD, ids_of(7))))
    socket.send_multipart(request)
    reply = socket.recv_multipart()
    traffic = running.on_data_thread(lambda: running.plane.traffic)
    assert (traffic.bytes_received, traffic.bytes_sent) == (sum(map(len, request)), sum(map(len, reply)))


def test_request_at_hand_is_answered_before_the_end() -> None:
    running = Running()
    client, socket = FrameClient(running.shard), running.dial()
    begun, go_on = threading.Event(), threading.Event()
    store: Any = running.shard.held[SGD.table_id].values
    pull_rows = store.pull

    def slow(ids: Any, out: Any) -> None:
        begun.set()
        go_on.wait(20)
        pull_rows(ids, out)

    store.pull = slow
    socket.send_multipart(encode(client.frame(Op.PULL, pull(SGD, ids_of(7)))))
    assert begun.wait(20)
    running.plane.stop()
    go_on.set()
    assert code_of(decode(socket.recv_multipart(), max_bytes=MAX_BYTES)) is None
    running.close()


def test_task_after_the_end_is_cancelled() -> None:
    running = Running()
    running.close()
    with pytest.raises(CancelledError):
        running.plane.post(lambda: 5).result(20)


def test_address_of_another_machine_is_refused() -> None:
    shard = make_shard()
    with pytest.raises(SettingError, match=r"data plane: cannot bind to '203\.0\.113\.77'"):
        DataPlane(shard, host="203.0.113.77", max_frame_bytes=MAX_BYTES)
