from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_sparse.worker.control.control import ControlClient
from support.fake_pservers import QUICK, FakePservers


@pytest.fixture
def pservers() -> FakePservers:
    return FakePservers()


@pytest.fixture
def control(pservers: FakePservers) -> Iterator[ControlClient]:
    """A control client of `pservers`."""
    with ControlClient(pservers, QUICK) as client:
        yield client
