from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest
from paddle.distributed import fleet

import fleet_sparse


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[None]:
    """A dygraph process with a pserver inside, initialised; restores static mode and Paddle's functions."""
    monkeypatch.chdir(tmp_path)
    paddle.disable_static()
    fleet_sparse.install()
    try:
        with paddle.utils.unique_name.guard():
            fleet.init()
            yield
    finally:
        fleet_sparse.uninstall()
        paddle.enable_static()
