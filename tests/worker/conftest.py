from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fleet_sparse.settings import Settings
from support.in_process import QUICK, InProcessCluster


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    """Two shards."""
    cluster = InProcessCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture
def quick() -> Callable[..., Settings]:
    """Settings with short waits, changed as given."""
    return lambda **changed: replace(QUICK, **changed)


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Ctrl-C is that of a plain program meanwhile, whatever pytest has for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
