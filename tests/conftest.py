from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from fleet_sparse.settings import PREFIX
from fleet_sparse.warm_up import warm_up
from support.pserver_job import pserver_job

__all__ = ["pserver_job"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "tests in tests/fuzz, with -m fuzz")
    group.addoption("--fuzz-rounds", type=int, default=1, help="rounds of each fuzz test; about 10 s each")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed; other seeds are other cases")


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Kernels that are loaded from the disk cache, as in every process that serves: a test waits for no compilation."""
    warm_up()


# Neither the tests nor the processes that they start have settings but those that a test gives.
for variable in list(os.environ):
    if variable.startswith(PREFIX):
        del os.environ[variable]

# A shell that runs the tests in the background has them ignore it, and some test what Ctrl-C does.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is not what a test is about: the first one may compile a kernel, and the machine is shared.
settings.register_profile("fleet_sparse", deadline=None)
settings.load_profile("fleet_sparse")


@pytest.fixture(scope="session", autouse=True)
def warm_kernels() -> None:
    """Loads the kernels, as every process does before it opens stores."""
    warm_up()


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Ctrl-C is that of a plain program meanwhile, whatever pytest has for it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
