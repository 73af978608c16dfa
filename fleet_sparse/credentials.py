"""Credentials: the one value through which a process opens its channels and servers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True)
class Credentials:
    """The credentials that this process shows and requires. It has no keys yet: all connections are plain."""

    def grpc_channel(self, endpoint: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Opens a channel to the control plane at `host:port`."""
        return grpc.insecure_channel(endpoint, options=options)

    def add_grpc_port(self, server: grpc.aio.Server, address: str) -> int:
        """Binds a control plane to `host:port` and returns the port.

        Raises:
            RuntimeError: The address cannot be bound.
        """
        return server.add_insecure_port(address)

    def protect_zmq(self, zmq_socket: Any) -> None:
        """Sets up a ZeroMQ socket before it is bound or connected."""

    def protect_stream(self, stream: socket.socket) -> socket.socket:
        """Returns the socket through which a connected stream is read and written."""
        return stream


NO_KEYS = Credentials()
"""Credentials of a process without keys."""
