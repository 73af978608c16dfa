"""Where the commands write: for people in tables and bars, for machines as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

console = Console()
"""Standard output."""
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 200  # of a file or pipe nobody knows the width, and a table that is cut says nothing

AS_IS: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}
"""How a sentence is printed: without colours, and never cut."""


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object, the only thing on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


class Bar:
    """How many bytes of how many are done; called with the former. Shows nothing where nobody looks at it."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)

    def __call__(self, num_bytes: int) -> None:
        self._progress.update(self._task, completed=num_bytes)

    def expect(self, num_bytes: int) -> None:
        """There are so many to do."""
        self._progress.update(self._task, total=num_bytes)


@contextmanager
def bar(what: str) -> Iterator[Bar]:
    """A bar on standard error, if that is a terminal, for as long as a `with` block lasts."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    terminal = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=terminal, transient=True, disable=not terminal.is_terminal
    ) as progress:
        yield Bar(progress, what)
