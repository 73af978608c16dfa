"""`fleet-sparse chaos`: real jobs under faults."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet_sparse.cli import app
from fleet_sparse.local_pservers import child_environment
from fleet_sparse.tools.chaos.faults import ON_REQUEST, FaultKind
from fleet_sparse.tools.chaos.job import NUM_PSERVERS, NUM_WORKERS
from fleet_sparse.tools.chaos.run import MODES, USUAL_KINDS
from support.waits import wait_until

_HOUR_S, _WAIT_S = 3600, 120
_LACKS = ("capability SYS_ADMIN", "no program 'etcd'", "library etcd3gw is missing", "capability SYS_PTRACE")


@pytest.fixture
def hours() -> None:
    """Lets a test take longer than the time after which `faulthandler` ends the process."""
    faulthandler.cancel_dump_traceback_later()


def run(*arguments: str) -> dict[str, Any]:
    """Runs the command, which has to end well; returns its report. Skips the test if such a fault is not permitted."""
    result = CliRunner().invoke(app, ["chaos", *arguments, "--json"])
    if any(each in str(result.exception) for each in _LACKS):
        pytest.skip(str(result.exception))
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.output)
    return report


def test_a_short_run_loses_and_doubles_nothing() -> None:
    arguments = ["--minutes", "0", "--mode", "async", "--faults", "3", "--kind", "pserver killed", "--seed", "1"]
    result = CliRunner().invoke(app, ["chaos", *arguments, "--rows", "70000", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["modes"]["async"]["kinds"]["kill"]["num_faults"] == 3
    assert report["modes"]["async"]["kinds"]["kill"]["pause_s"]["max"] > 0
    assert report["modes"]["async"]["num_steps"] > 100
    assert report["num_rows"] == 70000
    assert {name.split()[0] for name in report["growth"]} == {"worker", "pserver", "supervisor"}
    assert report["discrepancies"] == []


def processes_in(directory: Path) -> list[Path]:
    """Processes whose working directory is below a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if Path(os.readlink(process / "cwd")).is_relative_to(directory):
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fleet_sparse.cli", "chaos", "--mode", "async"]
    environment = child_environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, env=environment) as chaos:
        try:
            wait_until(lambda: len(processes_in(tmp_path)) >= NUM_PSERVERS + NUM_WORKERS, _WAIT_S)
            chaos.send_signal(number)
            assert chaos.wait(_WAIT_S) == 128 + number
        finally:
            chaos.kill()
    wait_until(lambda: not processes_in(tmp_path), _WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "lag", "geo", "sync"])
@pytest.mark.parametrize(
    "kind",
    ON_REQUEST,
    ids=[kind.name for kind in ON_REQUEST],
)
def test_rarer_faults_lose_and_double_nothing(kind: str, mode: str) -> None:
    run("--minutes", "0", "--mode", mode, "--faults", "3", "--kind", kind)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "lag", "sync"])
def test_row_caches_lose_and_double_nothing(mode: str) -> None:
    arguments = ["--minutes", "0", "--mode", mode, "--faults", "5", "--row-lag", "50"]
    result = CliRunner().invoke(app, ["chaos", *arguments])
    assert result.exit_code == 0, result.output


@pytest.mark.chaos
@pytest.mark.usefixtures("hours")
@pytest.mark.timeout(_HOUR_S + 1800)
@pytest.mark.parametrize(
    ("kinds", "roles"),
    [
        ([kind for kind in USUAL_KINDS if kind is not FaultKind.power], ("worker", "supervisor")),
        ((FaultKind.delay, FaultKind.suspend, FaultKind.connections), ("worker", "supervisor", "pserver")),
    ],
    ids=["pservers die", "pservers live on"],
)
def test_a_job_of_an_hour_loses_nothing_and_does_not_grow(kinds: Sequence[FaultKind], roles: tuple[str, ...]) -> None:
    """No power is cut: for that no log is synced, and workers keep all of their pushes."""
    options = [argument for kind in kinds for argument in ("--kind", kind)]
    report = run("--minutes", "60", "--jobs", "1", "--mode", "async", "--faults", "100000", *options)
    print(report)  # for the record: `pytest -rA` shows it
    assert report["discrepancies"] == []
    uses = [use for name, use in report["growth"].items() if name.startswith(roles)]
    assert len(uses) == 2 * len(roles)
    for use in uses:
        assert use["minutes"] > 55, use
        assert use["rss_mib_per_hour"] * 2**20 < 1e6, use
        assert use["files_per_hour"] == 0.0, use


@pytest.mark.chaos
@pytest.mark.usefixtures("hours")
@pytest.mark.timeout(5 * _HOUR_S)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "durability"),
    [*((kind, "log") for kind in FaultKind), (FaultKind.power, "sync")],
    ids=[*(kind.name for kind in FaultKind), "power-sync"],
)
def test_200_faults_lose_and_double_nothing(kind: FaultKind, durability: str, mode: str) -> None:
    """200 deaths of workers take two hours: they give no sign of life, so that the back-off grows to 30 s."""
    arguments = ["--jobs", "1", "--faults", "200", "--mode", mode, "--kind", kind, "--durability", durability]
    report = run("--minutes", "240", *arguments)
    assert report["discrepancies"] == []
    assert report["modes"][mode]["kinds"][kind.name]["num_faults"] == 200


@pytest.mark.chaos
@pytest.mark.usefixtures("hours")
@pytest.mark.timeout(_HOUR_S)
@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_mixed_faults_lose_nothing_unreported_and_double_nothing(durability: str) -> None:
    assert run("--minutes", "30", "--durability", durability)["discrepancies"] == []


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
