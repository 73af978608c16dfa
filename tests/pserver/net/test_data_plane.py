from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zmq

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, SettingError
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.data_plane import DataPlane
from fleet_sparse.pserver.net.streams import Peer, Streams
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Op
from fleet_sparse.wire.row_dtype import RowDtype
from support.shards import SGD, FrameClient, code_of, floats, ids_of, make_shard, pull, push
from support.steps import SYNC_MODE, Worker, asks_for, make_job, rows_of
from support.streams import StreamSocket

MAX_BYTES = 1 << 20

Socket = Any  # of ZeroMQ, or StreamSocket


class Running:
    """A data plane in a thread, and sockets to it."""

    def __init__(self, kind: str = "zmq") -> None:
        self.kind = kind
        self.shard = make_shard(SGD)
        self.streams = Streams(max_frame_bytes=MAX_BYTES)
        self.plane = DataPlane(self.shard, max_frame_bytes=MAX_BYTES, streams=self.streams, zmq_host="127.0.0.1")
        self.thread = threading.Thread(target=self.plane.run)
        self.thread.start()
        self.context = zmq.Context()
        self.sockets: list[Socket] = []

    def dial(self) -> Socket:
        if self.kind == "stream":
            self.sockets.append(StreamSocket(self.streams.endpoint))
            return self.sockets[-1]
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
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


@pytest.fixture(params=["zmq", "stream"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running(request.param)
    yield made
    made.close()


def asked(socket: Socket, frame: Frame) -> Frame:
    socket.send_multipart(encode(frame))
    return decode(socket.recv_multipart(), max_bytes=MAX_BYTES)


def test_rows_past_the_copy_threshold_arrive_whole(running: Running) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    ids = np.arange(50_000, dtype=np.int64)
    grads = np.repeat(np.arange(50_000, dtype=np.float32), 2).reshape(-1, 2)
    asked(socket, client.frame(Op.PUSH, push(SGD, ids, grads)))
    reply = asked(socket, client.frame(Op.PULL, pull(SGD, ids)))
    assert reply.blocks[0].rows is not None
    assert np.array_equal(reply.blocks[0].rows, 0.5 - grads)


@pytest.mark.parametrize("parts", [[b""], [b"x"] * 100])
def test_malformed_message_gets_an_error(running: Running, parts: list[bytes]) -> None:
    client, socket = FrameClient(running.shard), running.dial()
    socket.send_multipart(parts)
    assert code_of(decode(socket.recv_multipart(), max_bytes=MAX_BYTES)) is ErrorCode.MALFORMED
    assert code_of(asked(socket, client.frame(Op.PULL, pull(SGD, ids_of(7))))) is None


def test_message_past_the_limit_ends_its_connection_only(running: Running) -> None:
    client, bad, good = FrameClient(running.shard), running.dial(), running.dial()
    with suppress(ConnectionError):
        bad.send_multipart([bytes(MAX_BYTES + 1)])
    assert code_of(asked(good, client.frame(Op.PULL, pull(SGD, ids_of(7))))) is None
    with suppress(ConnectionError, zmq.Again):
        bad.rcvtimeo = 0
        bad.recv_multipart()
        raise AssertionError("it was answered")


def test_task_runs_in_the_thread_of_the_requests(running: Running) -> None:
    assert running.on_data_thread(threading.get_ident) == running.thread.ident


def test_requests_run_between_tasks_that_post_one_another(running: Running) -> None:
    enough = threading.Event()

    def go_on() -> None:
        if not enough.is_set():
            running.plane.post(go_on)

    running.plane.post(go_on)
    client, socket = FrameClient(running.shard), running.dial()
    try:
        assert asked(socket, client.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))).header.push_seq == 1
    finally:
        enough.set()


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


def test_replies_that_wait_keep_their_rows(running: Running) -> None:
    """A client reads nothing while others are answered; rows of its replies are not those of the others."""
    wide = TableSpec(name="wide", dim=64, rule="sgd", initializer=constant(0.0))
    running.on_data_thread(lambda: running.shard.add_table(wide))
    client, slow, good = FrameClient(running.shard), running.dial(), running.dial()
    all_ids = np.arange(40_000, dtype=np.int64)
    for ids in np.split(all_ids, 40):
        grads = np.repeat(-ids.astype(np.float32), 64).reshape(-1, 64)
        assert code_of(asked(good, client.frame(Op.PUSH, push(wide, ids, grads)))) is None
        client.seq += 1
    batches = np.split(all_ids, 40)
    frames = [encode(client.frame(Op.PULL, pull(wide, ids))) for ids in batches]
    sending = threading.Thread(target=lambda: [slow.send_multipart(frame) for frame in frames])
    sending.start()
    for frame, ids in zip(frames[::-1], batches[::-1], strict=True):
        good.send_multipart(frame)
        assert np.array_equal(received(good).blocks[0].rows[:, 0], ids)
    for ids in batches:
        assert np.array_equal(received(slow).blocks[0].rows[:, 63], ids)
    sending.join(20)


