"""Shows the progress of training: a live bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from .auc import auc

BAR_EVERY_S = 0.5
LINE_EVERY_S = 5.0
WINDOW_STEPS = 50
"""Number of newest steps over which running loss and AUC are computed; each is predicted before it is trained."""


def cache_figures(row_cache: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the caches of all tables in `fleet_sparse.stats()["row_cache"]` hit and saved, as text."""
    keys = ("reads", "hits", "refreshed", "bytes_saved", "bytes_without")
    reads, hits, refreshed, saved, without = (sum(each[key] for each in row_cache.values()) for key in keys)
    return (
        f"{_percent(hits, reads)} hits, {_percent(refreshed, hits)} of them refreshed; "
        f"{saved / 1e6:,.1f} of {without / 1e6:,.1f} MB saved ({_percent(saved, without)})"
    )


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / max(whole, 1))} %"


class _Step(NamedTuple):
    loss: float
    label: NDArray[np.float32]
    logits: NDArray[np.float32]


class TrainingProgress:
    """Counts steps and shows loss, AUC and speed; use it in a `with` statement."""

    def __init__(
        self, console: Console, *, num_steps: int | None, stats: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """
        Args:
            console: Output.
            num_steps: Total number of steps; None if unknown.
            stats: Returns what `fleet_sparse.stats()` does; None without pservers.
        """
        self._console = console
        self._stats = stats
        self._every_s = BAR_EVERY_S if console.is_terminal else LINE_EVERY_S
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._window: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._num_examples = 0
        self._num_steps = 0
        self._started_s = self._shown_s = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        self._started_s = self._shown_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._num_steps:
            self._show(time.monotonic())
        self._bar.stop()

    def step(self, loss: float, label: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """Counts one step, and updates the display if it is due."""
        self._window.append(_Step(loss, label, logits))
        self._num_examples += len(label)
        self._num_steps += 1
        self._bar.advance(self._task)
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._every_s:
            self._show(now_s)

    def _show(self, now_s: float) -> None:
        self._shown_s = now_s
        figures = f"{self._num_examples / (now_s - self._started_s):,.0f} examples/s  {self._quality()}"
        if self._stats is not None:
            stats = self._stats()
            figures += "  rows " + " + ".join(f"{pserver['rows']:,}" for pserver in stats["pservers"])
            if stats["row_cache"]:
                figures += "  cache " + cache_figures(stats["row_cache"])
        self._bar.update(self._task, description=figures)
        if not self._console.is_terminal:
            self._console.print(f"step {self._num_steps}  {figures}", highlight=False, soft_wrap=True)

    def _quality(self) -> str:
        label = np.concatenate([step.label for step in self._window])
        logits = np.concatenate([step.logits for step in self._window])
        text = f"loss {np.mean([step.loss for step in self._window]):.4f}"
        if 0 < label.mean() < 1:
            text += f"  AUC {auc(label, logits):.4f}"
        return text
