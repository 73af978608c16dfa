"""`fleet-sparse plan`: its options, its output and its errors; the model is in tests/tools/capacity."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.cli.plan import rounded
from fleet_sparse.errors import SettingError
from fleet_sparse.tools.capacity.cached_rows import CachedRows
from fleet_sparse.tools.capacity.coefficients import shipped_coefficients
from fleet_sparse.tools.capacity.job import Machines, PlannedJob
from fleet_sparse.tools.capacity.plan import plan
from fleet_sparse.tools.capacity.zipf import distinct_of_zipf
from support.jobs import environment
from support.sources import ROOT


def run(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "120"})


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_json_is_what_the_model_says() -> None:
    found = as_json(
        *("--rows", "1e9", "--dim", "32", "--workers", "20", "--pservers", "8", "--optimizer", "adam"),
        *("--tables", "4", "--fields", "40", "--batch", "256", "--distinct", "0.5", "--dense", "1e5"),
        *("--mode", "sync", "--compute-ms", "20", "--spread", "0.1"),
        *("--memory-gb", "128", "--network-gbit", "10", "--cores", "8", "--round-trip-us", "50"),
    )
    tables = {"rows": 1e9, "dim": 32, "rule": "adam", "tables": 4, "fields": 40, "batch": 256, "distinct": 0.5}
    job = PlannedJob(**tables, dense=1e5, workers=20, compute_s=0.02, spread=0.1, mode="sync")
    expected = plan(job, Machines(128e9, 10e9, 4, round_trip_s=50e-6), shipped_coefficients(), 8)
    assert PlannedJob(**found["job"] | {"cached": CachedRows(*found["job"]["cached"])}) == job
    assert found["step_s"] == pytest.approx(expected.step_s)
    assert found["pserver_memory_bytes"]["total"] == pytest.approx(expected.memory.total)
    assert found["network"]["worker_in_gbit_per_s"] == pytest.approx(expected.worker_bits_per_s[0] / 1e9)
    assert found["network"]["pserver_out_gbit_per_s"] == pytest.approx(expected.pserver_bits_per_s[1] / 1e9)
    assert (found["limit"], found["fits"], found["is_chosen"]) == (expected.limit.value, True, False)
    assert (found["num_pservers"], found["num_machines"]) == (8, 2)


def test_the_number_of_pservers_is_chosen_if_it_is_left_out() -> None:
    found = as_json("--rows", "1e11", "--workers", "100")
    assert found["is_chosen"]
    assert found["num_pservers"] >= found["least_pservers"] > 100


def test_every_count_of_the_job_and_its_machines_takes_a_suffix() -> None:
    names = ("dim", "workers", "pservers", "tables", "fields", "batch", "dense", "cores")
    short, long = ([word for name in names for word in (f"--{name}", text)] for text in ("1k", "1000"))
    assert as_json("--rows", "1G", *short) == as_json("--rows", "1G", *long)


def test_zipf_says_how_many_ids_are_distinct() -> None:
    found = as_json("--rows", "26e6", "--distinct", "zipf:1.2")
    assert found["job"]["distinct"] == pytest.approx(distinct_of_zipf(512, 1e6, 1.2) / 512)
    assert as_json("--rows", "26e6", "--distinct", "zipf") == as_json("--rows", "26e6", "--distinct", "zipf:1.1")


def test_people_see_the_accuracy_the_facts_the_limit_and_bars() -> None:
    output = run("--rows", "1e10", "--workers", "8", "--pservers", "32", "--compute-ms", "1000").output
    held_out = shipped_coefficients().held_out
    assert f"In {held_out.num_cases} other jobs" in output
    assert f"{held_out.lowest:g} to {held_out.highest:g} times" in output
    assert "no job with more than 4 workers or 4 pservers" in output
    for text in ("1e+10 rows of dim 16, adagrad, async", "limit: worker compute", "examples/s", "Gbit/s", "GB", "█"):
        assert text in output


def test_estimates_have_two_significant_digits() -> None:
    assert list(map(rounded, (0.01234, 3.449, 17.8, 123_456))) == ["0.012", "3.4", "18", "120,000"]


def test_too_little_memory_exits_1_and_names_enough_pservers() -> None:
    least = as_json("--rows", "1e10")["least_pservers"]
    result = run("--rows", "1e10", "--pservers", "2")
    assert "limit: pserver memory" in result.output
    assert f"Use at least {least}." in result.output
    assert result.exit_code == 1


def test_a_chart_is_written_as_svg(tmp_path) -> None:
    arguments = ("--rows", "1e10", "--workers", "8", "--chart", str(tmp_path / "step.svg"))
    assert as_json(*arguments)["num_pservers"] > 1
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_the_commands_of_the_page_run(tmp_path, monkeypatch) -> None:
    commands = re.findall(r"^fleet-sparse plan (.*)$", (ROOT / "docs" / "scaling.md").read_text(), re.M)
    monkeypatch.chdir(tmp_path)
    assert [run(*command.split()).exit_code for command in commands] == [0, 0, 0]


def test_nothing_heavy_is_loaded() -> None:
    code = """
