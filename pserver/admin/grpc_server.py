"""The control plane of a pserver: the gRPC server around `Control`, with an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.wire.control import MAX_MESSAGE_BYTES, METHODS, SERVICE, to_status

from ..endpoints import cannot_bind
from .service import Control

_log = logging.getLogger(__name__)

# Replies on their way when the server stops have so long to arrive; then calls that wait are cancelled.
LAST_REPLIES_S = 1.0
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else two pservers could bind one port, and share its calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class ControlPlane:
    """Serves a `Control` from construction to `close`.

    Args:
        address: `host:port` to bind; port 0 lets the system choose.
        control: Makes what is served, inside the event loop, from the port that was bound.

    Attributes:
        port: That was bound.

    Raises:
        SettingError: The address cannot be bound.
    """

    def __init__(self, address: str, control: Control) -> None:
        self._control = control
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control plane", daemon=True)
        self._thread.start()
        self._watcher: asyncio.Task[None]
        self._server: grpc.aio.Server
        try:
            self.port = self._run(self._start(address))
        except BaseException:
            self._end_loop()
            raise

    def close(self) -> None:
        """Stops serving; replies on their way arrive. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._end_loop()

    async def _start(self, address: str) -> int:
        self._server = grpc.aio.server(options=_OPTIONS)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name), request.FromString, reply.SerializeToString)
            for name, (request, reply) in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise cannot_bind(address, error) from error
        await self._server.start()
        self._watcher = asyncio.create_task(self._control.watch_workers())
        return port

    async def _stop(self) -> None:
        self._control.close()
        self._watcher.cancel()
        await self._server.stop(LAST_REPLIES_S)

    def _handler(self, name: str) -> Callable[[Message, Any], Any]:
        async def handle(request: Message, context: Any) -> Message:
            try:
                return await self._control.call(name, request)
            except Exception as error:
                if not isinstance(error, FleetSparseError):
                    _log.exception("%s failed", name)
                else:
                    _log.warning("%s refused: %s", name, error)
                status = to_status(error)
                await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
                raise  # abort has raised

        return handle

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
