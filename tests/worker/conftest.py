from __future__ import annotations

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
