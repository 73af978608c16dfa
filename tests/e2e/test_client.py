"""A trainer of Paddle 2 with one line more, in one process and under fleetrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs import SCRIPTS, fleetrun, output_of


def last_auc(output: str) -> tuple[float, int]:
    """The AUC and the number of examples of the last epoch."""
    auc, count = re.findall(r"^epoch 2 cost \S+ auc (\S+) (\d+)", output, re.MULTILINE)[0]
    return float(auc), int(count)


def test_one_line_of_the_client_names_fleet_sparse() -> None:
    lines = (SCRIPTS / "client.py").read_text("utf-8").splitlines()
    assert len([line for line in lines if "fleet_sparse" in line]) == 1


def test_client_trains_in_one_process(tmp_path: Path) -> None:
    output = output_of("client.py", tmp_path)
    auc, num_examples = last_auc(output)
    assert (auc > 0.9, num_examples) == (True, 640), output


def test_client_trains_on_2_pservers_with_2_workers(tmp_path: Path) -> None:
    job = fleetrun("client.py", tmp_path, num_servers=2, num_workers=2)
    reports = [last_auc(job.logs[f"workerlog.{worker}"]) for worker in range(2)]
    assert reports[0] == reports[1] == (pytest.approx(reports[0][0]), 1280), job.logs
    assert reports[0][0] > 0.9
    assert (tmp_path / "model" / "000001-full" / "shard-1-of-2.fss").is_file()
