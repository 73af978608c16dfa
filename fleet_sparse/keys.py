"""Keys: the certificates of a job, as this process finds them in the directory FLEET_SPARSE_KEYS.

`fleet-sparse keys new` writes such a directory. A job needs the standard library and gRPC to use it.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fleet_sparse.errors import Forbidden, SettingError

_log = logging.getLogger(__name__)

PSERVER, TRAINER, READER, WATCHER = "pserver", "trainer", "reader", "watcher"
ROLES = (PSERVER, TRAINER, READER, WATCHER)
"""The roles of a certificate: its common name."""
UNREGISTERED = "unregistered"
"""In the place of a role: the client has not registered."""
AUTHORITY_FILE = "ca.pem"
"""The certificate of the authority that signed those of all roles. Its key is elsewhere."""
SERVER_NAME = "pserver.fleet-sparse"
"""DNS name in the certificate of every pserver. Hosts are not named: the authority decides."""
AUTHORITY_NAME = "fleet-sparse authority "
"""Common name of an authority, up to the fingerprint of its public key."""
FINGERPRINT_DIGITS = 16
WARN_BEFORE_S = 7 * 86_400.0
_AUTHORITY = re.compile(rf"{AUTHORITY_NAME}([0-9a-f]{{{FINGERPRINT_DIGITS}}})".encode())
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----\n?", re.DOTALL)


@dataclass(frozen=True)
class Keys:
    """The certificate and key of one role, and the certificate of the authority.

    Attributes:
        directory: Directory that they were read from.
        role: Role of the certificate.
        authority: Fingerprint of the authority.
        expires_at: When the first certificate of the two expires, in seconds since 1970.
        authority_pem: Certificate of the authority.
        certificate_pem: Certificate of the role.
        key_pem: Its private key.
    """

    directory: Path
    role: str
    authority: str
    expires_at: float
    authority_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """Returns a context for streams of TLS 1.3 with clients of the same authority."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self.directory, self.role)
        context.num_tickets = 0  # a session is never resumed
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns a context for streams of TLS 1.3 to pservers of the same authority."""
        return _context(ssl.PROTOCOL_TLS_CLIENT, self.directory, self.role)


def read_keys(directory: str, role: str, now: float | None = None) -> Keys:
    """Reads the keys of a role, and logs a warning if they expire within a week.

    Args:
        directory: The directory of the job's keys.
        role: Role of this process.
        now: Seconds since 1970, for the dates; None for the clock of this machine.

    Raises:
        SettingError: A file is missing, others can read the key, it is not signed by the authority next to it, has
            another role, or has expired.
    """
    now = time.time() if now is None else now
    where = Path(directory)
    role_path, authority_path = where / f"{role}.pem", where / AUTHORITY_FILE
    authority_pem = _read(authority_path, stat.S_IWGRP | stat.S_IWOTH, "changed")
    pem = _read(role_path, stat.S_IRWXG | stat.S_IRWXO, "read")
    certificate, key = _CERTIFICATE.search(pem), _KEY.search(pem)
    if certificate is None or key is None:
        raise SettingError(f"FLEET_SPARSE_KEYS: {role_path} should have a certificate and a private key. {_MAKE_NEW}")
    authority, authority_expires_at = _authority_of(authority_path, authority_pem)
    try:
        found = _shown_certificate(where, role)
    except ssl.SSLCertVerificationError as error:
        raise _refused(error, role_path, certificate[0], authority) from None
    except ssl.SSLError as error:
        raise SettingError(f"FLEET_SPARSE_KEYS: {role_path} cannot be used ({_reason(error)}). {_MAKE_NEW}") from None
    if role_of(found) != role:
        raise SettingError(
            f"FLEET_SPARSE_KEYS: {role_path} is a certificate of role {role_of(found)!r}, should be {role!r}. Give "
            "files their own names again"
        )
    expires_at = min(float(ssl.cert_time_to_seconds(found["notAfter"])), authority_expires_at)
    if expires_at <= now:
        raise _expired(role_path)
    if expires_at < now + WARN_BEFORE_S:
        _log.warning(
            "%s expires in %.1f days; after that, processes that start are refused. %s",
            role_path,
            (expires_at - now) / 86_400,
            _MAKE_NEW,
        )
    return Keys(where, role, authority, expires_at, authority_pem, certificate[0], key[0])


def role_of(certificate: Any) -> str:
    """Returns the role of a certificate as `ssl.SSLSocket.getpeercert` returns it: its common name."""
    return next((value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"), "")


def authority_of(certificate_der: bytes) -> str:
    """Returns the fingerprint of the authority that a certificate, not verified, claims; `unknown` without one."""
    found = _AUTHORITY.search(certificate_der)
    return "unknown" if found is None else found[1].decode()


def forbidden(where: str, role: str, what: str) -> Forbidden:
    """Returns the error of a client whose role may not ask for something."""
    if role == UNREGISTERED:
        text = f"{where}: {what}: its client id is not registered here. Register it first"
    else:
        text = (
            f"{where}: {what}: role {role!r} may not ask for it. If this process should, set FLEET_SPARSE_ROLE=trainer "
            "and, if the job has keys, give it those of a trainer"
        )
    return Forbidden(text, role=role, what=what)


_MAKE_NEW = "Make new keys with `fleet-sparse keys new`, or a certificate with `fleet-sparse keys add`"


def _read(path: Path, forbidden: int, what: str) -> bytes:
    """Returns the contents of a file with which others can do nothing that is forbidden."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & forbidden:
                raise SettingError(
                    f"FLEET_SPARSE_KEYS: {path} can be {what} by other users (mode {mode:04o}), should have mode 0600. "
                    f"Run `chmod 600 {path}`; if others have read a key, make new ones"
                )
            return file.read()
    except OSError as error:
        advice = "Make keys with `fleet-sparse keys new`, and copy the directory to every host of the job"
        if path.parent.is_dir() and path.name != AUTHORITY_FILE and path.stem != PSERVER:
            advice = "Set FLEET_SPARSE_ROLE to the role whose keys the directory has, or copy that file there"
        raise SettingError(
            f"FLEET_SPARSE_KEYS: {path} cannot be read ({os.strerror(error.errno or 0)}). {advice}"
        ) from error


