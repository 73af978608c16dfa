"""The benchmarks at a tiny size: that they run, check what they measure and record it; never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import cpu_clock, kernels, local, page, scaling_page
from benchmarks.__main__ import WAYS, main
from benchmarks.peers import Peer
from benchmarks.record import RESULTS, ROOT
from fleet_sparse.costs import shipped_costs
from fleet_sparse.warm_up import warm_up
from support.jobs import environment

TINY = {  # in the order in which they begin
    "snapshot": "--rows 5000 --pservers 1 --rounds 1 --pushes 5",
    "cluster": "--workers 1 --pservers 1 --modes async --steps 2 --rounds 1",
    "scale": "--jobs async,1x1 sync,1x1 --steps 2 --passes 1 --rounds 1 --retries 0 --rows 300",
    "client": "--rows 2000 --batch 500 --cycles 3 --rounds 2 --shards 1",
    "growth": "--rows 300000 --rounds 2",
    "kernels": "--rows 3000 --dims 16 64 --batch 500 --calls 1 --rounds 2 --gigabytes 0.01",
    "start": "--rounds 1 --no-cold",
    "lookup": "--pservers 0 --steps 2 --rounds 2 --batches 3 --local-rows 1000",
    "step": "--pservers 0 --steps 2 --rounds 2 --batches 3 --local-rows 1000",
    "local": "--rows 2000 --dims 16 --batch 500 --cycles 2 --rounds 2 --no-torch",
    "parts": "--mode async --max-step-lag 2 --pservers 0 --steps 2 --rounds 2 --batches 3",
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
    assert [name for name, block in page.BLOCKS.items() if block(tiny.results) is None] == ["convergence-flights"]
    assert made["benchmarks.md"].count("No run is recorded yet.") == 1
    plots = {path for path in made if path.endswith(".svg")}
    names = ("client", "cluster-async", "growth-memory", "growth-rate", "local", "lookup", "scale", "step")
    assert plots == {f"plots/{name}.svg" for name in names}
    assert all(path in made["benchmarks.md"] for path in plots)


def test_the_page_and_its_plots_are_what_the_recorded_runs_make() -> None:
    made = page.files(RESULTS)
    there = {
        str(path.relative_to(page.DOCS)): path.read_text("utf-8")
        for path in [page.DOCS / "benchmarks.md", *page.DOCS.glob("plots/*")]
        if not path.name.startswith("scaling-")
    }
    assert there == made, "run scripts/bench --page"


def test_rows_that_were_trained_otherwise_end_the_benchmark() -> None:
    rows = np.ones((2, 4), np.float32)
    with pytest.raises(SystemExit, match=r"a store, adagrad: rows are 0[.]5 from NumPy's"):
        local.check("adagrad", {local.NUMPY: rows, local.OURS: rows + np.float32(0.5)})


def process(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_peer_answers_each_line_with_json_whatever_else_it_writes() -> None:
    with process("while True: print(f'noise\\n@@[{input()}]', flush=True)") as echo:
        asked = Peer(echo, "echo")
        assert [asked.ask(1), asked.ask(2)] == [[1], [2]]
        echo.kill()


def test_a_peer_that_ended_is_named() -> None:
    with process("input()") as silent, pytest.raises(SystemExit, match="that one ended before it was asked to"):
        Peer(silent, "that one").ask(1)


def test_a_process_has_computed_as_long_as_its_clock_says() -> None:
    before, ours = cpu_clock.cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() - ours < 0.02:
        pass
    assert cpu_clock.cpu_seconds([os.getpid()]) - before >= 0.02
    assert cpu_clock.cpu_seconds([]) == 0


def test_the_page_of_the_model_and_its_charts_are_what_the_shipped_costs_make() -> None:
    made = scaling_page.files(shipped_costs())
    there = {path: (page.DOCS / path).read_text("utf-8") for path in made}
    assert there == made, "run scripts/bench --page"
    assert {f"plots/{path.name}" for path in page.DOCS.glob("plots/scaling-*")} <= set(made)


def test_without_a_recorded_run_a_block_stays_as_it_was_written(tmp_path: Path) -> None:
    written = page.files(tmp_path)["benchmarks.md"]
    assert "No run is recorded yet.\n" in written
    assert "<!-- end -->" not in written


@pytest.mark.parametrize("arguments", [["nonsense"], ["growth", "nonsense"]])
def test_an_unknown_benchmark_is_refused_with_the_list_of_those_there_are(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("no benchmark is called nonsense; there are start, kernels,")


def test_options_without_a_benchmark_are_refused_with_what_there_is(capsys) -> None:
    assert main(["--rows", "1"]) == 2
    assert "Benchmarks: start, kernels," in capsys.readouterr().out


def test_what_a_benchmark_refuses_ends_the_run_with_its_exit_code(capfd) -> None:
    assert main(["client", "growth", "--batch", "0"]) == 2
    told = capfd.readouterr()
    assert "== growth" not in told.out
    assert told.err.endswith("client.py: error: argument --batch: '0' should be a whole number, at least 1\n")


def test_options_of_ones_own_leave_the_page_and_its_results_alone(tmp_path: Path) -> None:
    def of_results() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in [*RESULTS.glob("*"), page.DOCS / "benchmarks.md"]}

    before = of_results()
    command = [sys.executable, "-m", "benchmarks", "client", *TINY["client"].split(), "2", "--channels", "in-process"]
    subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, env=environment(), check=True, capture_output=True)
    assert os.listdir(tmp_path) == ["client.jsonl"]
    assert of_results() == before
