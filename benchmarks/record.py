"""Records of benchmark runs: one JSON object a line, appended to `<benchmark>.jsonl` and never changed afterwards."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Records that docs/benchmarks.md is made of."""
OWN_RESULTS = ROOT / "output" / "benchmarks"
"""Records of runs with other options; Git ignores them."""
PACKAGES = ("numpy", "numba", "llvmlite", "pyzmq", "grpcio", "protobuf", "paddlepaddle")
# Files that a run or the page writes: a change of them does not change the code that is measured.
_NOT_MEASURED = (":!benchmarks/results", ":!docs", ":!fleet_sparse/tools/capacity/coefficients.json")
_DIGITS = 5

_UNFINISHED = "unfinished"  # directory of the jobs of runs that did not end, under the one of the results

Run = dict[str, Any]
"""A recorded run."""


class Record:
    """A run of a benchmark. Its commit, date and machine are those of the moment when it is created.

    Args:
        name: Name of the benchmark.
        options: All of its options, with the `results` that `add_results` adds.

    Attributes:
        file: The file that `append` appends to.
        header: What identifies the run: benchmark, date, commit, machine and options.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._started_at = time.perf_counter()
        self.file: Path = options.results / f"{name}.jsonl"
        self.header: Run = {
            "benchmark": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **commit(),
            "machine": machine(),
            "options": {key: value for key, value in vars(options).items() if is_recorded(value)},
        }

    def append(self, rounds: Sequence[Any], **more: Any) -> None:
        """Appends the run to its file.

        Args:
            rounds: Measurements of every round.
            more: Measurements that belong to no round.
        """
        seconds = time.perf_counter() - self._started_at
        run = plain({**self.header, "seconds": seconds, **more, "rounds": rounds})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(_line(run))


class Jobs:
    """Jobs of a run that takes hours. Each is kept when it ends, so that a run that was stopped is continued.

    A job is measured once by all runs with the same options, on the same kind of machine, since the measured code last
    changed, until one of these runs has all of its jobs and is recorded: with the seconds of its last part, and with
    the commit and date of each job. With changes that are not committed nothing is kept.

    Args:
        record: The run.
        varying: Options that no job depends on: those that only say which jobs there are.
    """

    def __init__(self, record: Record, varying: Sequence[str]) -> None:
        header = record.header
        self._header = {key: header[key] for key in ("benchmark", "date", "commit")}
        self._key = plain(
            {
                "code": measured_code() if header["is_dirty"] is False else None,
                "machine": {key: header["machine"][key] for key in ("cpu", "cores", "omp_num_threads")},
                "options": {key: value for key, value in header["options"].items() if key not in varying},
            }
        )
        self._file = record.file.parent / _UNFINISHED / record.file.name
        lines = self._file.read_text("utf-8").splitlines() if self._file.exists() else []
        self._others: list[str] = []
        """Lines of other code or options."""
        self._done: dict[str, Run] = {}
        for line in lines:
            job = json.loads(line)
            if self._key["code"] and all(job[key] == value for key, value in self._key.items()):
                self._done[job["job"]] = job
            else:
                self._others.append(line)

    def has(self, names: Iterable[str]) -> bool:
        """Returns whether all jobs of these names are done."""
        return all(name in self._done for name in names)

    def result(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what a job measured, as JSON has it; runs it if it is not done."""
        if name not in self._done:
            result = json.loads(json.dumps(measure()))  # all digits, so that differences of jobs are exact
            job = self._done[name] = {**self._header, **self._key, "job": name, "result": result}
            if self._key["code"]:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.write(_line(job))
        return dict(self._done[name]["result"])

    def sources(self) -> dict[str, str]:
        """Returns, by job, the commit and date of the run that measured it."""
        return {name: f"{job['commit']}, {job['date']}" for name, job in self._done.items()}

    def forget(self) -> None:
        """Forgets the jobs, which are recorded: the next run measures all of them anew."""
        self._done.clear()
        if self._others:
            self._file.write_text("".join(f"{line}\n" for line in self._others))
        else:
            self._file.unlink(missing_ok=True)


