"""A worker of an async job that dies and is started again: real processes, real Paddle."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import LocalPservers, local_pservers
from support.jobs import python, wait_for_line

SCRIPT = "until_finish.py"


def worker_of(pservers: LocalPservers, index: int, directory: Path, stack: ExitStack) -> subprocess.Popen[str]:
    worker = python(SCRIPT, directory, **pservers.environment(index, 2))
    stack.callback(worker.communicate)
    stack.callback(worker.kill)
    return worker


@pytest.mark.guarantee("A6")
def test_killed_worker_restarts_and_trains_with_the_others(tmp_path: Path) -> None:
    with local_pservers(2, root=tmp_path) as pservers, ExitStack() as stack:
        killed, other = (worker_of(pservers, index, tmp_path, stack) for index in (0, 1))
        wait_for_line(other, "step 50 ")
        wait_for_line(killed, "step 1500 ")  # it reports its position once a second
        killed.kill()
        assert killed.stdout is not None
        steps = re.findall(r"^step (\d+)", killed.stdout.read(), re.MULTILINE)
        last = int(steps[-1]) if steps else 1500
        again = worker_of(pservers, 0, tmp_path, stack)
        num_steps = int(wait_for_line(again, r"begins after (\d+) steps")[1])
        assert 0 < num_steps <= last + 50
        step, first_loss = wait_for_line(again, r"step (\d+) loss (\S+)").groups()
        assert num_steps <= int(step) < num_steps + 50
        (tmp_path / "finish").touch()
        outputs = [worker.communicate(timeout=60)[0] for worker in (again, other)]
        assert [worker.returncode for worker in (again, other)] == [0, 0], outputs
        assert all("met all workers" in output for output in outputs), outputs
    assert float(first_loss) < 0, "it began with the parameters that both had trained"
