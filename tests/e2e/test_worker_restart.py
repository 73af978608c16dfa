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


def worker_of(
    pservers: LocalPservers, index: int, directory: Path, stack: ExitStack, num_workers: int = 2
) -> subprocess.Popen[str]:
    worker = python(SCRIPT, directory, **pservers.environment(index, num_workers))
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


@pytest.mark.guarantee("A6")
def test_killed_worker_that_is_alone_keeps_its_dense_values(tmp_path: Path) -> None:
    with local_pservers(2, root=tmp_path) as pservers, ExitStack() as stack:
        killed = worker_of(pservers, 0, tmp_path, stack, num_workers=1)
        wait_for_line(killed, "step 4000 ")
        killed.kill()
        again = worker_of(pservers, 0, tmp_path, stack, num_workers=1)
        num_steps = int(wait_for_line(again, r"begins after (\d+) steps")[1])
        first_loss = float(wait_for_line(again, r"step \d+ loss (\S+)")[1])
        (tmp_path / "finish").touch()
        output = again.communicate(timeout=60)[0]
        assert again.returncode == 0, output
    # The features are rows + 1, and rows begin above -0.1 and grow: a step takes 0.009 at least from each of 4 weights.
    assert num_steps > 0
    assert first_loss <= -4 * 0.9 * 0.009 * num_steps


@pytest.mark.guarantee("H9")
def test_killed_lone_worker_had_sent_what_its_caches_held(tmp_path: Path) -> None:
    with local_pservers(2, root=tmp_path) as pservers, ExitStack() as stack:
        killed = python("cached_until_killed.py", tmp_path, **pservers.environment(0, 1))
        stack.callback(killed.communicate)
        stack.callback(killed.kill)
        wait_for_line(killed, r"held 10$")
        wait_for_line(killed, "step 4000 ")
        killed.kill()
        again = python("cached_until_killed.py", tmp_path, **pservers.environment(0, 1))
        stack.callback(again.communicate)
        stack.callback(again.kill)
        num_steps, num_in_rows = map(
            int, wait_for_line(again, r"begins after (\d+) steps, of which rows have (\d+)").groups()
        )
    assert 0 < num_steps <= num_in_rows
