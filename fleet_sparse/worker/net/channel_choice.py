"""Opens the channel of a worker: streams, unless the job chose ZeroMQ."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import SettingError
from fleet_sparse.settings import Settings
from fleet_sparse.wire.stream import is_trusted, socket_to

from .channel import Channel
from .shard_link import Registration
from .stream_channel import StreamChannel
from .zmq_channel import ZmqChannel

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_PAUSE_S = 0.01


def open_channel(
    registrations: Sequence[Registration],
    settings: Settings,
    credentials: Credentials = NO_KEYS,
    *,
    on_lost: Callable[[int], None] | None = None,
) -> Channel:
    """Opens the channel to the pservers that `settings.channel` selects.

    Args:
        registrations: Registrations of all shards, in order.
        settings: With `auto`: streams, or ZeroMQ if the pservers accept only that.
        credentials: Credentials of this process.
        on_lost: Called inside `receive` or `send` with the index of a connection that was lost; ZeroMQ does not say so.

    Raises:
        SettingError: The pservers do not accept the selected channel, or this process may not use their Unix sockets.
    """
    kind = settings.channel
    if kind == "auto":
        kind = "stream" if any(each.stream_endpoint for each in registrations) else "zmq"
    for each in registrations:
        if not (each.stream_endpoint if kind == "stream" else each.data_endpoint):
            raise SettingError(
                f"FLEET_SPARSE_CHANNEL: is {settings.channel}, but shard {each.shard} does not accept {kind!r}. "
                "Give workers and pservers the same value"
            )
    if kind == "zmq":
        if credentials.keys is not None:
            raise SettingError(
                "FLEET_SPARSE_KEYS: is set, and the pservers accept only ZeroMQ, which has no keys. Leave out "
                "FLEET_SPARSE_CHANNEL, and give pservers the keys too"
            )
        return ZmqChannel([each.data_endpoint for each in registrations], settings)
    if settings.channel == "auto":
        for each in registrations:
            if each.stream_endpoint.startswith("unix:"):
                _check_reachable(each)
    endpoints = [each.stream_endpoint for each in registrations]
    return StreamChannel(endpoints, settings, credentials=credentials, on_lost=on_lost)


def _check_reachable(registration: Registration) -> None:
    """Raises if this process cannot use a pserver's Unix socket, as in another container or as another user."""
    probe, address = socket_to(registration.stream_endpoint)
    with probe:
        probe.settimeout(_CONNECT_S)
        try:
            _connect(probe, address)
            reason = "" if is_trusted(probe) else "the pserver runs as another user"
        except OSError as error:
            reason = str(error)
    if reason:
        raise SettingError(
            f"shard {registration.shard}: cannot connect to its Unix socket ({reason}). Run workers and pservers as "
            "one user in one network namespace, or set FLEET_SPARSE_CHANNEL=zmq for all of them"
        )


def _connect(probe: socket.socket, address: Any) -> None:
    """Connects; a Unix socket does not wait by itself while too many others wait to be accepted."""
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            probe.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_S)
