"""Connecting to pservers that are processes of their own."""

from __future__ import annotations

import time
from pathlib import Path

import paddle
import pytest

from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import WorkerLost
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.plugin.connection import Role
from fleet_sparse.plugin.session import Session
from fleet_sparse.settings import Settings


def test_a_worker_that_cannot_connect_raises_without_waiting(tmp_path: Path) -> None:
    session = Session(Settings(connect_s=0.5))
    session.catalog.declare_mode(Mode(SYNC))
    with local_pservers(1, root=tmp_path, environment={"FLEET_SPARSE_CONNECT_S": "0.5"}) as pservers:
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match="worker 0"):
            session.connect(Role(1, 2, tuple(pservers.endpoints)), paddle.static.Scope())
        assert time.monotonic() - begun < 8
