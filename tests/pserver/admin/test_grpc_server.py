from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.pserver.admin.grpc_server import ControlPlane
from support.controls import HeldControl


def test_address_that_was_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        held = HeldControl(tmp_path)
        with pytest.raises(SettingError, match=address):
            ControlPlane(address, held.service, held.settings)
