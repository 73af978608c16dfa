"""Credentials: the one value through which a process opens its channels and servers."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio

from fleet_sparse.control_socket import ControlSocket, has_socket, is_served, missing_socket, socket_path
from fleet_sparse.errors import SettingError
from fleet_sparse.keys import PSERVER, SERVER_NAME, TRAINER, Keys, authority_of, read_keys
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings

_log = logging.getLogger(__name__)

ROLE_KEY = "fleet-sparse-role"
"""Metadata of calls without keys: the role of the client, if it is no trainer."""
_PROBE_S = 2.0
_REFUSALS = ("certificate", "unknown ca")
_NOT_TLS = ("wrong version number", "record layer failure", "packet length too long", "http request")
"""Reasons of OpenSSL. Others, as the end of a pserver that is being started again, are no fault of keys."""


@dataclass(frozen=True)
class Credentials:
    """The credentials that this process shows and requires.

    Attributes:
        keys: Its keys; None if connections are plain.
        role: Role of a client, which its certificate has if there are keys.
        has_control_sockets: True if control planes that only this machine reaches listen on Unix sockets, not on TCP.
    """

    keys: Keys | None = None
    role: str = TRAINER
    has_control_sockets: bool = True

    @classmethod
    def of(cls, settings: Settings, *, is_pserver: bool = False) -> Credentials:
        """Returns the credentials that settings name.

        Raises:
            SettingError: The keys cannot be used, or other settings contradict them.
        """
        role = PSERVER if is_pserver else settings.role
        if not settings.keys:
            return cls(None, role, has_control_sockets=settings.channel != "zmq")
        if settings.insecure:
            raise SettingError(
                "FLEET_SPARSE_KEYS: is set, and so is FLEET_SPARSE_INSECURE, which is for jobs without keys. Unset one"
            )
        if settings.channel == "zmq":
            raise SettingError(
                "FLEET_SPARSE_CHANNEL: is zmq, should be auto or stream with FLEET_SPARSE_KEYS: ZeroMQ has no keys "
                "here. Leave it out"
            )
        keys = read_keys(settings.keys, role)
        _log.info(
            "keys: role %s, authority %s, expire %s",
            role,
            keys.authority,
            datetime.fromtimestamp(keys.expires_at, UTC).strftime("%Y-%m-%d"),
        )
        return cls(keys, role, has_control_sockets=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Metadata of each call to the control plane."""
        return None if self.role == TRAINER or self.keys is not None else ((ROLE_KEY, self.role),)

    def role_of(self, context: Any) -> str:
        """Returns the role of the client of a call, from the context of a gRPC server."""
        if self.keys is not None:
            return bytes(context.auth_context().get("x509_common_name", (b"",))[0]).decode("utf-8", "replace")
        return str(dict(context.invocation_metadata() or ()).get(ROLE_KEY, TRAINER))

    def grpc_channel(self, endpoint: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Opens a channel to the control plane at `host:port`.

        Raises:
            SettingError: It has a Unix socket, whose directory is not this user's alone.
        """
        if self.keys is None:
            address = Address.parse(endpoint)
            if not (self.has_control_sockets and has_socket(address)):
                return grpc.insecure_channel(endpoint, options=options)
            target, authority = f"unix:{socket_path(address.port)}", ("grpc.default_authority", "localhost")
            return grpc.insecure_channel(target, options=[*options, authority])
        keys = self.keys
        credentials = grpc.ssl_channel_credentials(keys.authority_pem, keys.key_pem, keys.certificate_pem)
        named = [*options, ("grpc.ssl_target_name_override", SERVER_NAME)]
        return grpc.secure_channel(endpoint, credentials, options=named)

    def missing_socket(self, endpoint: str) -> str:
        """Returns where the control plane at `host:port` has no Unix socket that it should have; empty if it has."""
        address = Address.parse(endpoint)
        return missing_socket(address.port) if self.has_control_sockets and has_socket(address) else ""

    def control_socket(self, address: Address) -> ControlSocket | None:
        """Returns the Unix socket on which a control plane listens; None if it listens on TCP.

        Raises:
            OSError, SettingError: As a `ControlSocket`.
        """
        return ControlSocket(address) if self.has_control_sockets and has_socket(address) else None

    def add_grpc_port(self, server: grpc.aio.Server, address: str) -> int:
        """Binds a control plane to `host:port` or `unix:<path>` and returns the port.

        Raises:
            RuntimeError: The address cannot be bound.
        """
        if self.keys is None:
            return server.add_insecure_port(address)
        keys = self.keys
        own = [(keys.key_pem, keys.certificate_pem)]
        credentials = grpc.ssl_server_credentials(own, keys.authority_pem, require_client_auth=True)
        return server.add_secure_port(address, credentials)

    def has_keys_for(self, endpoint: str) -> bool:
        """Returns whether a stream to this endpoint needs keys: a Unix socket has the user of its peer instead."""
        return self.keys is not None and endpoint.startswith("tcp:")

    def fault_of(self, endpoint: str) -> str:
        """Returns why the pserver at `host:port` cannot be reached; empty if neither keys nor channels are the cause.

        It opens a connection of its own, since gRPC does not say.
        """
        keys = self.keys
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if keys is None else keys.client_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])  # gRPC ends others
        try:
            with (
                socket.create_connection(Address.parse(endpoint), _PROBE_S) as plain,
                context.wrap_socket(plain, server_hostname=SERVER_NAME) as stream,
            ):
                theirs = authority_of(stream.getpeercert(binary_form=True) or b"")
                if keys is None:
                    return (
                        f"it has keys, of authority {theirs}, and this process has none: FLEET_SPARSE_KEYS is not set"
                    )
                if theirs != keys.authority:
                    return f"its keys are of authority {theirs}, those of this process are of {keys.authority}"
                stream.recv(1)  # in TLS 1.3 the other side refuses after the handshake
        except ssl.SSLError as error:
            return self._fault_of_handshake((error.reason or "").replace("_", " ").lower())
        except ConnectionRefusedError:
            return self._fault_of_socket(endpoint)
        except OSError:
            pass
        return ""

    def _fault_of_handshake(self, reason: str) -> str:
        """Returns what a failed TLS handshake says; empty if nothing."""
        keys, is_tls = self.keys, not any(each in reason for each in _NOT_TLS)
        if keys is not None and "alert" in reason and any(each in reason for each in _REFUSALS):
            return f"it refuses the certificate of this process, of authority {keys.authority} ({reason})"
        if keys is not None and not is_tls:
            return f"it has no keys, and this process has those of authority {keys.authority}"
        if self.has_control_sockets and not is_tls:
            return "it listens on TCP, as with FLEET_SPARSE_CHANNEL=zmq, and this process looks for its Unix socket"
        return ""

    def _fault_of_socket(self, endpoint: str) -> str:
        """Returns why this process, which calls a control plane by TCP, finds only its Unix socket; empty if not so."""
        address = Address.parse(endpoint)
        if self.has_control_sockets or not has_socket(address) or not is_served(socket_path(address.port)):
            return ""
        if self.keys is not None:
            return f"it has no keys, and this process has those of authority {self.keys.authority}"
        return "it listens on a Unix socket, and this process has FLEET_SPARSE_CHANNEL=zmq, with which it would use TCP"


NO_KEYS = Credentials()
"""Credentials of a trainer without keys."""