def is_recorded(option: Any) -> bool:
    """Returns whether an option is recorded: paths belong to the machine and are not."""
    return option is not None and not isinstance(option, Path)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds the option that all benchmarks have."""
    parser.add_argument("--results", type=Path, default=OWN_RESULTS, help="directory of the results file")


def recorded(results: Path, name: str) -> list[Run]:
    """Returns all runs of a benchmark in the order of their lines.

    A run is one moment at one commit. Lines that repeat a run, with other conclusions from the same measurements, do
    not count: the first line does.
    """
    file = results / f"{name}.jsonl"
    runs: dict[tuple[str, str | None, float | None], Run] = {}
    for line in file.read_text("utf-8").splitlines() if file.exists() else []:
        run = json.loads(line)
        runs.setdefault((run["date"], run["commit"], run.get("seconds")), run)
    return list(runs.values())


def options_of(run: Run) -> dict[str, Any]:
    """Returns the options that are set, by name: a switch that is off and one that did not exist yet are equal."""
    return {key: value for key, value in sorted(run["options"].items()) if value not in (None, False)}


def pooled(runs: Sequence[Run], **options: Any) -> Run | None:
    """Returns all runs of the newest commit with these options as one run, with the rounds of all of them.

    This is the rule for repeats: no run of that commit is left out.

    Args:
        runs: Runs in the order of their dates.
        options: Options that must be set so; None for one that must not be set.

    Returns:
        The newest run with `rounds` of all, and `runs`, the runs themselves; None if there is none.
    """
    fitting = [run for run in runs if fits(run, options)]
    same = [run for run in fitting if run["commit"] == fitting[-1]["commit"]]
    return {**same[-1], "rounds": [each for run in same for each in run["rounds"]], "runs": same} if same else None


def ways(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Returns, for each combination of these options that was measured, all runs of its newest commit as one."""
    found: list[dict[str, Any]] = []
    for run in runs:
        way = {name: options_of(run).get(name) for name in names}
        found += [way] if way not in found else []
    return [run for way in sorted(found, key=str) for run in [pooled(runs, **way)] if run]


def pooled_by(runs: Sequence[Run], names: Sequence[str], **options: Any) -> Run | None:
    """Returns what `pooled` returns, but with the runs of the newest commit of each combination of `names`."""
    fitting = [run for run in runs if fits(run, options)]
    each = ways(fitting, names)
    same = sorted((run for way in each for run in way["runs"]), key=runs.index)
    return {**same[-1], "rounds": [of for run in same for of in run["rounds"]], "runs": same} if same else None


def fits(run: Run, options: Mapping[str, Any]) -> bool:
    """Returns whether these options were set so; None is for one that must not be set."""
    return all(options_of(run).get(key) == value for key, value in options.items())


def plain(value: Any) -> Any:
    """Returns the value as JSON has it: numbers of five digits, no arrays, no paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    return str(value) if isinstance(value, Path) else value


def machine() -> dict[str, Any]:
    """Returns what identifies the machine and its software."""
    return {
        "cpu": next(_cpuinfo("model name"), platform.machine()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "packages": dict(_installed()),
    }


def commit() -> dict[str, Any]:
    """Returns the commit of this checkout, and whether the measured code differs from it; None outside Git."""
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_MEASURED)
        return {"commit": git("rev-parse", "--short=7", "HEAD"), "is_dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "is_dirty": None}


def measured_code() -> str:
    """Returns the last commit that changed the measured code, in a checkout without changes of it."""
    return git("log", "-1", "--format=%h", "--abbrev=7", "--", ".", *_NOT_MEASURED)


def git(*arguments: str) -> str:
    """Returns the output of a Git command in this checkout."""
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def _line(run: Run) -> str:
    return json.dumps(run, separators=(",", ":")) + "\n"


def _cpuinfo(key: str) -> Iterator[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            yield value.strip()


def _installed() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
