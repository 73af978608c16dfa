"""Addresses of pservers, and which of them belong to this machine. Workers and pservers decide from the same list."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.errors import SettingError

LOOPBACK = "127.0.0.1"
_CONNECT_S = 2.0


class Address(NamedTuple):
    """A host, as a name or an IP address, and a port. Port 0 lets the system choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Returns the address that `host:port` or `[host]:port` names.

        Raises:
            SettingError: The text has neither form.
        """
        host, colon, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise SettingError(f"address {text!r}: should be host:port, with a port of 0 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def as_reached(
    endpoints: Sequence[str], *, is_local: Callable[[str], bool], is_exposed: Callable[[Address], bool]
) -> list[str]:
    """Returns the addresses that a client connects to.

    If all pservers are on this machine they listen on 127.0.0.1 only, so the client connects to that. A command may be
    given some pservers of a job on several machines: those of this one are exposed.

    Args:
        endpoints: `host:port` of each pserver, as in PADDLE_PSERVERS_IP_PORT_LIST.
        is_local: Returns whether a host is this machine.
        is_exposed: Returns whether a pserver of this machine listens at its address for other machines.

    Raises:
        SettingError: An endpoint is not `host:port`.
    """
    addresses = [Address.parse(endpoint) for endpoint in endpoints]
    if all(is_local(address.host) for address in addresses) and not any(map(is_exposed, addresses)):
        addresses = [Address(LOOPBACK, address.port) for address in addresses]
    return [str(address) for address in addresses]


def is_local(host: str) -> bool:
    """Returns whether the host has addresses and a socket can be bound to each of them, so that it is this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return all(_can_bind(family, address) for family, _, _, _, address in found)


def is_listening(address: Address) -> bool:
    """Returns whether a process listens at an address of this machine."""
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError:
        return False
    return True


def ip_address_of(host: str) -> str:
    """Returns the first IP address of a host.

    Raises:
        SettingError: The host has no address.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise SettingError(f"host {host!r}: has no address ({error})") from error


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