def _authority_of(path: Path, pem: bytes) -> tuple[str, float]:
    """Returns the fingerprint of an authority, and when its certificate expires."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
        (found,) = context.get_ca_certs()
        name, expires = role_of(found), found["notAfter"]
    except (ValueError, ssl.SSLError) as error:
        raise SettingError(
            f"FLEET_SPARSE_KEYS: {path} should be the certificate of one authority. {_MAKE_NEW}"
        ) from error
    return authority_of(name.encode()), float(ssl.cert_time_to_seconds(str(expires)))


def _context(protocol: Any, directory: Path, role: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(directory / f"{role}.pem", password=_no_password)
    context.load_verify_locations(directory / AUTHORITY_FILE)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """A key with a password would ask for it on the terminal."""
    return ""


class _End(NamedTuple):
    """One end of a connection within the process."""

    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


def _end(context: ssl.SSLContext, *, is_server: bool) -> _End:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = None if is_server else SERVER_NAME
    return _End(context.wrap_bio(incoming, outgoing, server_side=is_server, server_hostname=name), incoming, outgoing)


def _shown_certificate(directory: Path, role: str) -> dict[str, Any]:
    """Returns the certificate that a process of a role shows, as a peer of its authority sees and verifies it.

    Raises:
        ssl.SSLError: A peer would refuse it, or certificate and key do not fit each other.
    """
    is_server = role == PSERVER
    server = _context(ssl.PROTOCOL_TLS_SERVER, directory, role)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, directory, role)
    if is_server:
        server.verify_mode = ssl.CERT_NONE
    else:
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
    ends = _end(client, is_server=False), _end(server, is_server=True)
    _shake_hands(*ends)
    return dict((ends[0] if is_server else ends[1]).tls.getpeercert() or {})


def _shake_hands(client: _End, server: _End) -> None:
    waiting: Sequence[_End] = (client, server)
    while waiting:
        left = []
        for end in waiting:
            other = server if end is client else client
            try:
                end.tls.do_handshake()
            except ssl.SSLWantReadError:
                left.append(end)
            other.incoming.write(end.outgoing.read())
        waiting = left


def _refused(error: ssl.SSLCertVerificationError, path: Path, certificate_pem: bytes, authority: str) -> SettingError:
    if "expired" in error.verify_message:
        return _expired(path)
    found = authority_of(ssl.PEM_cert_to_DER_cert(certificate_pem.decode("ascii").strip()))
    if found != authority:
        return SettingError(
            f"FLEET_SPARSE_KEYS: {path} was signed by authority {found}, {AUTHORITY_FILE} next to it is authority "
            f"{authority}. Copy the directory of one `fleet-sparse keys new` to every host"
        )
    return SettingError(f"FLEET_SPARSE_KEYS: {path} is not accepted ({error.verify_message}). {_MAKE_NEW}")


def _expired(path: Path) -> SettingError:
    return SettingError(f"FLEET_SPARSE_KEYS: {path}, or {AUTHORITY_FILE} next to it, has expired. {_MAKE_NEW}")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
