"""Directories of keys for tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fleet_sparse.credentials import Credentials
from fleet_sparse.keys import PSERVER, ROLES, TRAINER, read_keys


def make_keys(directory: Path, *, roles: tuple[str, ...] = ROLES, days: float = 365, signer: Any = None) -> Path:
    """Writes keys as `fleet-sparse keys new`; those of negative days have expired."""
    authority = pytest.importorskip("fleet_sparse.tools.authority", exc_type=ImportError)
    signer = authority.new_authority() if signer is None else signer
    if days > 0:
        authority.write_keys(directory, signer, roles, days)
    else:
        with mock.patch.object(authority, "datetime") as clock:
            clock.now.return_value = datetime.now(UTC) + timedelta(days=days - 1)
            authority.write_keys(directory, signer, roles, 1)
    return directory


def credentials_of(directory: Path, role: str) -> Credentials:
    """Credentials of a process with the keys in a directory."""
    return Credentials(read_keys(str(directory), role), role)


def both_credentials(directory: Path) -> tuple[Credentials, Credentials]:
    """Credentials of a pserver, and of a trainer."""
    return credentials_of(directory, PSERVER), credentials_of(directory, TRAINER)
