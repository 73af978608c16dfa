"""What a run of a benchmark measured, and on what: one JSON object, appended to `<benchmark>.jsonl`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Of the runs that docs/benchmarks.md shows."""
OWN_RESULTS = ROOT / "output" / "benchmarks"
"""Of runs with options of one's own; Git ignores them."""
PACKAGES = ("numpy", "numba", "llvmlite", "pyzmq", "grpcio", "protobuf", "paddlepaddle")
# What a run or the page writes does not make what is measured another.
_NOT_MEASURED = (":!benchmarks/results", ":!docs", ":!fleet_sparse/tools/capacity/coefficients.json")
_DIGITS = 5


class Record:
    """A run of a benchmark, from its beginning on: the commit is that of the moment when it begins.

    Args:
        name: Of the benchmark.
        options: All of its options; `add_results` added `results`.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._begun_at = time.perf_counter()
        self._file: Path = options.results / f"{name}.jsonl"
        self._begun: dict[str, Any] = {
            "benchmark": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **commit(),
            "machine": machine(),
            "options": {key: value for key, value in vars(options).items() if is_told(value)},
        }

    def append(self, rounds: Sequence[Any], **more: Any) -> None:
        """Adds the run to its file.

        Args:
            rounds: What each round measured.
            more: What is no part of a round.
        """
        seconds = time.perf_counter() - self._begun_at
        told = plain({**self._begun, "seconds": seconds, **more, "rounds": rounds})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps(told, separators=(",", ":")) + "\n")


def is_told(option: Any) -> bool:
    """Whether an option is recorded: paths are the machine's own."""
    return option is not None and not isinstance(option, Path)


def add_results(parser: argparse.ArgumentParser) -> None:
    """The option that all benchmarks have."""
    parser.add_argument("--results", type=Path, default=OWN_RESULTS, help="directory for what is measured")


def recorded(results: Path, name: str) -> list[dict[str, Any]]:
    """All runs of a benchmark, the newest last."""
    file = results / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def plain(value: Any) -> Any:
    """As JSON has it: numbers of five digits, no arrays, no paths."""
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
    """What the figures were measured on."""
    return {
        "cpu": next(_said_of_cpu("model name"), platform.machine()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "packages": dict(_installed()),
    }


def commit() -> dict[str, Any]:
    """The commit of this checkout, and whether what is measured has changed since; None where there is no Git."""
    try:
        changed = _output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *_NOT_MEASURED)
        return {"commit": _output_of("git", "rev-parse", "--short=7", "HEAD"), "is_dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "is_dirty": None}


def _said_of_cpu(key: str) -> Iterator[str]:
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


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
