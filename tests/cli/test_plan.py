"""`fleet-sparse plan`: its options, what it prints, and its errors; the model is in tests/test_plan.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.costs import shipped_costs
from fleet_sparse.errors import SettingError
from fleet_sparse.plan import Job, Machines, distinct_of_zipf, plan
from support.jobs import environment


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
        *("--memory-gb", "128", "--network-gbit", "10", "--cores", "8"),
    )
    tables = {"rows": 1e9, "dim": 32, "rule": "adam", "tables": 4, "fields": 40, "batch": 256, "distinct": 0.5}
    job = Job(**tables, dense=1e5, workers=20, compute_s=0.02, spread=0.1, mode="sync")
    expected = plan(job, Machines(128e9, 10e9, 4), shipped_costs(), 8)
    assert Job(**found["job"]) == job
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


@pytest.mark.parametrize("rows", ["1G", "1e9", "1_000_000_000", "1,000,000,000"])
def test_a_count_may_be_written_in_many_ways(rows) -> None:
    assert as_json("--rows", rows) == as_json("--rows", "1000000000")


def test_every_count_of_the_job_and_its_machines_takes_a_suffix() -> None:
    names = ("dim", "workers", "pservers", "tables", "fields", "batch", "dense", "cores")
    short, long = ([word for name in names for word in (f"--{name}", text)] for text in ("1k", "1000"))
    assert as_json("--rows", "1G", *short) == as_json("--rows", "1G", *long)


def test_zipf_says_how_many_ids_are_distinct() -> None:
    found = as_json("--rows", "26e6", "--distinct", "zipf:1.2")
    assert found["job"]["distinct"] == pytest.approx(distinct_of_zipf(512, 1e6, 1.2) / 512)
    assert as_json("--rows", "26e6", "--distinct", "zipf") == as_json("--rows", "26e6", "--distinct", "zipf:1.1")


def test_people_see_pservers_memory_network_step_limit_and_bars() -> None:
    output = run("--rows", "1e10", "--workers", "8", "--pservers", "32", "--compute-ms", "1000").output
    assert "A model, from costs measured at commit" in output
    assert "with jobs of at most 4 workers" in output
    for text in ("1e+10 rows of dim 16, adagrad, async", "limit: worker compute", "examples/s", "Gbit/s", "GB", "█"):
        assert text in output


def test_too_little_memory_is_told_with_the_number_that_would_do() -> None:
    least = as_json("--rows", "1e10")["least_pservers"]
    result = run("--rows", "1e10", "--pservers", "2")
    assert "limit: pserver memory" in result.output
    assert f"Take {least} or more." in result.output
    assert result.exit_code == 1


def test_the_fewest_pservers_that_have_the_memory_are_among_the_others_that_are_shown() -> None:
    least = as_json("--rows", "1e10")["least_pservers"]
    output = run("--rows", "1e10", "--pservers", "500").output.partition("with other numbers of pservers")[2]
    assert any(line.replace("|", " ").replace("│", " ").split()[:1] == [f"{least:,}"] for line in output.splitlines())


def test_sync_says_that_it_waits_for_the_slowest() -> None:
    assert "sync waits for the slowest worker" in run("--rows", "1e6", "--workers", "2", "--mode", "sync").output


def test_a_sync_step_is_shown_with_all_its_terms_and_those_that_go_on_beside() -> None:
    words = ("--rows", "1e9", "--workers", "64", "--pservers", "8", "--mode", "sync", "--network-gbit", "1")
    output = run(*words, "--spread", "0.1").output
    for text in ("limit: pserver network", "slowest worker: spread", "worker network *", "I/O waited for *"):
        assert text in output
    assert "add up to the step, but those with * go on beside longer ones" in output
    assert "slowest worker" not in run(*words).output.split("sync waits")[0]


def test_a_chart_is_written_where_it_is_asked_for(tmp_path) -> None:
    arguments = ("--rows", "1e10", "--workers", "8", "--chart", str(tmp_path / "step.svg"))
    assert as_json(*arguments)["num_pservers"] > 1
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_nothing_heavy_is_loaded() -> None:
    code = """
import sys
from fleet_sparse.cli import app
app(["plan", "--rows", "1e9", "--json"], standalone_mode=False)
print(sorted({"numba", "numpy", "paddle", "grpc", "zmq"} & set(sys.modules)), file=sys.stderr)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stderr.strip() == "[]"


# All the error paths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1e9", "--dim", "0"], "plan: --dim is 0, should be 1 to 65535"),
        (["--rows", "1e9", "--cores", "0"], "plan: --cores is 0, should be 1 to 16384"),
        (["--rows", "1e9", "--distinct", "most"], "plan: --distinct is 'most', should be a share as 0.7, or zipf:1.1"),
        (["--rows", "1e9", "--distinct", "zipf:-1"], "plan: --distinct is 'zipf:-1', should be a share"),
        (["--rows", "1e9", "--distinct", "zipf", "--batch", "0"], "plan: --batch is 0, should be 1"),
        (["--rows", "1e18", "--distinct", "zipf"], "plan: --rows is 1e+18, should be 1"),
        (["--rows", "1e9", "--compute-ms", "-3"], "plan: --compute-ms is -3, should be 0"),
        (["--rows", "1e9", "--optimizer", "adamant"], "plan: --optimizer is 'adamant', should be one of"),
        (["--rows", "1e9", "--chart", "step.png"], "plan: --chart is step.png, should be a file whose name ends"),
        (["--rows", "1e9", "--memory-gb", "-1"], "plan: --memory-gb is -1, should be above 0"),
    ],
)
def test_nonsense_is_refused(arguments, message) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, SettingError)
    assert str(result.exception).startswith(message)


def test_a_chart_that_cannot_be_written_is_told(tmp_path) -> None:
    result = run("--rows", "1e9", "--chart", str(tmp_path / "none" / "step.svg"))
    assert isinstance(result.exception, SettingError)
    expected = (
        f"plan: --chart is {tmp_path}/none/step.svg, should be a file that can be written (No such file or directory)"
    )
    assert str(result.exception) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "many"], "'many' should be a whole number, as 1000000, 1_000_000, 1,000,000, 1e6 or 1M."),
        (["--rows", "nan"], "'nan' should be a whole number"),
        (["--rows", "1G", "--batch", "512.5"], "'512.5' should be a whole number"),
        ([], "Missing option '--rows'"),
        (["--rows", "1", "--mode", "geo"], "Invalid value for '--mode'"),
    ],
)
def test_wrong_argument_is_told_without_a_trace(arguments, message) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
