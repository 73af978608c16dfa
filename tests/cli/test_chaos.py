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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "lag", "geo", "sync"])
@pytest.mark.parametrize(
    "kind",
    ["worker killed", "disk of the logs full, and a pserver killed", "coordinator suspended for seconds"],
    ids=["worker", "disk", "coordinator"],
)
def test_rarer_faults_lose_and_double_nothing(kind: str, mode: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "--minutes", "0", "--mode", mode, "--faults", "3", "--kind", kind])
    lacks = ("capability SYS_ADMIN", "no program 'etcd'", "library etcd3gw is missing")
    if any(each in str(result.exception) for each in lacks):  # this machine cannot have that fault
        pytest.skip(str(result.exception))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "lag", "sync"])
def test_row_caches_lose_and_double_nothing(mode: str) -> None:
    arguments = ["--minutes", "0", "--mode", mode, "--faults", "5", "--row-lag", "50"]
    result = CliRunner().invoke(app, ["chaos", *arguments])
    assert result.exit_code == 0, result.output


@pytest.mark.chaos
def test_processes_do_not_grow_in_half_an_hour() -> None:
    """No power is cut: for that no log is synced, and workers keep all of their pushes."""
    kinds = ["pserver killed", "all pservers killed", "all connections of a pserver cut"]
    arguments = ["--minutes", "30", "--mode", "async", "--faults", "100000", "--json"]
    arguments += [argument for kind in kinds for argument in ("--kind", kind)]
    result = CliRunner().invoke(app, ["chaos", *arguments])
    assert result.exit_code == 0, result.output
    for use in json.loads(result.output)["growth"].values():
        assert use["rss_mib_per_hour"] < 1.0, use
        assert use["num_files"][1] <= use["num_files"][0] + 1, use


@pytest.mark.chaos
@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_an_hour_loses_and_doubles_nothing(durability: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "--minutes", "30", "--durability", durability])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--row-lag", "50", "--mode", "geo"],
        ["--row-lag", "50", "--kind", "worker killed"],
        ["--durability", "snapshot", "--mode", "sync"],
        ["--durability", "snapshot", "--kind", "torn record at the end of the log"],
        ["--durability", "snapshot", "--kind", "worker killed"],
        ["--kind", "worker killed", "--kind", "power cut: records of the log that were not synced are lost"],
    ],
    ids=[
        "windows of a geo job",
        "updates of a dead worker",
        "sync jobs end",
        "no log to cut",
        "worker killed without a log",
        "killed worker and power cut",
    ],
)
def test_what_a_job_cannot_survive_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["chaos", *arguments])
    assert result.exit_code != 0
    assert "chaos: --" in str(result.exception)
