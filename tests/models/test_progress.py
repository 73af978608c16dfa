from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from fleet_sparse.models import progress
from fleet_sparse.models.progress import TrainingProgress

LABEL = np.array([[0], [1]], np.float32)
LOGITS = np.array([[-1], [1]], np.float32)


def shown(num_steps: int, console: Console, row_cache: dict[str, dict[str, int]] | None = None) -> None:
    stats = {"pservers": [{"rows": 1200}, {"rows": 34}], "row_cache": row_cache or {}}
    with TrainingProgress(console, num_steps=num_steps, stats=lambda: stats) as steps:
        for _ in range(num_steps):
            steps.step(0.25, LABEL, LOGITS)


def test_a_log_gets_a_line_at_the_end() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=False)
    shown(3, console)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("step 3  ")
    assert line.endswith("examples/s  loss 0.2500  AUC 1.0000  rows 1,200 + 34")


def test_a_line_has_the_hit_rate_and_the_bytes_of_row_caches() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=False)
    tables = [
        {"reads": 30, "hits": 20, "refreshed": 12, "bytes_saved": -1_500_000, "bytes_without": 74_000_000},
        {"reads": 10, "hits": 10, "refreshed": 0, "bytes_saved": 0, "bytes_without": 1_000_000},
    ]
    shown(1, console, {str(number): table for number, table in enumerate(tables)})
    figures = file.getvalue().rpartition("cache ")[2]
    assert list(map(float, re.findall(r"-?[\d.]+", figures))) == [75, 40, -1.5, 75, -2]


def test_a_log_gets_lines_in_between_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    console = Console(file=(file := io.StringIO()), force_terminal=False)
    shown(3, console)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1", "step 2", "step 3", "step 3"]


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=True, width=120)
    shown(3, console)
    output = file.getvalue()
    assert "3/3" in output
    assert "rows 1,200 + 34" in output


def test_one_class_alone_has_no_auc() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=False)
    with TrainingProgress(console, num_steps=None, stats=None) as steps:
        steps.step(0.25, np.ones((2, 1), np.float32), LOGITS)
    assert "AUC" not in file.getvalue()


def test_no_steps_show_nothing() -> None:
    console = Console(file=(file := io.StringIO()), force_terminal=False)
    shown(0, console)
    assert not file.getvalue()