import sys
from fleet_sparse.cli import app
app(["plan", "--rows", "1e9", "--json"], standalone_mode=False)
print(sorted({"numba", "numpy", "matplotlib", "paddle", "grpc", "zmq"} & set(sys.modules)), file=sys.stderr)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stderr.strip() == "[]"


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dim 0", "plan: --dim is 0, should be 1 to 65535"),
        ("--cores 0", "plan: --cores is 0, should be 1 to 16384"),
        ("--distinct most", "plan: --distinct is 'most', should be a share as 0.7, or zipf:1.1"),
        ("--distinct 2", "plan: --distinct is 2, should be a share of the ids"),
        ("--distinct zipf --batch 0", "plan: --batch is 0, should be 1"),
        ("--rows 1e18 --distinct zipf", "plan: --rows is 1e+18, should be 1"),
        ("--tables 2G", "plan: --tables is 2e+09, should be 1 to 1e+09"),
        ("--pservers 16385", "plan: --pservers is 16385, should be 1 to 16384"),
        ("--compute-ms -3", "plan: --compute-ms is -3, should be 0"),
        ("--round-trip-us -3", "plan: --round-trip-us is -3, should be 0"),
        ("--optimizer adamant", "plan: --optimizer is 'adamant', should be one of"),
        ("--chart step.png", "plan: --chart is step.png, should be a file whose name ends"),
        ("--chart /nowhere/step.svg", "plan: --chart is /nowhere/step.svg, should be a writable file"),
        ("--memory-gb -1", "plan: --memory-gb is -1, should be above 0"),
        ("--memory-gb 0.1", "plan: --memory-gb is 0.1, should be at least 1 for 16384 pservers"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(arguments, message) -> None:
    result = run("--rows", "1e9", *arguments.split())
    assert isinstance(result.exception, SettingError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "many"], "'many' should be a whole number, as 1000000, 1_000_000, 1,000,000, 1e6 or 1M."),
        ([], "Missing option '--rows'"),
        (["--rows", "1", "--mode", "geo"], "Invalid value for '--mode'"),
    ],
)
def test_a_malformed_argument_exits_2_without_a_traceback(arguments, message) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


CACHED_JOB = ("--rows", "10M", "--dim", "64", "--workers", "8", "--distinct", "zipf:1.1", "--pservers", "1")


def test_row_cache_says_what_it_saves_and_if_it_pays() -> None:
    arguments = [*CACHED_JOB, "--cache-rows", "500k", "--row-lag", "100"]
    assert "it pays" in run(*arguments, "--network-gbit", "1").output
    assert "it does not pay" in run(*arguments, "--dim", "4", "--network-gbit", "1000").output


def test_the_plan_that_running_md_shows_answers_what_it_says() -> None:
    page = (ROOT / "docs" / "running.md").read_text("utf-8").replace("\\\n", " ")
    shown = re.search(r"fleet-sparse plan (.*--cache-rows.*?)# (.*)", page)
    assert shown
    command, answer = shown.groups()
    assert answer in " ".join(run(*command.split()).output.split())
    assert "it does not pay" in " ".join(run(*command.split(), "--tables", "26").output.split())


def test_row_cache_in_json_is_bytes_and_step_with_and_without() -> None:
    bounds = (["--row-lag", "100"], ["--row-drift", "0.06", "--row-step", "0.0006"])
    without = as_json(*CACHED_JOB, "--network-gbit", "1")
    assert without["row_cache"] is None
    for bound in bounds:
        found = as_json(*CACHED_JOB, "--network-gbit", "1", "--cache-rows", "500k", *bound)
        assert found["row_cache"]["step_s_without"] == without["step_s"] > found["step_s"]
        assert found["row_cache"]["step_bytes_without"] > 1.5 * found["row_cache"]["step_bytes"]
        assert found["row_cache"]["pays"]


def test_row_cache_takes_a_share_of_a_quarter() -> None:
    lag = [*CACHED_JOB, "--cache-rows", "500k", "--row-lag", "100"]
    of = {share: as_json(*lag, "--row-lag-share", share)["row_cache"]["step_bytes"] for share in ("0", "0.25")}
    assert of["0"] < of["0.25"] == as_json(*lag)["row_cache"]["step_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cache-rows 1k", "plan: --cache-rows is 1,000 without a bound"),
        ("--row-lag 5", "plan: --row-lag is 5 without a row cache"),
        ("--row-drift 0.1 --row-step 0.01", "plan: --row-drift is 0.1 without a row cache"),
        ("--cache-rows 1k --row-lag 5 --row-drift 0.1", "plan: --row-lag is 5 and --row-drift is 0.1, and"),
        ("--cache-rows 1k --row-drift -0.1", "plan: --row-drift is -0.1, should be above 0"),
        ("--cache-rows 1k --row-drift 0.1", "plan: --row-drift is 0.1 and --row-step is 0, should be"),
        ("--cache-rows 1k --row-lag 5 --distinct 0.7", "plan: --distinct is '0.7' with --cache-rows, should be zipf"),
        ("--cache-rows 11M --row-lag 5", "plan: --cache-rows is 11,000,000, should be at most the 10,000,000"),
    ],
)
def test_each_mistake_about_a_row_cache_has_its_own_message(arguments, message) -> None:
    result = run("--rows", "10M", "--distinct", "zipf", *arguments.split())
    assert isinstance(result.exception, SettingError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--row-drift", "0.1"],
        ["--row-drift", "0.1", "--row-step", "-1"],
        ["--row-drift", "nan", "--row-step", "1"],
        ["--row-lag", "5", "--row-step", "1"],
        ["--row-lag", "5", "--row-lag-share", "2"],
        ["--row-lag", "5", "--cache-steps", "0"],
        ["--row-drift", "0.1", "--row-step", "0.01", "--row-lag-share", "0.5"],
    ],
    ids=" ".join,
)
def test_row_cache_with_a_number_out_of_its_range_is_refused(arguments) -> None:
    result = run(*CACHED_JOB, "--cache-rows", "1k", *arguments)
    assert isinstance(result.exception, SettingError)
