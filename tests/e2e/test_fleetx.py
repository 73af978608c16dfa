"""FleetX's own examples, if `FLEETX` is a checkout of PaddleFleetX (branch `old_develop`): docs/paddlerec.md has them.

`wide_and_deep_dataset` is the quick start of Paddle's own documentation of parameter servers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from support.jobs import fleetrun, python
from support.paddlerec import ONE_LINE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("FLEETX"), reason="FLEETX is not set to a checkout of PaddleFleetX"),
]

NUM_LINES = 200
"""Lines of the data of both examples."""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a copy of an example whose `train.py` has one line more; `python` is this one."""
    command = tmp_path / "bin" / "python"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")

    def copied(name: str) -> Path:
        directory = tmp_path / name
        shutil.copytree(Path(os.environ["FLEETX"]) / "examples" / name, directory)
        train = directory / "train.py"
        train.write_text(f"{ONE_LINE}\n{train.read_text('utf-8')}", "utf-8")
        return directory

    return copied


def logs_of(directory: Path, num_workers: int) -> list[str]:
    """Runs `train.py` alone, or on two pservers with two workers; returns the output of each worker."""
    if num_workers == 1:
        with python(str(directory / "train.py"), directory) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return [output]
    ended = fleetrun(directory / "train.py", directory, num_servers=2, num_workers=2, timeout_s=300)
    return [ended.logs[f"workerlog.{worker}"] for worker in range(2)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_wide_and_deep_trains_and_infers_with_global_metrics(example, num_workers):
    logs = logs_of(example("wide_and_deep"), num_workers)
    for log in logs:
        assert len(re.findall(r"^TRAIN ---> pass: 0 loss: [\d.]+$", log, re.MULTILINE)) == NUM_LINES // 10, log
        assert len(re.findall(r"^TEST ---> loss: [\d.]+ auc: 0\.[\d]+", log, re.MULTILINE)) == NUM_LINES // 10
    of_all = [re.findall(r"global auc: (\S+) global acc: (\S+)", log) for log in logs]
    assert len(of_all[0]) == NUM_LINES // 50
    assert all(each == of_all[0] for each in of_all)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_quick_start_trains_from_its_data_set(example, num_workers):
    for log in logs_of(example("wide_and_deep_dataset"), num_workers):
        losses = re.findall(r"batch: \[(\d+)\], loss: \[([\d.]+)\]", log)
        assert [int(batch) for batch, _ in losses] == list(range(1, NUM_LINES // 4 + 1)), log
