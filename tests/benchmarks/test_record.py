"""Records of runs, and that results files are only ever appended to."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import record
from support.history import versions


@pytest.mark.parametrize("name", [path.name for path in sorted(record.RESULTS.glob("*.jsonl"))])
def test_results_are_only_ever_appended_to(name: str) -> None:
    now = without_directories((record.RESULTS / name).read_text("utf-8"))
    earlier = list(map(without_directories, versions(record.ROOT, f"benchmarks/results/{name}")))
    assert now.startswith(earlier[0] if earlier else "")
    for text in earlier:
        lines = iter(now.splitlines())
        assert all(line in lines for line in text.splitlines()), "a recorded line was changed, moved or removed"


def without_directories(text: str) -> str:
    """Returns records with the file names of absolute paths: a directory of some machine is no result."""
    return re.sub(r'"(?:/[^/"]+)+/([^/"]+)"', r'"\1"', text)


def test_a_run_is_appended_as_plain_json(tmp_path: Path) -> None:
    options = argparse.Namespace(results=tmp_path, rows=3, python=None)
    for number in (1, 2):
        measured = {"s": 1.23456789, "a": np.array([1.0, 2.0]), 4: np.int64(number)}
        record.Record("growth", options).append([measured], batch=512)
    runs = record.recorded(tmp_path, "growth")
    assert [run["rounds"] for run in runs] == [[{"s": 1.2346, "a": [1.0, 2.0], "4": number}] for number in (1, 2)]
    assert [(run["options"], run["batch"]) for run in runs] == [({"rows": 3}, 512)] * 2


def test_of_lines_of_one_run_the_first_counts(tmp_path: Path) -> None:
    lines = [f'{{"date":"d","commit":"c","seconds":1.5,"checks":{number}}}\n' for number in (1, 2)]
    (tmp_path / "scale.jsonl").write_text("".join(lines))
    assert [run["checks"] for run in record.recorded(tmp_path, "scale")] == [1]
    assert record.recorded(tmp_path, "growth") == []


def test_outside_git_no_commit_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() == {"commit": None, "is_dirty": None}
