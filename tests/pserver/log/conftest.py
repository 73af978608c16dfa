from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.log.log_writer import LogWriter


@pytest.fixture(autouse=True)
def logs_are_closed() -> Iterator[None]:
    """Closes the logs of a test: those of a process that crashed, too, whose files the system would close."""
    writers: list[LogWriter] = []
    begin = LogWriter.__init__

    def noted(writer: LogWriter, *arguments: Any, **options: Any) -> None:
        begin(writer, *arguments, **options)
        writers.append(writer)

    with pytest.MonkeyPatch.context() as patch:  # not the fixture: it is undone before
        patch.setattr(LogWriter, "__init__", noted)
        yield
    for writer in writers:
        with suppress(FleetSparseError, OSError):
            writer.close()
