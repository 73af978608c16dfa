"""How soon is a pserver process ready, and how much memory does an idle one take?

`python -m benchmarks.start` from the root of a checkout. Time is from the start of the process until it has written its
address; memory is resident memory at that moment. In each round:

- a pserver, its kernels compiled before;
- Python that imports what a pserver needs of others: NumPy, Numba, gRPC and ZeroMQ;
- a pserver with no compiled kernel on the disk, in the first round only;
- with `--baseline` a server of PaddlePaddle 2.6, until it listens, in a venv that the benchmark makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import baselines
from benchmarks.options import AT_LEAST_1, add_baseline
from benchmarks.processes import resident_bytes
from benchmarks.record import Record, add_results
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.warm_up import warm_up

PSERVER, COLD, IMPORTS, PADDLE = (
    "pserver",
    "pserver, kernels to compile",
    "imports alone",
    "PaddlePaddle 2.6.2, a server",
)
IMPORTING = "import numba, numpy, grpc, zmq; print(flush=True); input()"
MIB = 1 << 20


class Started(NamedTuple):
    """Time and memory of a process that is ready and idle."""

    seconds: float
    resident_bytes: int


def pserver(**environment: str) -> Started:
    """Starts a pserver."""
    with tempfile.TemporaryDirectory() as root:
        begun = time.perf_counter()
        with local_pservers(1, root=Path(root), environment=environment, log=subprocess.DEVNULL) as pservers:
            seconds = time.perf_counter() - begun
            return Started(seconds, resident_bytes(pservers.processes[0].process.pid))


def cold() -> Started:
    """Starts a pserver without compiled kernels."""
    with tempfile.TemporaryDirectory() as cache:
        return pserver(NUMBA_CACHE_DIR=cache)


def imports() -> Started:
    """Starts Python with the imports of a pserver."""
    begun = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", IMPORTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("Python does not import what a pserver needs")
        started = Started(time.perf_counter() - begun, resident_bytes(process.pid))
        process.kill()
    return started


def paddle(python: Path) -> Started:
    """Starts a server of PaddlePaddle 2.6."""
    with baselines.paddle_server(python=python) as (pid, seconds):
        return Started(seconds, resident_bytes(pid))


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts processes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=AT_LEAST_1, default=7)
    parser.add_argument(
        "--no-cold", dest="cold", action="store_false", help="do not measure a pserver without compiled kernels"
    )
    add_baseline(parser)
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("start", options)
    warm_up()
    ways: dict[str, Callable[[], Started]] = {PSERVER: pserver, IMPORTS: imports}
    if options.peer:
        ways[PADDLE] = partial(paddle, options.peer_python or baselines.PADDLE.python())
    rounds: list[dict[str, Started]] = []
    for number in range(options.rounds):
        of_round = {**ways, COLD: cold} if options.cold and number == 0 else ways
        rounds.append({name: start() for name, start in of_round.items()})
    show(rounds)
    record.append([{name: each._asdict() for name, each in of_round.items()} for of_round in rounds])


def show(rounds: Sequence[dict[str, Started]]) -> None:
    """Prints a table of medians with quartiles."""
    table = Table(title="one process on this machine")
    for heading in ("", "s until ready", "MiB resident"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in rounds[0]:
        found = [of_round[name] for of_round in rounds if name in of_round]
        seconds = np.percentile([each.seconds for each in found], [25, 50, 75])
        mib = np.percentile([each.resident_bytes / MIB for each in found], [25, 50, 75])
        table.add_row(
            name,
            *(f"{middle:.{d}f} ({low:.{d}f} - {high:.{d}f})" for d, (low, middle, high) in ((2, seconds), (0, mib))),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
