"""Which channel a worker talks through: streams where the pservers are near, ZeroMQ where they are not."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
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
    registrations: Sequence[Registration], settings: Settings, credentials: Credentials = NO_KEYS
) -> Channel:
    """A channel to the pservers that answered, of the kind that `settings.channel` says.

    Args:
        registrations: Of all shards, in order.
        settings: With `auto`: streams if all pservers listen for them and let this process connect, else ZeroMQ.
        credentials: Credentials of this process.

    Raises:
        SettingError: `stream` is asked for, and a pserver does not listen for them.
    """
    if settings.channel != "zmq":
        without = next((each for each in registrations if not each.stream_endpoint), None)
        if without is None and (settings.channel == "stream" or all(map(_is_near, registrations))):
            return StreamChannel([each.stream_endpoint for each in registrations], settings, credentials=credentials)
        if without is not None and settings.channel == "stream":
            raise SettingError(
                f"FLEET_SPARSE_CHANNEL: is stream, but shard {without.shard} at {without.data_endpoint} does not "
                "listen for streams. Set it on the pservers too"
            )
    return ZmqChannel([each.data_endpoint for each in registrations], settings, credentials)


def _is_near(registration: Registration) -> bool:
    """Whether this process can connect to a pserver's streams; in another container it may not."""
    probe, address = socket_to(registration.stream_endpoint)
    with probe:
        probe.settimeout(_CONNECT_S)
        try:
            _connect(probe, address)
            reason = "" if is_trusted(probe) else "its user is another one"
        except OSError as error:
            reason = str(error)
    if reason:
        logger.info("shard %d: no stream (%s), ZeroMQ instead", registration.shard, reason)
    return not reason


def _connect(probe: socket.socket, address: Any) -> None:
    """Connects; a Unix socket does not wait by itself while too many others do."""
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            probe.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_S)
