"""What is kept of a run."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import record


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.23456789, 1.2346),
        (1234567.0, 1234600.0),
        (1234567, 1234567),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([[1.0, 2.0]]), [[1.0, 2.0]]),
        ((1, "a", None, True), [1, "a", None, True]),
        ({4: Path("data/ids")}, {"4": "data/ids"}),
    ],
)
def test_what_is_recorded_is_plain(value: object, expected: object) -> None:
    found = record.plain(value)
    assert found == expected
    assert type(found) is type(expected)


def test_runs_are_read_in_the_order_in_which_they_ended(tmp_path: Path) -> None:
    options = argparse.Namespace(results=tmp_path, rows=3, python=None)
    for number in (1, 2):
        record.Record("growth", options).append([{"rows": number}], batch=512)
    runs = record.recorded(tmp_path, "growth")
    assert [run["rounds"] for run in runs] == [[{"rows": 1}], [{"rows": 2}]]
    assert [(run["options"], run["batch"]) for run in runs] == [({"rows": 3}, 512)] * 2
    assert all(run["seconds"] > 0 for run in runs)


def test_of_a_benchmark_that_never_ran_nothing_is_recorded(tmp_path: Path) -> None:
    assert record.recorded(tmp_path, "growth") == []


def test_outside_git_no_commit_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() == {"commit": None, "is_dirty": None}


def test_what_a_run_writes_is_no_change_of_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        of_nobody = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *of_nobody, *arguments], cwd=tmp_path, check=True, capture_output=True)

    page, source = tmp_path / "docs" / "benchmarks.md", tmp_path / "step.py"
    page.parent.mkdir()
    page.write_text("old")
    source.write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    page.write_text("new")
    assert record.commit()["is_dirty"] is False
    source.write_text("new")
    assert record.commit()["is_dirty"] is True
