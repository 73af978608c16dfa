"""How the demo finds out that a process failed: fleetrun itself ends with 0 even then."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from fleet_sparse.models import demo
from fleet_sparse.models.demo import DemoFailed, Result
from fleet_sparse.models.train import Metrics

SILENT = Console(quiet=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    return tmp_path


def run(folder: Path, body: str, num_workers: int = 1) -> Result:
    """A run whose launcher is a script of our own."""
    script = folder / "launcher.py"
    script.write_text(body)
    return demo._run(SILENT, "trial", "trial run", [sys.executable, str(script)], [], num_workers)


def worker(folder: Path, index: int) -> None:
    metrics = Metrics("distributed", worker_index=index, num_steps=10, num_examples=100, train_s=1.0, bytes_pulled=50)
    metrics.test_auc, metrics.test_loss, metrics.pserver_rows = 0.8, 0.4, [7, 8]
    metrics.write(folder / "trial.json")


def result(title: str, auc: float, rows: list[int] | None) -> Result:
    return Result(title, auc, 1e4, 10, 100, 100, rows)


def test_counts_of_the_workers_are_added_up(folder: Path) -> None:
    for index in range(2):
        worker(folder, index)
    got = run(folder, "", num_workers=2)
    assert (got.examples_per_s, got.num_steps, got.bytes_pulled, got.pserver_rows) == (200, 20, 100, [7, 8])


def test_an_exit_code_fails_and_shows_the_end_of_the_log(folder: Path) -> None:
    worker(folder, 0)
    with pytest.raises(DemoFailed, match=r"trial run: .*3; .*\nno space left"):
        run(folder, "print('no space left', flush=True); raise SystemExit(3)")


def test_a_worker_without_a_metrics_file_fails(folder: Path) -> None:
    worker(folder, 0)
    with pytest.raises(DemoFailed, match=r"trial run: .*trial\.worker-1\.json"):
        run(folder, "", num_workers=2)


@pytest.mark.parametrize("log", ["workerlog.1", "serverlog.0"])
def test_a_traceback_in_any_log_fails(folder: Path, log: str) -> None:
    worker(folder, 0)
    (folder / "logs" / "trial").mkdir(parents=True)
    (folder / "logs" / "trial" / log).write_text("Traceback (most recent call last):\nValueError: rows\n")
    with pytest.raises(DemoFailed, match=rf"{log} ends with:\nTraceback"):
        run(folder, "")


def test_children_of_a_stopped_run_are_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RUN_LIMIT_S", 3)
    (folder / "pserver.py").write_text(
        "import fcntl, time\n"
        "fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)\n"
        "open('locked', 'w').close()\n"
        "time.sleep(60)\n"
    )
    started_s = time.monotonic()
    with pytest.raises(DemoFailed, match="3 s"):
        run(folder, "import subprocess, sys; subprocess.run([sys.executable, 'pserver.py'])")
    assert (folder / "locked").exists()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for as long as the pserver lives
    assert time.monotonic() - started_s < 30


def test_roles_of_another_job_are_not_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_ROLE", "PSERVER")
    monkeypatch.setenv("PADDLE_PORT", "1")
    worker(folder, 0)
    run(folder, "import json, os; json.dump(dict(os.environ), open('environment', 'w'))")
    seen = json.loads((folder / "environment").read_text())
    assert not {"TRAINING_ROLE", "PADDLE_PORT"} & set(seen)


def results(embedded: float, distributed: float) -> list[Result]:
    """All four, with 100 rows each and these test AUCs; 0.8 in plain Paddle."""
    trained, restored = (result(title, distributed, [60, 40]) for title in ("distributed", "restored"))
    return [result("plain", 0.8, None), result("embedded", embedded, [60, 40]), trained, restored]


def test_good_results_pass() -> None:
    demo._check(results(embedded=0.8004, distributed=0.809), 50)


def test_another_auc_after_starting_again_fails() -> None:
    restored = result("restored", 0.80000001, [60, 40])
    with pytest.raises(DemoFailed, match=r"0\.8 before saving, 0\.80000001 after"):
        demo._check([*results(0.8, 0.8)[:3], restored], 50)


@pytest.mark.parametrize(
    ("title", "aucs", "message"),
    [
        (
            "embedded",
            (0.7994, 0.8),
            r"test AUC 0\.799400, in plain Paddle 0\.800000; .* 0\.0005",
        ),
        (
            "embedded",
            (0.8006, 0.8),
            r"test AUC 0\.800600, in plain Paddle 0\.800000; .* 0\.0005",
        ),
        (
            "distributed",
            (0.8, 0.789),
            r"test AUC 0\.789000, in plain Paddle 0\.800000; .* 0\.01",
        ),
        ("embedded", (float("nan"), 0.8), "test AUC nan"),
    ],
)
def test_an_auc_far_from_plain_paddles_fails(title: str, aucs: tuple[float, float], message: str) -> None:
    with pytest.raises(DemoFailed, match=f"{title}: {message}"):
        demo._check(results(*aucs), 50)


def test_lost_rows_fail() -> None:
    embedded = result("embedded", 0.8, [60, 39])
    good = results(0.8, 0.8)
    with pytest.raises(DemoFailed, match=r"embedded: 99 .* 100"):
        demo._check([good[0], embedded, *good[2:]], 50)
