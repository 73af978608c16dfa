"""Proxies that lose messages."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Callable

import zmq

from fleet_sparse.pserver.net.streams import Peer, Streams
from fleet_sparse.settings import Settings
from fleet_sparse.wire.stream import socket_to
from fleet_sparse.worker.net.stream_channel import StreamChannel


class LossyProxy:
    """Between DEALER sockets and one ROUTER: each message of either direction is dropped, doubled or passed on.

    Attributes:
        endpoint: `host:port` to connect to.
        num_dropped: Messages dropped so far.
        chance: Of a message to be dropped, and as much again of being doubled; 0 passes all.
    """

    def __init__(self, endpoint: str, *, chance: float, seed: int) -> None:
        self.chance = chance
        self.num_dropped = 0
        self._random = random.Random(seed)
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.endpoint = f"127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back = f"tcp://{endpoint}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}  # one for each peer, so that the pserver distinguishes them
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for back in self._backs.values():
            back.close(0)
        self._front.close(0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(20))
            if self._front in ready:
                peer, *parts = self._front.recv_multipart()
                if peer not in self._backs:
                    self._backs[peer] = self._context.socket(zmq.DEALER)
                    self._backs[peer].connect(self._back)
                    poller.register(self._backs[peer], zmq.POLLIN)
                self._pass(self._backs[peer].send_multipart, parts)
            for peer, back in self._backs.items():
                if back in ready:
                    self._pass(self._front.send_multipart, [peer, *back.recv_multipart()])

    def _pass(self, send: Callable[[list[bytes]], object], parts: list[bytes]) -> None:
        lot = self._random.random()
        if lot < self.chance:
            self.num_dropped += 1
            return
        for _ in range(2 if lot < 2 * self.chance else 1):
            send(parts)


class LossyStreamProxy:
    """As `LossyProxy`, between streams: whole frames are lost.

    Args:
        endpoint: Stream of a pserver.
        chance: As `LossyProxy`.
        seed: As `LossyProxy`.

    Attributes:
        endpoint: Stream to connect to.
        num_dropped: Messages dropped so far.
    """

    def __init__(self, endpoint: str, *, chance: float, seed: int) -> None:
        self.num_dropped = 0
        self._chance = chance
        self._random = random.Random(seed)
        self._front = Streams(max_frame_bytes=Settings().max_frame_bytes)
        self.endpoint = self._front.endpoint
        self._back = endpoint
        self._backs: dict[Peer, StreamChannel] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()
        for back in self._backs.values():
            back.close()
        self._front.close()

    def _run(self) -> None:
        while not self._stopping:
            self._front.poll(0.001)
            request = self._front.receive()
            if request is not None:
                connection, parts = request
                if connection not in self._backs:
                    self._backs[connection] = StreamChannel([self._back], Settings())
                for _ in range(self._times()):
                    self._backs[connection].send(0, parts)
            for connection, back in self._backs.items():
                message = back.receive(0.001)
                for _ in range(0 if message is None else self._times()):
                    assert message is not None
                    connection.send(message[1])

    def _times(self) -> int:
        lot = self._random.random()
        self.num_dropped += lot < self._chance
        return 0 if lot < self._chance else 2 if lot < 2 * self._chance else 1


class CuttingProxy:
    """Between TCP connections and one listener: cuts them all, in the middle of anything, each time `cut` is called.

    Args:
        endpoint: `host:port` of a ROUTER, or of a stream, `unix:<name>` or `tcp:<host>:<port>`.

    Attributes:
        endpoint: To connect to, of the same kind of channel.
    """

    def __init__(self, endpoint: str) -> None:
        is_stream = endpoint.startswith(("unix:", "tcp:"))
        self._target = endpoint if is_stream else f"tcp:{endpoint}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"{'tcp:' if is_stream else ''}127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._cut = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """Closes all connections; new ones are accepted at once."""
        self._cut.set()

    def move(self, endpoint: str) -> None:
        """Leads to another listener of the same kind from now on; closes all connections."""
        self._target = endpoint if endpoint.startswith(("unix:", "tcp:")) else f"tcp:{endpoint}"
        self.cut()

    def close(self) -> None:
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopping:
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                        self._pass(selector, key.fileobj)
                if self._cut.is_set():
                    self._cut.clear()
                    self._end_all(selector)
            self._end_all(selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        far, target = socket_to(self._target)
        try:
            far.connect(target)
        except ConnectionRefusedError:  # nobody listens there any more
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            if one.family != socket.AF_UNIX:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _pass(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        try:
            data = one.recv(1500)  # so that a cut falls into the middle of a message
            if data:
                self._pairs[one].sendall(data)
                return
        except OSError:
            pass
        self._end(selector, one)

    def _end(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._pairs.pop(one)
        self._pairs.pop(other)
        for end in (one, other):
            selector.unregister(end)
            end.close()

    def _end_all(self, selector: selectors.BaseSelector) -> None:
        while self._pairs:
            self._end(selector, next(iter(self._pairs)))
