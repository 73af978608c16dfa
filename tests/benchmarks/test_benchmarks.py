"""Every benchmark at a tiny size: it runs, checks its results and records them; times are never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import kernels, local, page, parts
from benchmarks.__main__ import WAYS, main
from benchmarks.interleaved import interleaved
from benchmarks.record import RESULTS, ROOT
from fleet_sparse.warm_up import warm_up
from support.jobs import environment
from support.waits import wait_until

TINY = {  # in the order in which they start: the longest first
    "serving": "--rows 2000 --batches 4 --rounds 2 --calls 2 --seconds 0.5 --delta-rows 100",
    "snapshot": "--rows 5000 --pservers 1 --rounds 1 --pushes 5",
    "compare": "--against HEAD --durability none --pservers 1 --steps 2 --batches 3 --rounds 2 lookup",
    "cluster": "--workers 1 --pservers 1 --modes async --steps 2 --rounds 1",
    "durability": "--workers 1 --pservers 1 --modes async --durabilities none log --steps 2 --rounds 2",
    "scale": "--jobs async,1x1 sync,2x2 --steps 2 --passes 1 --rounds 1 --rows 300",
    "client": "--rows 2000 --batch 500 --cycles 3 --rounds 2 --shards 1",
    "growth": "--rows 300000 --rounds 2",
    "kernels": "--rows 3000 --dims 16 64 --batch 500 --calls 1 --rounds 2 --gigabytes 0.01",
    "het_misses": "--rows 40000 --batch 8 --steps 20 --moved-steps 2500 --percent 5",
    "het_traffic": "--rows 50000 --workers 2 --batch 8 --steps 30 --curve-workers 2 --curve-lags 10 --curve-steps 10 "
    "--measured-workers 2 --measured-dims 4 --measured-rows 50000 --measured-batch 8 --measured-steps 20",
    "het_cost": "--workers 2 --dims 4 --batches 8 --rows 50000 --max-steps 10 --rounds 1",
    "het_auc": "--workers 2 --examples 2000 --tested 500 --ids 50000",
    "het_link": "--workers 2 --pservers 1 --rate 1000 --dim 4 --examples 2000 --ids 50000 --batch 128 "
    "--evaluate-every 3 --proxy",
    "het_save": "--workers 2 --rows 2000 --trace-steps 3 --proxy",
    "entries": "--fresh 1000 --pushes 2 --batch 100 --steps 4 --rounds 2",
    "log": "--pushes 3 --batch 100 --rows 2000 --megabytes 1 --rounds 2",
    "start": "--rounds 1 --no-cold",
    "membership": "--workers 4 --batch 2 --processes 2 --seconds 0.2 --rounds 1",
    "keys": "--pservers 1 --steps 2 --rounds 2 --batches 3 --registrations 2",
    "lookup": "--pservers 1 --cached --steps 2 --rounds 2 --batches 3 --local-rows 1000",
    "step": "--pservers 1 --steps 2 --rounds 2 --batches 3 --local-rows 1000",
    "dataset": "--pservers 1 --steps 3 --rounds 2 --batches 2",
    "link": "--pservers 1 --links 0.5x1 --steps 2 --rounds 2 --batches 3",
    "spread": "--pservers 1 --shapes 8x4x2xadam 16x8x30xadagrad --steps 1 --rounds 2 --batches 2",
    "local": "--rows 2000 --dims 16 --batch 500 --cycles 2 --rounds 2 --no-torch",
    "parts": "--mode async --max-step-lag 2 --pservers 0 --steps 2 --rounds 2 --batches 3",
    "dense": "--workers 2 --kilobytes 1 --rounds 2 --link-workers",
    "convergence": "--modes sync --seeds 1 --data synthetic 1000",
}
SLOW = ("compare", "durability", "het_auc", "het_link", "het_save", "keys", "link", "scale", "spread")
"""Those with the most processes. They run when a test asks for them, with the slow tests."""
pytestmark = pytest.mark.timeout(900)  # a run may wait for all others
OF_RUN = "BENCHMARK_RUN"
"""Environment variable of the processes of a run."""
AT_ONCE = 3  # on two cores: most of them wait for processes


class Tiny(NamedTuple):
    """Runs that were started, what starts another one, and their results directory."""

    runs: dict[str, Future[subprocess.CompletedProcess[str]]]
    start: Callable[[str], Future[subprocess.CompletedProcess[str]]]
    results: Path

    def record(self, name: str) -> dict:
        """Returns the record of a run; waits until it ends."""
        if name == "keys":
            pytest.importorskip("cryptography")
        if name not in self.runs:
            self.runs[name] = self.start(name)
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
        marked = environment(**{OF_RUN: str(results / name)})
        return subprocess.run(command, cwd=ROOT, env=marked, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        start = partial(pool.submit, run)
        yield Tiny({name: start(name) for name in TINY if name not in SLOW}, start, results)
        pool.shutdown(cancel_futures=True)


def numbers(value: object) -> list[float]:
    """Returns all numbers of nested measurements."""
    if isinstance(value, dict | list):
        each = value.values() if isinstance(value, dict) else value
        return [number for part in each for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_every_benchmark_runs_here() -> None:
    with_main = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in path.read_text("utf-8")}
    assert with_main - {"__main__", "cached_step", "compare_job", "served_model"} == set(WAYS) == set(TINY)


@pytest.mark.parametrize(
    "name",  # the longest last
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in [*list(TINY)[2:], *list(TINY)[:2]]],
)
def test_a_run_records_machine_commit_and_rounds(tiny: Tiny, name: str) -> None:
    record = tiny.record(name)
    assert record.keys() >= {"benchmark", "date", "commit", "is_dirty", "machine", "options", "rounds", "seconds"}
    assert record["machine"].keys() >= {"cpu", "cores", "memory_bytes", "load", "omp_num_threads", "packages"}
    assert not any(isinstance(value, str) and "/" in value for value in record["options"].values())
    assert np.isfinite(numbers(record["rounds"])).all()
    assert numbers(record["rounds"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TINY])
def test_a_run_leaves_no_process(tiny: Tiny, name: str) -> None:
    tiny.record(name)
    wait_until(lambda: not processes_of(tiny.results / name))


def processes_of(run: Path) -> list[str]:
    """Returns the processes that a run started, or that those started."""
    mark, found = f"{OF_RUN}={run}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if mark in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_sync_training_equals_plain_paddle(tiny: Tiny) -> None:
    (seed,) = tiny.record("convergence")["rounds"]
    assert abs(seed["sync"]["test_auc"] - seed["plain Paddle, batch 512"]["test_auc"]) < 0.01


@pytest.mark.slow
def test_the_page_shows_every_recorded_run(tiny: Tiny) -> None:
    for name in TINY:
        tiny.record(name)
    made = page.files(tiny.results)
    text = made.pop("benchmarks.md")
    assert page.NOTHING not in text
    assert set(made) == {
        f"plots/{name}.svg"
        for name in (
            *("client", "cluster", "growth-memory", "growth-rate", "lookup", "step"),
            *("het-misses", "het-traffic", "het-auc", "het-link-wide_deep-1000-4-2-1-pservers-2000"),
        )
    }
    assert all(f"({path})" in text for path in made)


def test_the_page_is_made_of_the_recorded_runs() -> None:
    made = page.files(RESULTS)
    assert (page.DOCS / "benchmarks.md").read_text("utf-8") == made["benchmarks.md"], "run scripts/bench --page"
    assert {path for path in made if not (page.DOCS / path).exists()} == set()
    assert page.files(RESULTS) == made


def test_a_page_without_runs_says_so(tmp_path: Path) -> None:
    assert page.NOTHING in page.files(tmp_path)["benchmarks.md"]


def test_wrong_results_end_a_benchmark() -> None:
    with pytest.raises(SystemExit, match="find"):
        kernels.check("find", np.array([1, 2]), np.array([1, 3]))
    rows = np.ones((2, 4), np.float32)
    with pytest.raises(SystemExit, match="adagrad"):
        local.check("adagrad", {local.NUMPY: rows, local.OURS: rows + np.float32(0.5)})


def test_the_parts_of_a_step_add_up_to_it() -> None:
    spans = ((parts.DISTINCT, 12, 13), (parts.PULL, 13, 15), (parts.PREFETCH, 11, 16), (parts.PUSH, 20, 23))
    spans += ((parts.UPDATE, 19, 24), (parts.RUN, 10, 26))
    (of_step,) = parts.parts_of([parts.Timer(*span) for span in spans], [16.5])
    assert sum(of_step.values()) == 16.5
    assert (of_step[parts.PULL], of_step[parts.REST_OF_PREFETCH], of_step[parts.LOADER]) == (2, 2, 0.5)


def test_another_one_runs_first_in_each_round() -> None:
    ran: list[str] = []
    for number in range(3):
        assert list(interleaved({name: lambda name=name: ran.append(name) for name in "abc"}, number)) == list("abc")
    assert "".join(ran) == "abcbcacab"


@pytest.mark.parametrize("arguments", ["nonsense", "growth nonsense", "--rows 1", "client growth --batch 0"])
def test_unknown_benchmarks_and_options_are_refused(arguments: str) -> None:
    assert main(arguments.split()) == 2


@pytest.mark.parametrize(
    "command",
    [
        "client --rows 10 --batch 11",
        "kernels --gigabytes 0",
        "step --rounds 1",
        "growth --rows few",
        "compare --against x",
        "link --links 1",
        "spread --shapes 512x16x1xsgd",
    ],
)
def test_values_that_make_no_sense_are_refused(command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command.split()], cwd=ROOT, env=environment(), check=False
    )
    assert run.returncode == 2
