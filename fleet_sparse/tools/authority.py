"""Authority: signs the certificates of a job, and the files that `fleet-sparse keys` writes. Needs `cryptography`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleet_sparse.errors import SettingError
from fleet_sparse.keys import AUTHORITY_FILE, AUTHORITY_NAME, FINGERPRINT_DIGITS, PSERVER, SERVER_NAME

AUTHORITY_DAYS = 3650
_CLOCKS_DIFFER = timedelta(hours=1)
"""A certificate is valid at once also where the clock is late."""


class Authority(NamedTuple):
    """A certificate authority of a job."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class KeyFile(NamedTuple):
    """A certificate in a directory of keys."""

    file: str
    role: str
    """Common name of the certificate; `authority` for that of the authority."""
    authority: str
    """Fingerprint of the authority that signed it."""
    not_after: datetime


def new_authority() -> Authority:
    """Returns a new authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    name = _name(AUTHORITY_NAME + hashlib.sha256(public).hexdigest()[:FINGERPRINT_DIGITS])
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def write_authority(path: Path, authority: Authority) -> None:
    """Writes the certificate and the private key of an authority to a new file.

    Raises:
        SettingError: The file exists or cannot be written.
    """
    _write_new(path, authority.certificate.public_bytes(Encoding.PEM) + _pem_of(authority.key))


def read_authority(path: Path) -> Authority:
    """Reads what `write_authority` wrote.

    Raises:
        SettingError: It cannot be read, or is something else.
    """
    try:
        pem = path.read_bytes()
        key = load_pem_private_key(pem, password=None)
        certificate = x509.load_pem_x509_certificate(pem)
    except OSError as error:
        raise SettingError(f"--ca: {path} cannot be read ({os.strerror(error.errno or 0)})") from error
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"--ca: {path} should have the certificate and the key of an authority, as `fleet-sparse keys new --ca` "
            "writes them"
        ) from error
    is_authority = _common_name(certificate.subject).startswith(AUTHORITY_NAME)
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != certificate.public_key()
        or not is_authority
    ):
        raise SettingError(
            f"--ca: {path} is not the certificate of an authority with its key. Name the file of "
            "`fleet-sparse keys new --ca`"
        )
    return Authority(certificate, key)


def write_keys(directory: Path, authority: Authority, roles: Iterable[str], days: int) -> None:
    """Writes the certificate of an authority, and for each role a new certificate with its key.

    The directory gets mode 0700, the files get mode 0600. It may exist if it is empty or has roles of this authority.

    Raises:
        SettingError: It has a file of that name, or keys of another authority; or it cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError as error:
        raise SettingError(f"keys: {directory} cannot be made ({os.strerror(error.errno or 0)})") from error
    public = authority.certificate.public_bytes(Encoding.PEM)
    path = directory / AUTHORITY_FILE
    if not path.exists():
        _write_new(path, public)
    elif path.read_bytes() != public:
        raise SettingError(f"keys: {path} is the certificate of another authority. Name another directory")
    for role in roles:
        _write_new(directory / f"{role}.pem", _certified(authority, role, days))


def key_files(directory: Path) -> list[KeyFile]:
    """Returns the certificates in a directory of keys, the authority first.

    Raises:
        SettingError: It has no certificate of an authority, or a file is none.
    """
    paths = sorted(directory.glob("*.pem"), key=lambda path: (path.name != AUTHORITY_FILE, path.name))
    if not paths or paths[0].name != AUTHORITY_FILE:
        raise SettingError(f"keys: {directory} has no {AUTHORITY_FILE}. Make keys with `fleet-sparse keys new`")
    return [_key_file(path) for path in paths]


def _key_file(path: Path) -> KeyFile:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise SettingError(f"keys: {path} cannot be read ({os.strerror(error.errno or 0)})") from error
    except ValueError as error:
        raise SettingError(f"keys: {path} has no certificate ({error})") from error
    role = "authority" if path.name == AUTHORITY_FILE else _common_name(certificate.subject)
    signer = _common_name(certificate.issuer).removeprefix(AUTHORITY_NAME)
    return KeyFile(path.name, role, signer, certificate.not_valid_after_utc)


def _certified(authority: Authority, role: str, days: int) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    is_pserver = role == PSERVER
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_pserver else ExtendedKeyUsageOID.CLIENT_AUTH
    signer = authority.key.public_key()
    builder = (
        _builder(_name(role), authority.certificate.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )
    if is_pserver:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    certificate: bytes = builder.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return certificate + _pem_of(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _common_name(name: x509.Name) -> str:
    return "".join(str(each.value) for each in name.get_attributes_for_oid(NameOID.COMMON_NAME))


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _write_new(path: Path, contents: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SettingError(f"keys: {path} exists. Delete it first, or name another directory") from None
    except OSError as error:
        raise SettingError(f"keys: {path} cannot be written ({os.strerror(error.errno or 0)})") from error
    with os.fdopen(fd, "wb") as file:
        file.write(contents)
