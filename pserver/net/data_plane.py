"""DataPlane: one thread that answers requests from streams, or from a ZeroMQ socket if the job chose ZeroMQ.

Only that thread accesses the shard. Other threads post their tasks to it; they run between two requests.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import zmq

from fleet_sparse.errors import LogFailed, SettingError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer
from fleet_sparse.wire.stream import Message

from ..engine.shard import Shard
from ..lease.lease import Lease, lease_clock
from .held_replies import HeldReplies
from .protocol import AnyShard
from .requests import Answer, Traffic, answer, deferred_answers, forbid
from .straight_path import StraightPath
from .streams import Peer, Streams

_Result = TypeVar("_Result")

# Larger parts are sent without copying them into ZeroMQ's buffer, which is faster.
COPY_BELOW_BYTES = 64 << 10
# Messages of one client that wait here; more wait in its own queue, held back by TCP.
MAX_WAITING_REQUESTS = 16
# Replies that wait for one client; more are dropped, and the client sends its request again.
MAX_WAITING_REPLIES = 256
HANDSHAKE_MS = 5000
LAST_REPLIES_MS = 1000
# Requests answered before tasks of other threads are run.
BURST = 16
PIPE_BYTES = 64 << 10


class _Task(NamedTuple):
    """A task of another thread, and the future for its result."""

    task: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.task())
        except Exception as error:
            self.future.set_exception(error)


class DataPlane:
    """Answers frames for one shard. `run` is called by one thread, `post` and `stop` by any, also by signal handlers.

    ZeroMQ receives a multipart message as a whole before this process sees it: `MAXMSGSIZE` bounds each part, but
    nothing bounds the number of parts of a message that is never completed.

    Args:
        shard: Accessed only by that thread from now on.
        max_frame_bytes: Largest frame to accept.
        streams: Stream connections; closed with the data plane.
        zmq_host: Address of this machine to bind a ZeroMQ socket to, at a port that the system chooses; None for none.
        straight_path: As `Settings.straight_path`; a read-only shard has none.
        lease: Lease of the shard, without which nothing is answered; None if there is none.

    Attributes:
        port: Port of the ZeroMQ socket; 0 if there is none.
        traffic: Bytes so far.
        wake_fd: A byte written to it ends the wait of `run`; for `signal.set_wakeup_fd`. Without it, a signal that
            another thread gets, or that arrives just before the wait, does not end it.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(
        self,
        shard: AnyShard,
        *,
        max_frame_bytes: int,
        streams: Streams | None = None,
        zmq_host: str | None = None,
        straight_path: bool = Settings.straight_path,
        lease: Lease | None = None,
    ) -> None:
        self._shard = shard
        self._lease = lease
        self._straight_path: StraightPath | None = None
        if straight_path and isinstance(shard, Shard):
            self._straight_path = StraightPath(shard, max_frame_bytes)
        self._streams = streams
        self._max_frame_bytes = max_frame_bytes
        self._tasks: deque[_Task] = deque()
        # By id of each client with a deferred request: its stream, while that is open, or its identity on ZeroMQ.
        self._peers: weakref.WeakValueDictionary[bytes, Peer] = weakref.WeakValueDictionary()
        self._zmq_peers: dict[bytes, zmq.Frame] = {}
        self._stopping = False
        self._stopped = False
        # A pipe: an eventfd refuses the single byte that a signal writes.
        self._woken, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # It is not closed earlier, because another thread may still post.
        weakref.finalize(self, _close_both, self._woken, self.wake_fd)
        self._epoll = select.epoll()  # without streams, which have one of their own
        self._watch(self._woken)
        if streams is not None:
            streams.permits = self._permits
        self._logged: Shard | None = None  # the shard, if it has a log
        self._held: HeldReplies | None = None  # replies, if pushes are durable before they are acked
        if isinstance(shard, Shard) and shard.log is not None:
            self._logged = shard
            shard.log.writer.on_change = self._wake_up
            self._held = HeldReplies(shard.log.writer) if shard.log.is_synced else None
        self.traffic = Traffic()
        self.port = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        if zmq_host is not None:
            self._bind(zmq_host)

    def _bind(self, host: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING_REQUESTS)
        self._socket.setsockopt(zmq.SNDHWM, MAX_WAITING_REPLIES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.LINGER, LAST_REPLIES_MS)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.copy_threshold = COPY_BELOW_BYTES
        address = f"[{host}]" if ":" in host else host
        try:
            self.port = self._socket.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise SettingError(f"data plane: cannot bind to {host!r}: {error}") from error
        self._watch(int(self._socket.getsockopt(zmq.FD)))

    def post(self, task: Callable[[], _Result]) -> Future[_Result]:
        """Runs `task` in the data thread between two requests; the future has its result or exception.

        The future is cancelled if the data plane stops first.
        """
        future: Future[_Result] = Future()
        self._tasks.append(_Task(task, future))
        self._wake_up()
        if self._stopped:
            self._cancel_tasks()
        return future

    def stop(self) -> None:
        """Makes `run` return once the request at hand is answered."""
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full: `run` will wake up
            os.write(self.wake_fd, b"\0")

    def run(self) -> None:
        """Answers requests and runs tasks until `stop`, then closes.

        Raises:
            LeaseLost: Another pserver may answer for the shard.
            LogFailed: The log of the shard cannot be written. What it did not keep was not answered.
        """
        poll = self._poll if self._streams is None or self._socket is not None else self._streams.poll
        try:
            while not self._stopping:
                if self._woken in poll():
                    os.read(self._woken, PIPE_BYTES)
                if self._logged is not None:
                    self._follow_log(self._logged)
                # Only those posted so far: a task posted by another one, as by a save, runs after a request.
                for _ in range(len(self._tasks)):
                    if not self._stopping:
                        self._tasks.popleft().run()
                        self._send_deferred()
                if self._socket is not None:
                    self._answer_messages(self._socket)
                if self._streams is not None:
                    self._answer_streams(self._streams)
        finally:
            self.close()
        if self._logged is not None and self._logged.log is not None:
            self._logged.log.writer.check()
        if self._lease is not None:
            self._lease.check()

    def close(self) -> None:
        """Sends pending replies, for at most a second, and cancels all tasks. Not to be called during `run`."""
        self._stopped = True
        self._cancel_tasks()
        if self._held:
            self._wait_for_log()
        self._epoll.close()
        if self._streams is not None:
            self._streams.close()
        if self._socket is not None:
            self._socket.close()
        if self._context is not None:
            self._context.term()

    def _watch(self, fd: int) -> None:
        if self._streams is None:
            self._epoll.register(fd, select.EPOLLIN)
        else:
            self._streams.watch(fd)

    def _poll(self) -> Sequence[int]:
        """Waits until there is something to do; returns which file descriptors are readable, without those of peers."""
        timeout_s = None
        # Its descriptor reports changes only, so it is polled each time.
        if self._socket is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            timeout_s = 0.0
        if self._streams is not None:
            return self._streams.poll(timeout_s)
        return [number for number, _ in self._epoll.poll(timeout_s)]

    def _answer_streams(self, streams: Streams) -> None:
        """Answers requests until there is something else to do."""
        traffic = self.traffic
        for _ in range(BURST):
            request = streams.receive_message() if streams.ready else None
            if request is None:
                return
            peer, message = request
            plain = None if self._straight_path is None else self._straight_path.answer(message)
            if plain is not None:
                if not self._may_answer():
                    return
                traffic.bytes_received += plain.num_bytes_received
                traffic.bytes_sent += plain.num_bytes_sent
                if self._held is not None and plain.is_to_push:
                    self._hold(partial(peer.send_message, plain.message), plain.num_bytes_sent)
                else:
                    peer.send_message(plain.message)
                del request, message, plain  # so that their memory can be used again
            else:
                self._answer_message(streams, peer, message)
                del request, message
            if self._shard.deferred_replies:
                self._send_deferred()
            if self._tasks or self._stopping:
                return

    def _permits(self, peer: Peer, message: Message) -> bool:
        """Returns whether a client that is no trainer may make a request; if not, it is told."""
        refusal = forbid(self._shard, peer.role, message)
        if refusal is not None:
            peer.send(refusal.parts)
        return refusal is None

    def _answer_message(self, streams: Streams, peer: Peer, message: Message) -> None:
        parts = streams.split(peer, message)
        if parts is None:
            return
        reply = answer(self._shard, parts, self._max_frame_bytes)
        if not self._may_answer():
            return
        self.traffic.bytes_received += sum(map(len, parts))
        if reply.is_deferred:
            self._peers[reply.client_id] = peer
        self._send(reply, peer.send)

    def _answer_messages(self, socket: zmq.Socket[bytes]) -> None:
        """Answers requests until there is something else to do."""
        traffic = self.traffic
        for _ in range(BURST):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            parts = [frame.buffer for frame in frames]
            reply = answer(self._shard, parts, self._max_frame_bytes)
            if not self._may_answer():
                return
            traffic.bytes_received += sum(map(len, parts))
            if reply.is_deferred:
                self._zmq_peers[reply.client_id] = peer
            self._send(reply, partial(self._send_message, peer))
            del frames, parts, reply
            if self._shard.deferred_replies:
                self._send_deferred()
            if self._tasks or self._stopping:
                return

    def _send_deferred(self) -> None:
        for reply in deferred_answers(self._shard):
            if not self._may_answer():
                return
            peer = self._peers.get(reply.client_id)
            if peer is not None:
                self._send(reply, peer.send)
            elif reply.client_id in self._zmq_peers:
                self._send(reply, partial(self._send_message, self._zmq_peers[reply.client_id]))

    def _send(self, reply: Answer, send: Callable[[list[Buffer]], None]) -> None:
        """Sends a reply, or holds it if what it acknowledges is not durable."""
        num_bytes = sum(map(len, reply.parts))
        self.traffic.bytes_sent += num_bytes
        if self._held is not None and reply.is_to_push:
            self._hold(partial(send, reply.parts), num_bytes)
        else:
            send(reply.parts)

    def _hold(self, send: Callable[[], None], num_bytes: int) -> None:
        assert self._held is not None
        self._held.add(send, num_bytes)
        if self._held.are_too_many:
            self._wait_for_log()
        else:
            self._send_held()

    def _send_held(self) -> None:
        assert self._held is not None
        for send in self._held.take_due():
            if not self._may_answer():
                return
            send()

    def _wait_for_log(self) -> None:
        """Sends all replies that are held, once the log is durable."""
        assert self._logged is not None
        assert self._logged.log is not None
        with contextlib.suppress(LogFailed):  # which `run` raises
            self._logged.log.writer.sync()
            self._send_held()

    def _follow_log(self, shard: Shard) -> None:
        """Does what the thread of the log made possible."""
        if not self._may_answer():
            return
        if self._held is not None:
            self._send_held()
        shard.end_waits_for_room()
        if shard.deferred_replies:
            self._send_deferred()

    def _may_answer(self) -> bool:
        """Returns whether a reply that was made is true; if not, the data plane stops."""
        if self._lease is not None and lease_clock() >= self._lease.valid_until:
            self._lease.lose()  # another pserver may have answered
            self._stopping = True
            return False
        if self._logged is not None and self._logged.log is not None and self._logged.log.writer.fault is not None:
            self._stopping = True
            return False
        return True

    def _send_message(self, peer: zmq.Frame, parts: list[Buffer]) -> None:
        assert self._socket is not None
        self._socket.send_multipart([peer, *parts], copy=False)

    def _cancel_tasks(self) -> None:
        while True:
            try:
                self._tasks.popleft().future.cancel()
            except IndexError:
                return


def _close_both(one: int, other: int) -> None:
    os.close(one)
    os.close(other)
