"""Jobs of one and of several workers that continue from each other's snapshots, in real processes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.diff import diff
from support.jobs import TIMEOUT_S, numbers, python


def losses(
    directory: Path,
    steps: str,
    *,
    num_workers: int,
    num_servers: int,
    save: str,
    load: str | None = None,
) -> list[float]:
    """Losses of worker 0 in a job that ends with a save."""
    with local_pservers(num_servers, root=directory, load_dirname=load) as pservers, ExitStack() as stack:
        workers = []
        for index in range(num_workers):
            variables = {"STEPS": steps, "SAVE": save}
            environment = {**pservers.environment(index, num_workers), **variables}
            workers.append(stack.enter_context(python("hand_over.py", directory, **environment)))
            stack.callback(workers[-1].kill)
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
        assert {worker.returncode for worker in workers} == {0}, outputs
    return numbers("loss", outputs[0])


def are_equal(directory: Path, *names: str) -> bool:
    """Returns whether two snapshots are equal bit by bit."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_content(str(directory / name))) for name in names)
        return diff(first, second).is_equal


@pytest.mark.guarantee("D4")
def test_one_worker_and_two_take_over_from_each_other(tmp_path: Path) -> None:
    whole = losses(tmp_path, "0,12", num_workers=1, num_servers=1, save="whole")
    parts = losses(tmp_path, "0,4", num_workers=1, num_servers=2, save="one")
    parts += losses(tmp_path, "4,8", num_workers=2, num_servers=3, save="two", load="one")
    parts += losses(tmp_path, "8,12", num_workers=1, num_servers=1, save="end", load="two")
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.guarantee("D4")
def test_snapshots_of_one_worker_and_of_two_are_equal_bit_by_bit(tmp_path: Path) -> None:
    losses(tmp_path, "0,4", num_workers=1, num_servers=2, save="one")
    losses(tmp_path, "0,0", num_workers=2, num_servers=3, save="two", load="one")
    losses(tmp_path, "0,0", num_workers=1, num_servers=1, save="end", load="two")
    assert are_equal(tmp_path, "one", "two")
    assert are_equal(tmp_path, "two", "end")
