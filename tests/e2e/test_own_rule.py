"""The example of docs/development.md, on a pserver process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import local_pservers
from support.jobs import environment, output_of
from support.sources import ROOT


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the variables of a job that finds the example."""
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(# my_rules\.py\n.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "my_rules.py").write_text(example[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return {"FLEET_SPARSE_RULES": "my_rules"}


def test_rule_of_a_users_module_trains_on_a_pserver(tmp_path: Path, variables: dict[str, str]) -> None:
    with local_pservers(1, root=tmp_path, environment=variables) as pservers:
        output = output_of("own_rule.py", tmp_path, **variables, **pservers.environment())
    assert re.findall("row (.*)", output) == ["[[0.5, 0.5]]", "[[0.25, 0.25]]", "[[0.0, 0.0]]"], output


def test_pserver_without_the_module_is_refused() -> None:
    command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", "0", "--num-shards", "1"]
    ended = subprocess.run(
        [*command, "--control", "127.0.0.1:0"],
        env=environment(FLEET_SPARSE_RULES="no_such_rules"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "pserver 0: SettingError: FLEET_SPARSE_RULES: module 'no_such_rules' cannot be imported" in ended.stderr
