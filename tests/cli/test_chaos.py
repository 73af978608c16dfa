"""`fleet-sparse chaos`: real jobs under faults."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fleet_sparse.cli import app


def test_a_short_run_loses_and_doubles_nothing() -> None:
    arguments = ["--minutes", "0", "--mode", "async", "--faults", "3", "--kind", "pserver killed", "--seed", "1"]
    result = CliRunner().invoke(app, ["chaos", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["modes"]["async"]["num_faults"] == {"kill": 3}
    assert report["modes"]["async"]["num_steps"] > 100
    assert report["discrepancies"] == []


@pytest.mark.chaos
@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_an_hour_loses_and_doubles_nothing(durability: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "--minutes", "30", "--durability", durability])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "arguments",
    [["--mode", "sync"], ["--kind", "torn record at the end of the log"]],
    ids=["sync jobs end", "no log to cut"],
)
def test_what_a_snapshot_cannot_survive_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["chaos", "--durability", "snapshot", *arguments])
    assert result.exit_code != 0
    assert "chaos: --" in str(result.exception)
