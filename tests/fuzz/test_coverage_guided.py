"""Cases that Atheris finds by the lines that they reach."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import child_environment
from support.fuzzing import Cases

TESTS = Path(__file__).parent.parent


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.cases(5_000, 300_000)
@pytest.mark.parametrize("target", ["frames", "manifests"])
def test_what_reaches_new_lines_is_refused_or_equal(cases: Cases, target: str, tmp_path: Path) -> None:
    options = [f"-runs={cases.num_cases}", f"-seed={cases.rng.randrange(1, 2**31)}", "-max_len=4096", str(tmp_path)]
    command = [sys.executable, "-m", "support.coverage_guided", target, *options]
    done = subprocess.run(command, cwd=TESTS, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (num_runs,) = re.findall(r"Done (\d+) runs", done.stderr)
    cases.report(done=int(num_runs), kept=len(list(tmp_path.iterdir())))
