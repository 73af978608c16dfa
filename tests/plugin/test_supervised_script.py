from __future__ import annotations

import subprocess
import sys

from fleet_sparse.local_pservers import child_environment

END_S = 60.0


def test_script_started_by_a_supervised_one_has_no_supervisor() -> None:
    install = "from fleet_sparse.plugin.supervised_script import supervise_script; supervise_script()"
    inner = f"{install}; import os; print(os.getpid(), os.getppid(), flush=True)"
    child = f"""{install}; import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {inner!r}])"""
    environment = {**child_environment(), "TRAINING_ROLE": "TRAINER", "FLEET_SPARSE_RESTARTS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", child], env=environment, capture_output=True, text=True, check=True, timeout=END_S
    )
    script, _, parent = map(int, found.stdout.split())
    assert script == parent
