"""Shows the progress of training: a live bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

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


class _Step(NamedTuple):
    loss: float
    label: NDArray[np.float32]
    logits: NDArray[np.float32]


class TrainingProgress:
    """Counts steps and shows loss, AUC and speed; use it in a `with` statement."""

    def __init__(
        self, console: Console, *, num_steps: int | None, pserver_rows: Callable[[], Sequence[int]] | None
    ) -> None:
        """
        Args:
            console: Output.
            num_steps: Total number of steps; None if unknown.
            pserver_rows: Returns the number of rows of each pserver; None without pservers.
        """
        self._console = console
        self._pserver_rows = pserver_rows
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
        if self._pserver_rows is not None:
            figures += "  rows " + " + ".join(f"{rows:,}" for rows in self._pserver_rows())
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
