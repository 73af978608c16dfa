from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import SettingError
from fleet_sparse.pserver.admin import grpc_server
from fleet_sparse.pserver.admin.grpc_server import ControlPlane
from support.controls import HeldControl

BY_TCP = Credentials(has_control_sockets=False)


def test_address_that_was_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        held = HeldControl(tmp_path)
        with pytest.raises(SettingError, match=address):
            ControlPlane(address, held.service, held.settings)


def test_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 100)
    held = HeldControl(tmp_path)
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as silent,
    ):
        while silent.recv(1 << 10):
            pass


def test_connection_past_the_limit_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 1)
    held = HeldControl(tmp_path)
    with closing(ControlPlane("127.0.0.1:0", held.service, held.settings, BY_TCP)) as served:
        address = "127.0.0.1", served.port
        with socket.create_connection(address, timeout=20), socket.create_connection(address, timeout=4) as second:
            while second.recv(1 << 10):
                pass
