"""Addresses of pservers, and which of them are this machine's. Both sides decide from the same list."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.errors import SettingError

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


def as_reached(endpoints: Sequence[str], *, is_local: Callable[[str], bool]) -> list[str]:
    """What a worker connects to: 127.0.0.1 if all pservers are on this machine, because they then listen there alone.

    Args:
        endpoints: `host:port` of each pserver, as PADDLE_PSERVERS_IP_PORT_LIST has them.
        is_local: Whether a host is this machine.

    Raises:
        SettingError: One is no `host:port`.
    """
    addresses = [Address.parse(endpoint) for endpoint in endpoints]
    if all(is_local(address.host) for address in addresses):
        addresses = [Address(LOOPBACK, address.port) for address in addresses]
    return [str(address) for address in addresses]


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
