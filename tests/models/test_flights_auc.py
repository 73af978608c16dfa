"""Test AUC on the flights: on pservers against plain Paddle. Minutes each: `scripts/test --slow tests/models`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from fleet_sparse.models import demo

EMBEDDED_TOLERANCE = 0.0005
DISTRIBUTED_TOLERANCE = 0.003
SEEDS = (0, 1, 2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path)


def auc_of(name: str, *options: str, num_workers: int = 1, launcher: tuple[str, ...] = (sys.executable,)) -> float:
    return demo._run(Console(quiet=True), name, name, launcher, options, num_workers).test_auc


def test_embedded_reaches_plain_paddles_from_the_same_rows() -> None:
    assert abs(auc_of("embedded") - auc_of("plain", "--plain")) <= EMBEDDED_TOLERANCE


def test_two_pservers_and_workers_reach_plain_paddles_mean_auc() -> None:
    fleetrun = (sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "logs/{name}")
    fleetrun += ("--server_num", "2", "--worker_num", "2")
    plain = [auc_of(f"plain-{seed}", "--plain", "--seed", str(seed)) for seed in SEEDS]
    several = [auc_of(f"distributed-{seed}", "--seed", str(seed), num_workers=2, launcher=fleetrun) for seed in SEEDS]
    assert abs(sum(several) - sum(plain)) / len(SEEDS) <= DISTRIBUTED_TOLERANCE, (plain, several)
