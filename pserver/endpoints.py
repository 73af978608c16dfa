"""Endpoints: where a pserver may listen, decided from the addresses of all pservers of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.endpoints import LOOPBACK, Address
from fleet_sparse.errors import SettingError
from fleet_sparse.settings import Settings


class Endpoints(NamedTuple):
    """What to bind, and what to tell workers."""

    control: Address
    data_host: str
    """Address to bind the data plane to."""
    advertised_host: str
    """Host that workers find the data plane at."""
    is_exposed: bool
    """Other machines can reach it, without keys."""


class DataEndpoints(NamedTuple):
    """Where workers find the data plane."""

    zmq: str
    """`host:port` of its ROUTER."""
    stream: str = ""
    """`unix:<name>` or `tcp:<host>:<port>` where it listens for streams; empty if nowhere."""


def choose(
    control: Address, servers: Sequence[Address], settings: Settings, *, is_local: Callable[[str], bool]
) -> Endpoints:
    """Where to listen: on 127.0.0.1 if all pservers are on this machine; else on the address that workers know, if that
    is allowed without keys.

    Args:
        control: The address of this pserver in PADDLE_PSERVERS_IP_PORT_LIST.
        servers: All of that list.
        settings: `insecure` and `data_host` count.
        is_local: Whether a host is this machine.

    Raises:
        SettingError: It is not allowed, or `control` is not this machine's.
    """
    elsewhere = next((server for server in servers if not is_local(server.host)), None)
    if not is_local(control.host):
        raise SettingError(f"control address {control}: it is not an address of this machine")
    if elsewhere is None:
        return Endpoints(Address(LOOPBACK, control.port), LOOPBACK, LOOPBACK, is_exposed=False)
    if not settings.insecure:
        raise SettingError(
            f"pserver {elsewhere}: it is on another machine, so this one would listen to other machines, without keys. "
            "On a network that you trust set FLEET_SPARSE_INSECURE=1"
        )
    return Endpoints(control, settings.data_host or control.host, control.host, is_exposed=True)
