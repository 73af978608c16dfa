"""Output of the commands: tables and progress bars, or JSON."""

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
    console.width = 200  # a file or pipe has no width, and a table should not be cut

AS_IS: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}
"""Arguments of `console.print` for a sentence: no colours, no wrapping."""


BYTES = (DownloadColumn, TransferSpeedColumn)
COUNT = (MofNCompleteColumn,)
"""Columns of a bar that counts bytes or things."""


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object to standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


class ProgressBar:
    """A progress bar; call it with the amount done. Invisible if standard error is not a terminal."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)

    def __call__(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def expect(self, total: int) -> None:
        """Sets the total amount."""
        self._progress.update(self._task, total=total)


@contextmanager
def bar(what: str, unit: Sequence[Callable[[], ProgressColumn]] = BYTES) -> Iterator[ProgressBar]:
    """Shows a bar on standard error during a `with` block, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), *(column() for column in unit), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield ProgressBar(progress, what)
