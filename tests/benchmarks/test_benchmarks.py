"""The benchmarks at a tiny size: that they run, check what they measure and record it; never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import kernels, page, plot
from benchmarks.__main__ import WAYS, main
from benchmarks.record import RESULTS, ROOT
from fleet_sparse.core.warm_up import warm_up
from support.jobs import environment

TINY = {  # in the order in which they begin
    "snapshot": "--rows 5000 --pservers 1 --rounds 1 --pushes 5",
    "client": "--rows 2000 --batch 500 --cycles 3 --rounds 2",
    "growth": "--rows 300000 --rounds 2",
    "kernels": "--rows 3000 --dims 8 64 --batch 500 --calls 1 --rounds 2 --gigabytes 0.01",
    "start": "--rounds 1 --no-cold",
    "lookup": "--pservers 0 --steps 2 --rounds 2",
    "step": "--pservers 0 --steps 2 --rounds 2",
    "dense": "--workers 2 --kilobytes 1 --rounds 2",
    "convergence": "--modes sync --seeds 1 --data synthetic 1000",
}
AT_ONCE = 3  # on two cores: most of them wait for processes
FIELDS = {"benchmark", "date", "commit", "is_dirty", "machine", "options", "rounds"}
MACHINE = {"cpu", "cores", "memory_bytes", "kernel", "load", "omp_num_threads", "python", "packages"}


class Tiny(NamedTuple):
    """Runs that were begun, and where they are recorded."""

    runs: dict[str, Future[subprocess.CompletedProcess[str]]]
    results: Path

    def record(self, name: str) -> dict:
        """What a run recorded, once it ended."""
        ended = self.runs[name].result()
        assert ended.returncode == 0, ended.stderr[-2000:]
        (line,) = (self.results / f"{name}.jsonl").read_text().splitlines()
        return json.loads(line)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[Tiny]:
    results = tmp_path_factory.mktemp("results")
    warm_up()  # or each of them would compile all kernels

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *TINY[name].split(), "--results", str(results)]
        return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield Tiny({name: pool.submit(run, name) for name in TINY}, results)
        pool.shutdown(cancel_futures=True)


def flat(value) -> list[float]:
    """All numbers of what a round measured."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in flat(each)]
    if isinstance(value, list):
        return [number for each in value for number in flat(each)]
    return [value] if isinstance(value, int | float) else []


def test_every_benchmark_is_run_here(tiny: Tiny) -> None:
    assert set(tiny.runs) == set(WAYS)
    with_main = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text("utf-8")}
    assert with_main - {"__main__"} == set(WAYS)


@pytest.mark.parametrize("name", [*list(TINY)[1:], "snapshot"])  # the longest last
def test_a_run_is_recorded_with_machine_commit_and_all_rounds(tiny: Tiny, name: str) -> None:
    record = tiny.record(name)
    assert record.keys() >= FIELDS
    assert record["machine"].keys() == MACHINE
    assert record["benchmark"] == name
    assert record["options"].keys().isdisjoint({"results"})
    assert record["rounds"]
    measured = flat(record["rounds"])
    assert measured
    assert np.isfinite(measured).all()


def test_kernels_measures_every_rule_and_index_and_batch_kernel(tiny: Tiny) -> None:
    record = tiny.record("kernels")
    found = {case["kernel"] for case in record["cases"].values()}
    assert found >= {"find", "insert", "gather", "find and gather", "dedup", "merge", "sgd", "adam", "lamb"}
    assert all(
        "limit" in record["rounds"][0][name] for name, case in record["cases"].items() if case["kernel"] == "find"
    )


def test_a_kernel_that_is_wrong_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="find: another result than NumPy's"):
        kernels.check("find", np.array([1, 2]), np.array([1, 3]))


def test_sync_training_equals_plain_paddle_in_the_recorded_convergence(tiny: Tiny) -> None:
    (seed,) = tiny.record("convergence")["rounds"]
    assert abs(seed["sync"]["test_auc"] - seed["plain Paddle, batch 512"]["test_auc"]) < 0.01


def test_the_page_shows_every_recorded_run(tiny: Tiny) -> None:
    for name in TINY:
        tiny.record(name)
    made = page.files(tiny.results)
    for name, block in page.BLOCKS.items():
        if name != "convergence-flights":
            assert block(tiny.results).text in made["benchmarks.md"]
    plots = {path for path in made if path.endswith(".svg")}
    assert plots == {f"plots/{name}.svg" for name in ("growth-rate", "growth-memory", "lookup", "step")}
    assert all(path in made["benchmarks.md"] for path in plots)


def test_the_page_and_its_plots_are_what_the_recorded_runs_make() -> None:
    made = page.files(RESULTS)
    there = {
        str(path.relative_to(page.DOCS)): path.read_text("utf-8")
        for path in [page.DOCS / "benchmarks.md", *page.DOCS.glob("plots/*")]
    }
    assert there == made, "run scripts/bench --page"


def test_without_a_recorded_run_a_block_stays_as_it_was_written(tmp_path: Path) -> None:
    written = page.files(tmp_path)["benchmarks.md"]
    assert "No run is recorded yet.\n" in written
    assert "<!-- end -->" not in written


@pytest.mark.parametrize("arguments", [["nonsense"], ["--rows", "1"], ["growth", "nonsense"]])
def test_an_unknown_benchmark_is_refused_with_the_list_of_those_there_are(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    assert "Benchmarks: start, kernels," in capsys.readouterr().out


def test_options_of_ones_own_leave_the_page_and_its_results_alone(tmp_path: Path) -> None:
    def of_results() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in [*RESULTS.glob("*"), page.DOCS / "benchmarks.md"]}

    before = of_results()
    command = [sys.executable, "-m", "benchmarks", "client", *TINY["client"].split(), "--channels", "in-process"]
    subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, env=environment(), check=True, capture_output=True)
    assert os.listdir(tmp_path) == ["client.jsonl"]
    assert of_results() == before


def test_a_plot_is_xml_and_its_bars_are_as_long_as_their_values() -> None:
    svg = ElementTree.fromstring(plot.bars("a < b", "ms", [plot.Bar("one", 1, 2, 3), plot.Bar("two", 3, 4, 5)], mark=1))
    widths = [float(each.attrib["width"]) for each in svg.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0])


def test_a_curve_goes_up_where_its_values_do() -> None:
    svg = ElementTree.fromstring(plot.lines("rate", "rows", "M/s", {"round 1": [(1e5, 1.0), (1e6, 2.0), (1e7, 3.0)]}))
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    points = np.array([point.split(",") for point in line.attrib["points"].split()], float)
    assert (np.diff(points[:, 0]) > 0).all()
    assert (np.diff(points[:, 1]) < 0).all()
