"""Where the commands write: for people in tables and bars, for machines as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

console = Console()
"""Standard output."""
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 200  # of a file or pipe nobody knows the width, and a table that is cut says nothing

AS_IS: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}
"""How a sentence is printed: without colours, and never cut."""


BYTES = (DownloadColumn, TransferSpeedColumn)
COUNT = (MofNCompleteColumn,)
"""What a bar shows beside itself."""


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object, the only thing on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


class Bar:
    """How much of how much is done; called with the former. Shows nothing where nobody looks at it."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)

    def __call__(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def expect(self, total: int) -> None:
        """There is so much to do."""
        self._progress.update(self._task, total=total)


@contextmanager
def bar(what: str, unit: Sequence[Callable[[], ProgressColumn]] = BYTES) -> Iterator[Bar]:
    """A bar on standard error, if that is a terminal, for as long as a `with` block lasts."""
    columns = (TextColumn("{task.description}"), BarColumn(), *(column() for column in unit), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield Bar(progress, what)
