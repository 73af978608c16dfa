"""Loading and shrinking while pservers and several workers run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import local_pservers
from support.jobs import TIMEOUT_S, python


@pytest.mark.guarantee("V5")
def test_workers_go_back_together_to_what_was_saved(tmp_path: Path) -> None:
    with local_pservers(2, root=tmp_path) as pservers:
        workers = [python("load_model.py", tmp_path, **pservers.environment(index, 2)) for index in range(2)]
        try:
            outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    for output in outputs:
        after = re.findall(r"^after (\S+)", output, re.MULTILINE)
        assert len(set(after)) == 5
        assert after[:5] == after[5:]
    assert ["refused:" in output for output in outputs] == [True, False]
    (counts,) = set(re.findall(r"^rows (\d+) and then (\d+)", outputs[0], re.MULTILINE))
    assert int(counts[0]) == 60
    assert 0 < int(counts[1]) <= 60
