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


def test_script_that_an_exception_ends_makes_its_last_call() -> None:
    script = """from fleet_sparse.plugin.supervised_script import call_at_exception, is_supervised, supervise_script
assert not is_supervised()
supervise_script()
assert is_supervised()
call_at_exception(lambda: print("of an earlier connection"))
call_at_exception(lambda: print("stays away"))
raise ValueError"""
    environment = {**child_environment(), "TRAINING_ROLE": "TRAINER", "FLEET_SPARSE_RESTARTS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=END_S
    )
    assert (ended.returncode, ended.stdout) == (1, "stays away\n"), ended.stderr
