"""The data plane of a pserver: a ZeroMQ ROUTER, perhaps streams, and one thread that answers each request to its end.

That thread alone touches the shard. What other threads want of the shard they post; it runs between two requests.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import zmq

from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import SettingError
from fleet_sparse.wire.frame_format import Buffer

from ..engine.shard import Shard
from .requests import Answer, Traffic, answer, released
from .streams import Streams

Send = Callable[[list[Buffer]], None]
_Result = TypeVar("_Result")

# Above it sending without a copy is faster than copying into ZeroMQ's own buffer.
COPY_BELOW_BYTES = 64 << 10
# Messages of one client that wait here; further ones wait in its own queue, and TCP holds it back.
MAX_WAITING_REQUESTS = 16
# Replies to one client that wait for it; further ones are dropped, and its retry asks again.
MAX_WAITING_REPLIES = 256
HANDSHAKE_MS = 5000
LAST_REPLIES_MS = 1000
# Requests answered before the tasks of other threads are looked for again.
BURST = 16
PIPE_BYTES = 64 << 10


class _Task(NamedTuple):
    """What another thread wants done, and where it waits for the result."""

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
    """Answers frames for one shard. `run` in one thread; `post` and `stop` from any, `stop` from a signal handler too.

    Args:
        shard: Of that thread alone from now on.
        host: An address of this machine to bind to; the system chooses the port.
        max_frame_bytes: Largest frame to accept.
        streams: Whose requests it answers too, and which it closes.
        credentials: Credentials of this process.

    Attributes:
        port: That the system chose.
        traffic: Bytes so far.
        wake_fd: A byte written to it makes `run` look around; for `signal.set_wakeup_fd`. Without it, a signal that
            another thread takes, or that comes just before the wait, does not end it, and its handler runs after it.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        host: str,
        max_frame_bytes: int,
        streams: Streams | None = None,
        credentials: Credentials = NO_KEYS,
    ) -> None:
        self._shard = shard
        self._streams = streams
        self._max_frame_bytes = max_frame_bytes
        self._tasks: deque[_Task] = deque()
        self._peers: dict[bytes, Send] = {}  # of each client that waits for a reply
        self._stopping = False
        self._stopped = False
        # A pipe: an eventfd refuses the single byte that a signal writes.
        self._woken, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Not closed before: another thread may still post.
        weakref.finalize(self, _close_both, self._woken, self.wake_fd)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING_REQUESTS)
        self._socket.setsockopt(zmq.SNDHWM, MAX_WAITING_REPLIES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.LINGER, LAST_REPLIES_MS)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.copy_threshold = COPY_BELOW_BYTES
        credentials.protect_zmq(self._socket)
        self.traffic = Traffic()
        address = f"[{host}]" if ":" in host else host
        try:
            self.port = self._socket.bind_to_random_port(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise SettingError(f"data plane: cannot bind to {host!r}: {error}") from error

    def post(self, task: Callable[[], _Result]) -> Future[_Result]:
        """Has the data thread run `task` between two requests; the future has its result or what it raised.

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
        with contextlib.suppress(BlockingIOError):  # it is full: `run` will look around
            os.write(self.wake_fd, b"\0")

    def run(self) -> None:
        """Answers requests and runs tasks until `stop`, then closes."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        if self._streams is not None:
            poller.register(self._streams.fileno(), zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll(None if self._streams is None else self._streams.wait_ms()))
                if self._woken in ready:
                    os.read(self._woken, PIPE_BYTES)
                # Those that are here: one that is posted when another ends, as by a save, waits for a request to pass.
                for _ in range(len(self._tasks)):
                    if not self._stopping:
                        self._tasks.popleft().run()
                        self._send_released()
                if self._socket in ready:
                    self._answer_all(self._next_message)
                if self._streams is not None:
                    self._answer_all(self._next_of_streams)
        finally:
            self.close()

    def close(self) -> None:
        """Sends the replies on their way, for a second at most, and cancels all tasks. Not while `run` runs."""
        self._stopped = True
        self._cancel_tasks()
        if self._streams is not None:
            self._streams.close()
        self._socket.close()
        self._context.term()

    def _answer_all(self, next_request: Callable[[], tuple[Send, list[Buffer]] | None]) -> None:
        """Answers what is here; one request at least, then until there is something else to do."""
        for _ in range(BURST):
            request = next_request()
            if request is None:
                return
            send, parts = request
            reply = answer(self._shard, parts, self._max_frame_bytes)
            self.traffic.bytes_received += sum(map(len, parts))
            if reply.waits:
                self._peers[reply.client_id] = send
            self._reply(send, reply)
            self._send_released()
            if self._tasks or self._stopping:
                return

    def _next_message(self) -> tuple[Send, list[Buffer]] | None:
        try:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return partial(self._send_message, peer), [frame.buffer for frame in frames]

    def _next_of_streams(self) -> tuple[Send, list[Buffer]] | None:
        assert self._streams is not None
        request = self._streams.receive()
        return None if request is None else (request[0].send, request[1])

    def _send_released(self) -> None:
        for reply in released(self._shard):
            self._reply(self._peers[reply.client_id], reply)

    def _reply(self, send: Send, reply: Answer) -> None:
        self.traffic.bytes_sent += sum(map(len, reply.parts))
        send(reply.parts)

    def _send_message(self, peer: zmq.Frame, parts: list[Buffer]) -> None:
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