# Replies that come later


def received(socket: Socket) -> Frame:
    return decode(socket.recv_multipart(), max_bytes=MAX_BYTES)


def sync_workers(running: Running, num_workers: int = 2) -> list[tuple[Worker[Shard], Socket]]:
    _, workers = running.on_data_thread(lambda: make_job(SYNC_MODE, num_workers, shard=running.shard))
    return [(worker, running.dial()) for worker in workers]


def push_one(worker: Worker[Shard]) -> Frame:
    return worker.frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))


def test_rows_that_had_to_wait_reach_each_of_many_clients(running: Running) -> None:
    workers = sync_workers(running, 8)
    for worker, socket in workers[:-1]:
        socket.send_multipart(encode(push_one(worker)))
        assert received(socket).header.op is Op.WAIT
        assert asked(socket, worker.frame(Op.PULL, asks_for(SGD, 7))).header.op is Op.WAIT
    last, socket = workers[-1]
    asked(socket, push_one(last))
    for _, waiting in workers[:-1]:
        assert received(waiting).header.op is Op.ACK
        assert rows_of(received(waiting)) == [[[-0.5, -0.5]]]


def test_error_that_a_task_brings_about_reaches_those_that_wait(running: Running) -> None:
    (first, to_first), _ = sync_workers(running)
    asked(to_first, push_one(first))
    running.on_data_thread(lambda: running.shard.evict_worker(1, "it gave no sign of life for 30 s"))
    late = received(to_first)
    assert code_of(late) is ErrorCode.WORKER_LOST
    assert late.error is not None
    assert late.error.number == 1


def test_deferred_reply_goes_to_the_newest_connection(running: Running) -> None:
    (first, to_first), (second, to_second) = sync_workers(running)
    frame = push_one(first)
    assert asked(to_first, frame).header.op is Op.WAIT
    to_first.close()
    again = running.dial()
    assert asked(again, frame).header.op is Op.WAIT
    asked(to_second, push_one(second))
    assert received(again).header.op is Op.ACK


def test_streams_of_clients_that_went_away_are_freed() -> None:
    before = num_peers()
    running = Running("stream")
    workers = sync_workers(running, 9)
    for worker, socket in workers[:-1]:
        assert asked(socket, push_one(worker)).header.op is Op.WAIT
        socket.close()
    deadline = time.monotonic() + 20
    while running.on_data_thread(num_peers) > before + 1:
        assert time.monotonic() < deadline
    assert asked(workers[-1][1], push_one(workers[-1][0])).header.op is Op.ACK
    running.close()


def num_peers() -> int:
    gc.collect()
    return sum(type(each) is Peer for each in gc.get_objects())


def test_client_that_went_away_keeps_no_reply_from_the_others(running: Running) -> None:
    (first, to_first), (second, to_second), (third, to_third) = sync_workers(running, 3)
    for worker, socket in ((first, to_first), (second, to_second)):
        asked(socket, push_one(worker))
    to_first.close()
    asked(to_third, push_one(third))
    assert received(to_second).header.op is Op.ACK


def test_bytes_of_late_replies_are_counted(running: Running) -> None:
    (first, to_first), (second, to_second) = sync_workers(running)
    requests = [encode(push_one(worker)) for worker in (first, second)]
    replies = []
    for socket, request in zip((to_first, to_second), requests, strict=True):
        socket.send_multipart(request)
        replies.append(socket.recv_multipart())
    replies.append(to_first.recv_multipart())
    traffic = running.on_data_thread(lambda: running.plane.traffic)
    assert traffic.bytes_received == sum(len(part) for request in requests for part in request)
    assert traffic.bytes_sent == sum(len(part) for reply in replies for part in reply)


@pytest.mark.parametrize("kind", ["zmq", "stream"])
def test_request_at_hand_is_answered_before_the_end(kind: str) -> None:
    running = Running(kind)
    client, socket = FrameClient(running.shard), running.dial()
    begun, go_on = threading.Event(), threading.Event()
    table: Any = running.shard.tables[SGD.table_id].table
    pull_rows = table.pull

    def slow(block: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return pull_rows(block)

    table.pull = slow
    request = client.frame(Op.PULL, pull(SGD, ids_of(7), dtype=RowDtype.BFLOAT16))  # not plain: `pull` answers it
    socket.send_multipart(encode(request))
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
        DataPlane(shard, zmq_host="203.0.113.77", max_frame_bytes=MAX_BYTES)


def test_workers_of_one_step_may_come_by_different_channels() -> None:
    running = Running("zmq")
    _, (first, second) = running.on_data_thread(lambda: make_job(SYNC_MODE, 2, shard=running.shard))
    to_first = running.dial()
    running.kind = "stream"
    to_second = running.dial()
    assert asked(to_first, push_one(first)).header.op is Op.WAIT
    assert asked(to_second, push_one(second)).header.op is Op.ACK
    assert received(to_first).header.op is Op.ACK
    running.close()
