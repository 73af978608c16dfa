"""Endpoints: where a pserver may listen, decided from the addresses of all pservers of the job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.errors import SettingError
from fleet_sparse.settings import Settings

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """A host, by name or number, and a port; 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of `host:port` or `[host]:port`.

        Raises:
            SettingError: It is neither.
        """
        host, colon, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise SettingError(f"address {text!r}: should be host:port, with a port of 0 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Endpoints(NamedTuple):
    """What to bind, and what to tell workers."""

    control: Address
    data_host: str
    """Address to bind the data plane to."""
    advertised_host: str
    """Host that workers find the data plane at."""
    is_exposed: bool
    """Other machines can reach it, without keys."""


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
    data_host = control.host if settings.data_host == Settings.data_host else settings.data_host
    return Endpoints(control, data_host, control.host, is_exposed=True)


def is_local(host: str) -> bool:
    """Whether all addresses of a host are this machine's: those that a socket can be bound to. False if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return all(_can_bind(family, address) for family, _, _, _, address in found)


def number_of(host: str) -> str:
    """The first address of a host, as a number.

    Raises:
        SettingError: It has none.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise SettingError(f"host {host!r}: it has no address: {error}") from error


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
