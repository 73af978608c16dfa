"""Endpoints: the addresses that a pserver listens on, chosen from the addresses of all pservers of the job."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet_sparse.control_socket import ControlSocket
from fleet_sparse.errors import SettingError
from fleet_sparse.net_addresses import LOOPBACK, Address, ip_address_of
from fleet_sparse.settings import Settings

_IN_USE = "Stop the process that listens there, or give this pserver another port"


class Endpoints(NamedTuple):
    """Addresses to bind, and addresses to advertise to workers."""

    control: Address
    data_host: str
    """Address to bind the data plane to."""
    advertised_host: str
    """Host of the data plane that workers connect to."""
    is_exposed: bool
    """True if other machines can reach it."""


class DataEndpoints(NamedTuple):
    """Addresses of the data plane for workers."""

    zmq: str
    """`host:port` of its ZeroMQ socket; empty if it has none."""
    stream: str = ""
    """`unix:<name>` or `tcp:<host>:<port>` of its streams; empty if it has none."""


def choose(
    control: Address, servers: Sequence[Address], settings: Settings, *, is_local: Callable[[str], bool]
) -> Endpoints:
    """Chooses 127.0.0.1 if all pservers are on this machine, otherwise the address that workers know, if settings
    allow that without keys.

    Args:
        control: The address of this pserver in PADDLE_PSERVERS_IP_PORT_LIST.
        servers: All of that list.
        settings: `insecure` and `data_host` are used.
        is_local: Returns whether a host is this machine.

    Raises:
        SettingError: Settings do not allow it, or `control` is not an address of this machine.
    """
    elsewhere = next((server for server in servers if not is_local(server.host)), None)
    if not is_local(control.host):
        raise SettingError(f"control address {control}: is not an address of this machine")
    if elsewhere is None:
        return Endpoints(Address(LOOPBACK, control.port), LOOPBACK, LOOPBACK, is_exposed=False)
    if not settings.insecure and not settings.keys:
        raise SettingError(
            f"pserver {elsewhere}: is on another machine, so this pserver would accept connections of other machines, "
            "without keys. Make keys with `fleet-sparse keys new` and set FLEET_SPARSE_KEYS to their directory on all "
            "processes of the job; or, on a network that you trust, set FLEET_SPARSE_INSECURE=1"
        )
    return Endpoints(control, settings.data_host or control.host, control.host, is_exposed=True)


def check_free(control: Address, *, has_socket: bool = False) -> None:
    """Checks that a control plane can listen at an address now, or on its Unix socket.

    Raises:
        SettingError: Another process listens there, or the system does not allow it.
    """
    ip_address = ip_address_of(control.host)
    family = socket.AF_INET6 if ":" in ip_address else socket.AF_INET
    try:
        if has_socket:
            ControlSocket(control).close()
        else:
            socket.create_server((ip_address, control.port), family=family).close()
    except OSError as error:
        advice = _IN_USE if error.errno == errno.EADDRINUSE else "Give this pserver an address of this machine"
        raise cannot_bind(str(control), os.strerror(error.errno or 0), advice) from error


def cannot_bind(control: str, reason: object, advice: str = _IN_USE) -> SettingError:
    """Returns the error of a control plane that cannot listen at its address."""
    return SettingError(f"control plane: cannot bind to {control}: {reason}. {advice}, in `fleetrun --servers`")
