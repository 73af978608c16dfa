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
    """

    keys: Keys | None = None
    role: str = TRAINER

    @classmethod
    def of(cls, settings: Settings, *, is_pserver: bool = False) -> Credentials:
        """Returns the credentials that settings name.

        Raises:
            SettingError: The keys cannot be used, or other settings contradict them.
        """
        role = PSERVER if is_pserver else settings.role
        if not settings.keys:
            return cls(None, role)
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
        return cls(keys, role)

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
        """Opens a channel to the control plane at `host:port`."""
        if self.keys is None:
            return grpc.insecure_channel(endpoint, options=options)
        keys = self.keys
        credentials = grpc.ssl_channel_credentials(keys.authority_pem, keys.key_pem, keys.certificate_pem)
        named = [*options, ("grpc.ssl_target_name_override", SERVER_NAME)]
        return grpc.secure_channel(endpoint, credentials, options=named)

    def add_grpc_port(self, server: grpc.aio.Server, address: str) -> int:
        """Binds a control plane to `host:port` and returns the port.

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
        """Returns why the pserver at `host:port` cannot be reached with these keys; empty if keys are not the cause.

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
            reason = (error.reason or "").replace("_", " ").lower()
            if keys is not None and "alert" in reason and any(each in reason for each in _REFUSALS):
                return f"it refuses the certificate of this process, of authority {keys.authority} ({reason})"
            if keys is not None and any(each in reason for each in _NOT_TLS):
                return f"it has no keys, and this process has those of authority {keys.authority}"
        except OSError:
            pass
        return ""


NO_KEYS = Credentials()
"""Credentials of a trainer without keys."""
