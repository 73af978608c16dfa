"""Fixtures that tests of several modules share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def endpoints() -> Iterator[str]:
    """Endpoints of two workers, of which the first has a port on which only Paddle's store can listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield f"127.0.0.1:{held.getsockname()[1]},127.0.0.1:0"
