"""Calls that scripts make on worker 0 alone, before init_worker, or through fleet.util, with several workers."""

from __future__ import annotations

import re

import pytest

from support.jobs import outputs_of


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return outputs_of("worker_0_alone.py", tmp_path_factory.mktemp("job"))


def test_all_workers_follow_what_worker_0_loads(outputs: list[str]) -> None:
    for output in outputs:
        after = re.findall(r"^after (\S+)", output, re.MULTILINE)
        assert len(set(after)) == 5
        assert after[:5] == after[5:]


def test_rows_of_a_sparse_layer_are_on_the_pservers(outputs: list[str]) -> None:
    assert all(1 <= int(re.findall(r"^rows (\d+)", output, re.MULTILINE)[0]) <= 60 for output in outputs)


@pytest.mark.parametrize(
    "line",
    ["sum [[3, 30]]", "max [2]", "large 27000000", "gathered [1, 2]", "metric 3.0", "refused: fleet.util.all_reduce"],
)
def test_collectives_of_fleet_util_are_global_without_gloo(outputs: list[str], line: str) -> None:
    assert all(re.search(f"^{re.escape(line)}", output, re.MULTILINE) for output in outputs), outputs
