"""Trainers of Paddle 2 with one line more, in one process and under fleetrun."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.jobs import SCRIPTS, fleetrun, output_of

CLIENTS = ("client.py", "client_online.py", "client_quick_start.py", "client_wide_and_deep.py")
DAYS = ("20190720", "20190721", "20190722")
NUM_LINES = 200


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two files for each day, with labels that say whether most ids are odd; returns their directory."""
    rng = np.random.default_rng(1)
    for day in DAYS:
        (tmp_path / "data" / day).mkdir(parents=True)
        for part in range(2):
            lines = []
            for _ in range(NUM_LINES):
                ids = [rng.integers(1, 30, rng.integers(0, 4)).tolist() for _ in range(3)]
                flat = [number for slot in ids for number in slot]
                words = [f"{slot}:{number}" for slot, each in enumerate(ids) for number in each]
                lines.append(" ".join([str(int(2 * sum(n % 2 for n in flat) > len(flat))), *words]))
            (tmp_path / "data" / day / f"part-{part}").write_text("\n".join(lines) + "\n")
    return tmp_path


def outputs(script: str, directory: Path, num_workers: int) -> list[str]:
    """The outputs of the workers, in one process or on two pservers under fleetrun."""
    if num_workers == 1:
        return [output_of(script, directory)]
    job = fleetrun(script, directory, num_servers=2, num_workers=num_workers)
    logs = [job.logs[f"workerlog.{worker}"] for worker in range(num_workers)]
    assert not [log for log in logs if "Traceback" in log], logs
    return logs


def last_auc(output: str) -> tuple[float, int]:
    """The AUC and the number of examples of the last epoch."""
    auc, count = re.findall(r"^epoch 2 cost \S+ auc (\S+) (\d+)", output, re.MULTILINE)[0]
    return float(auc), int(count)


@pytest.mark.parametrize("script", CLIENTS)
def test_one_line_of_a_client_names_fleet_sparse(script: str) -> None:
    lines = (SCRIPTS / script).read_text("utf-8").splitlines()
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


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_online_client_learns_day_by_day(data: Path, num_workers: int) -> None:
    logs = outputs("client_online.py", data, num_workers)
    found = [re.findall(r"^(\d+) (\w+) auc (\S+) clicks (\S+) of (\S+)", log, re.MULTILINE) for log in logs]
    assert found == [found[0]] * num_workers
    assert [line[:2] for line in found[0]] == [(day, run) for day in DAYS for run in ("infer", "train")]
    shows = {name: [float(line[4]) for line in found[0] if line[1] == name] for name in ("infer", "train")}
    assert set(shows["infer"]) == {2.0 * NUM_LINES}
    # Two threads that train may overwrite each other's update of a sum (docs/running.md, Threads).
    assert all(1.6 * NUM_LINES <= each <= 2.0 * NUM_LINES for each in shows["train"]), shows
    aucs = [float(line[2]) for line in found[0] if line[1] == "infer"]
    assert aucs[0] == 0.5  # no id has a row
    assert aucs[2] > 0.85, aucs
    for day in DAYS:
        assert (data / "model" / day / "base" / "SERVING.json").is_file()
    for worker in range(num_workers):
        lines = (data / "dump" / f"part-{worker:05}-00000").read_text().splitlines()
        assert len(lines) == 2 * NUM_LINES // num_workers


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_quick_start_learns_from_files(data: Path, num_workers: int) -> None:
    for log in outputs("client_quick_start.py", data, num_workers):
        costs = [float(cost) for cost in re.findall(r"^epoch \d cost (\S+)", log, re.MULTILINE)]
        assert len(costs) == 3
        assert costs[2] < costs[0] < 0.75, costs


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_wide_and_deep_client_learns_and_infers(tmp_path: Path, num_workers: int) -> None:
    for log in outputs("client_wide_and_deep.py", tmp_path, num_workers):
        aucs = [float(auc) for auc in re.findall(r"^epoch \w+ cost \S+ auc (\S+)", log, re.MULTILINE)]
        assert len(aucs) == 4
        assert aucs[-1] > 0.9, aucs
        counts = [float(count) for count in re.findall(r"^correct (\S+)", log, re.MULTILINE)]
        assert counts == sorted(counts)
        assert 640 * num_workers < counts[-1] <= 3 * 640 * num_workers
