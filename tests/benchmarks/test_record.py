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


def test_of_each_combination_the_newest_commit_counts() -> None:
    runs = [
        {"commit": commit, "options": {"dim": dim, "mode": mode}, "rounds": [number]}
        for number, (commit, dim, mode) in enumerate(
            [("a", 8, "sync"), ("a", 16, "sync"), ("b", 8, "sync"), ("b", 8, "async"), ("b", 8, "sync")]
        )
    ]
    found = record.pooled_by(runs, ["dim"], mode="sync")
    assert found
    assert (found["commit"], found["rounds"], found["runs"]) == ("b", [1, 2, 4], [runs[1], runs[2], runs[4]])
    assert record.pooled_by(runs, ["dim"], mode="geo") is None


def test_outside_git_no_commit_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() == {"commit": None, "is_dirty": None}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose measured code is that of commit `code`."""
    monkeypatch.setattr(record, "commit", lambda: {"commit": "head", "is_dirty": False})
    monkeypatch.setattr(record, "measured_code", lambda: "code")


def jobs_of(results: Path, **options: object) -> record.Jobs:
    return record.Jobs(record.Record("het_auc", argparse.Namespace(results=results, **options)), varying=("seeds",))


def never() -> dict[str, float]:
    raise AssertionError("the job was done before")


@pytest.mark.usefixtures("clean")
def test_a_stopped_run_keeps_the_jobs_that_ended(tmp_path: Path) -> None:
    stopped = jobs_of(tmp_path, dim=8, seeds=1)
    assert stopped.result("a", lambda: {"auc": 0.7012345678}) == {"auc": 0.7012345678}
    with pytest.raises(KeyboardInterrupt):
        stopped.result("b", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    continued = jobs_of(tmp_path, dim=8, seeds=3)
    assert (continued.has(["a"]), continued.has(["a", "b"])) == (True, False)
    assert continued.result("a", never) == {"auc": 0.7012345678}
    assert continued.result("b", lambda: {"auc": 0.5}) == {"auc": 0.5}
    assert {name: source.split(",")[0] for name, source in continued.sources().items()} == {"a": "head", "b": "head"}


@pytest.mark.usefixtures("clean")
def test_a_recorded_run_forgets_its_jobs_and_no_others(tmp_path: Path) -> None:
    first, second = jobs_of(tmp_path, dim=8), jobs_of(tmp_path, dim=16)
    for each in (first, second):
        each.result("a", lambda: {"auc": 0.5})
    jobs_of(tmp_path, dim=8).forget()
    assert not jobs_of(tmp_path, dim=8).has(["a"])
    assert jobs_of(tmp_path, dim=16).has(["a"])
    jobs_of(tmp_path, dim=16).forget()
    assert list((tmp_path / "unfinished").iterdir()) == []


@pytest.mark.usefixtures("clean")
def test_jobs_of_other_code_or_options_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs_of(tmp_path, dim=8).result("a", lambda: {"auc": 0.5})
    assert not jobs_of(tmp_path, dim=16).has(["a"])
    monkeypatch.setattr(record, "measured_code", lambda: "newer")
    assert not jobs_of(tmp_path, dim=8).has(["a"])


def test_with_uncommitted_changes_no_job_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "commit", lambda: {"commit": "head", "is_dirty": True})
    jobs_of(tmp_path, dim=8).result("a", lambda: {"auc": 0.5})
    assert not jobs_of(tmp_path, dim=8).has(["a"])
    assert list(tmp_path.iterdir()) == []
