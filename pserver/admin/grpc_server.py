"""The control plane of a pserver: a gRPC server around `ControlService`, with an event loop and thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from fleet_sparse.control_socket import ControlSocket
from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import ErrorCode, FleetSparseError, LogFailed, ProtocolError
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings
from fleet_sparse.wire.control import MAX_MESSAGE_BYTES, METHODS, SERVICE, to_status

from ..endpoints import cannot_bind
from ..lease.lease import Lease
from ..permissions import check_call
from ..throttled_log import ThrottledLog

_log = logging.getLogger(__name__)
_refusals = ThrottledLog(_log)


def _is_no_lost_reply(record: logging.LogRecord) -> bool:
    """Returns whether a record of gRPC is not that of a reply to a caller that waits no longer."""
    return not str(record.msg).startswith("ExecuteBatchError")


# gRPC would log a traceback for each such reply, and any client can wait too short.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_reply)

# When the server stops, replies under way have this long to arrive; then the calls that wait are cancelled.
LAST_REPLIES_S = 1.0
# Calls that have arrived and not begun.
MAX_PENDING_CALLS = 1 << 20
# A connection that says nothing is closed after this time; one that is established lasts as long as its peer answers.
HANDSHAKE_MS = 5000
MAX_CONNECTIONS = 16_384
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else two pservers could bind one port, and share its calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC cancels calls at random beyond 1000 that wait, which a large job passes at its start.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.http2.max_pings_without_data", 0),  # a worker may be silent for as long as it lives
]


class CallService(Protocol):
    """Answers the calls of the control plane, in one event loop."""

    async def call(self, method: str, request: Message) -> Message:
        """Returns the reply to a call of `wire.control.METHODS`.

        Raises:
            FleetSparseError: An error of ours, for the caller.
        """
        ...

    async def watch_workers(self) -> None:
        """Looks for lost workers periodically, until it is cancelled."""
        ...

    def close(self) -> None:
        """Ends the work of other threads soon. Any thread may call it."""
        ...

    def release_waiting(self) -> None:
        """Answers the calls that only wait for an event, so that the server can stop at once."""
        ...


class ControlPlane:
    """Serves a `CallService` from construction to `close`.

    Args:
        address: `host:port` to bind; port 0 lets the system choose. With a host that only this machine reaches it is a
            Unix socket that is bound, and the port is reserved, if `credentials` say so.
        service: Answers the calls, inside the event loop.
        settings: `heartbeat_s` and `worker_lost_s` are the interval and the deadline of heartbeats on connections.
        credentials: Credentials of this process.
        lease: Lease of the shard, without which nothing is answered; None if there is none.

    Attributes:
        port: The port that was bound.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        service: CallService,
        settings: Settings,
        credentials: Credentials = NO_KEYS,
        lease: Lease | None = None,
    ) -> None:
        self._service = service
        self._lease = lease
        self._settings = settings
        self._credentials = credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control plane", daemon=True)
        self._thread.start()
        self._watcher: asyncio.Task[None]
        self._server: grpc.aio.Server
        self._socket: ControlSocket | None = None
        try:
            self.port = self._run(self._start(address))
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Stops serving; replies under way arrive. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._end()

    async def _start(self, address: str) -> int:
        # Keeps gRPC's thread until the process ends: gRPC may wait for its end for ever (grpc/grpc#22365).
        grpc.aio.init_grpc_aio()
        self._server = grpc.aio.server(options=[*_OPTIONS, *_connections(self._settings)])
        # Requests are decoded by the handler: gRPC would log a traceback for each that is no message.
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name), None, reply.SerializeToString)
            for name, (_, reply) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self._socket = self._credentials.control_socket(Address.parse(address))
            bound = address if self._socket is None else f"unix:{self._socket.path}"
            port = self._credentials.add_grpc_port(self._server, bound)
        except (OSError, RuntimeError) as error:
            raise cannot_bind(address, error) from error
        await self._server.start()
        self._watcher = asyncio.create_task(self._service.watch_workers())
        return port if self._socket is None else self._socket.port

    async def _stop(self) -> None:
        self._service.close()
        self._watcher.cancel()
        self._service.release_waiting()
        try:
            await asyncio.wait_for(self._server.stop(LAST_REPLIES_S), 2 * LAST_REPLIES_S)
        except TimeoutError:
            _log.warning("control plane: gRPC has not stopped in %g s; the pserver ends without it", 2 * LAST_REPLIES_S)
        await _end_tasks()

    def _handler(self, name: str) -> Callable[[bytes, Any], Any]:
        async def handle(data: bytes, context: Any) -> Message:
            try:
                request = _decoded(name, data)
                check_call(self._credentials.role_of(context), name, request)
                answered: Message | Exception = await self._service.call(name, request)
            except Exception as error:
                if not isinstance(error, FleetSparseError | ConnectionAbortedError):
                    _log.exception("%s failed", name)
                else:
                    _refusals.warning("%s refused: %s", name, error)
                answered = error
            if self._lease is not None and self._lease.is_lost:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the pserver has lost its lease")
            if isinstance(answered, LogFailed | ConnectionAbortedError):  # callers ask the next process
                what = "its log has failed" if isinstance(answered, LogFailed) else "it is stopping"
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"the pserver ends, {what}")
            if isinstance(answered, Exception):
                status = to_status(answered)
                await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
                raise answered  # abort has raised
            return answered

        return handle

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._socket is not None:
            self._socket.close()


async def _end_tasks() -> None:
    """Waits for the other tasks of this loop, and cancels those that do not end within `LAST_REPLIES_S`.

    gRPC does not wait for the tasks of calls whose connection has ended, and a loop that ends before them logs errors.
    """
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(2):
        if left:
            _, left = await asyncio.wait(left, timeout=LAST_REPLIES_S)
        for task in left:
            task.cancel()


def _decoded(name: str, data: bytes) -> Message:
    """Returns the request of a call.

    Raises:
        ProtocolError: The bytes are no such message.
    """
    try:
        return METHODS[name][0].FromString(data)
    except DecodeError:
        raise ProtocolError(
            f"{name}: its {len(data)} bytes are no {METHODS[name][0].__name__}", code=ErrorCode.MALFORMED
        ) from None


def _connections(settings: Settings) -> list[tuple[str, int]]:
    """Returns the options with which the server bounds connections, and ends those silent for `worker_lost_s`."""
    interval_ms = round(1000 * settings.heartbeat_s)
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.keepalive_time_ms", max(interval_ms, 1)),
        ("grpc.keepalive_timeout_ms", max(round(1000 * settings.worker_lost_s) - interval_ms, 1)),
        ("grpc.http2.ping_timeout_ms", max(round(1000 * settings.worker_lost_s) - interval_ms, 1)),
    ]
