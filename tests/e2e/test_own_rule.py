"""The examples of docs/development.md, on a pserver process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fleet_sparse.local_pservers import local_pservers
from support.jobs import output_of
from support.sources import ROOT


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the variables of a job that finds the examples."""
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    for name in ("my_rules", "my_entries"):
        example = re.search(rf"```python\n(# {name}\.py\n.*?)```", page, re.DOTALL)
        assert example is not None
        (tmp_path / f"{name}.py").write_text(example[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return {"FLEET_SPARSE_RULES": "my_rules"}


def test_rule_of_a_users_module_trains_on_a_pserver(tmp_path: Path, variables: dict[str, str]) -> None:
    with local_pservers(1, root=tmp_path, environment=variables) as pservers:
        output = output_of("own_rule.py", tmp_path, **variables, **pservers.environment())
    assert re.findall("row (.*)", output) == ["[[0.5, 0.5]]", "[[0.25, 0.25]]", "[[0.0, 0.0]]"], output


def test_entry_policy_of_a_users_module_admits_on_a_pserver(tmp_path: Path, variables: dict[str, str]) -> None:
    variables = {**variables, "FLEET_SPARSE_RULES": "my_entries"}
    with local_pservers(1, root=tmp_path, environment=variables) as pservers:
        output = output_of("own_entry.py", tmp_path, **variables, **pservers.environment())
    assert re.findall("row (.*)", output) == ["[[0.0, 0.0]]", "[[0.0, 0.0]]", "[[0.5, 0.5]]", "[[0.25, 0.25]]"], output
