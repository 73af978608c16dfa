"""ZmqChannel: one DEALER socket for each shard, connected to the ROUTER of its pserver."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from fleet_sparse.net_addresses import LOOPBACK, Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.frame_format import Buffer

from .channel import Place
from .lane import Lane

_COPY_BELOW_BYTES = 64 << 10
"""Parts below this size are copied into ZeroMQ's buffers; sending larger ones in place takes less time than a copy."""
_SEND_QUEUE = 4096  # messages; far more than a client has in flight, so that only a fault fills it
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_HANDSHAKE_MS = 2000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 4000


class ZmqChannel:
    """Implements `Channel` over TCP.

    Args:
        endpoints: `host:port` of the data plane of each pserver, in the order of the shards.
        settings: Settings with the largest frame; a longer part that arrives ends the connection.
    """

    def __init__(self, endpoints: Sequence[str], settings: Settings) -> None:
        self.lane: Lane | None = None
        self._endpoints = [f"tcp://{endpoint}" for endpoint in endpoints]  # constant but for `move`
        # Constant after construction, as the next three.
        self._are_near = [Address.parse(endpoint).host == LOOPBACK for endpoint in endpoints]
        self._max_frame_bytes = settings.max_frame_bytes
        self._context = zmq.Context()
        self._lock = threading.RLock()  # guards closing `_wake_fd`; a signal handler may take it again
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets: list[zmq.Socket[bytes]] = []  # one thread at a time, from here down
        self._monitors: list[zmq.Socket[bytes]] = []
        self._connected: list[bool] = []
        self._ready: deque[int] = deque()
        self._shard_of: dict[zmq.Socket[bytes], int] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for shard in range(len(endpoints)):
            self._open(shard)

    @property
    def needs_receive(self) -> bool:
        """As `Channel`."""
        return False  # ZeroMQ has threads of its own

    def stays_on_machine(self, shard: int) -> bool:
        """As `Channel`."""
        return self._are_near[shard]

    def send(self, shard: int, parts: Sequence[Buffer]) -> bool:
        """As `Channel`."""
        socket = self._sockets[shard]
        last = len(parts) - 1
        for index, part in enumerate(parts):
            flags = zmq.DONTWAIT if index == last else zmq.DONTWAIT | zmq.SNDMORE
            try:
                socket.send(part, flags, copy=len(part) < _COPY_BELOW_BYTES)
            except zmq.Again:
                return False  # only at the first part: zmq takes a message whole or not at all
        return True

    def receive(self, timeout_s: float) -> tuple[int, list[Buffer]] | None:
        """As `Channel`."""
        if not self._ready:
            self._poll(timeout_s)
        while self._ready:
            shard = self._ready.popleft()
            try:
                frames = self._sockets[shard].recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                continue
            return shard, [frame.buffer for frame in frames]
        return None

    def place_columns(self, place: Place) -> None:
        """As `Channel`: ZeroMQ receives into memory of its own."""

    def withdraw(self, shard: int) -> None:
        """As `Channel`: no column is placed."""

    def watch_losses(self, on_lost: Callable[[int], None]) -> None:
        """As `Channel`."""

    def wake(self) -> None:
        """As `Channel`."""
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def reopen(self, shard: int) -> None:
        """As `Channel`; the pserver sees a new peer."""
        self._close(shard)
        self._open(shard)

    def move(self, shard: int, stream_endpoint: str, zmq_endpoint: str) -> None:
        """As `Channel`."""
        self._endpoints[shard] = f"tcp://{zmq_endpoint}"
        self.reopen(shard)

    def condition(self, shard: int) -> str:
        """As `Channel`."""
        monitor = self._monitors[shard]
        while monitor.poll(0):
            self._connected[shard] = recv_monitor_message(monitor)["event"] == zmq.EVENT_CONNECTED
        return "connected" if self._connected[shard] else "not connected"

    def close(self) -> None:
        """As `Channel`."""
        with self._lock:
            if self._wake_fd < 0:
                return
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        for shard in range(len(self._endpoints)):
            self._close(shard)
        self._context.term()

    def _poll(self, timeout_s: float) -> None:
        for ready, _ in self._poller.poll(int(timeout_s * 1000 + 0.999)):
            if isinstance(ready, int):
                os.eventfd_read(ready)
            else:
                self._ready.append(self._shard_of[ready])

    def _open(self, shard: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = "[" in self._endpoints[shard]
        socket.sndhwm = _SEND_QUEUE
        socket.rcvhwm = 0  # bounded by the replies that requests asked for
        socket.maxmsgsize = self._max_frame_bytes
        socket.reconnect_ivl = _RECONNECT_MS
        socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        socket.connect(self._endpoints[shard])
        self._poller.register(socket, zmq.POLLIN)
        self._shard_of[socket] = shard
        self._sockets[shard : shard + 1] = [socket]
        self._monitors[shard : shard + 1] = [monitor]
        self._connected[shard : shard + 1] = [False]

    def _close(self, shard: int) -> None:
        socket = self._sockets[shard]
        self._poller.unregister(socket)
        del self._shard_of[socket]
        socket.disable_monitor()
        self._monitors[shard].close()
        socket.close()
