"""How long does a save keep workers from training that hold updates of cached rows?

`python -m benchmarks.het_save` from the root of a checkout. One pserver and all workers have a network namespace each,
with a token bucket for both directions of every leg; where that is not allowed, or with `--proxy`, all workers share
one link of that rate for each direction, the proxy of `benchmarks.link`. Every worker trains all rows, `--passes`
times and once more, and then all save at the same moment, `wait=False`: the save has what every worker held. The time
is that of the slowest call, which sends the held updates and returns when the pservers have made the cut.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.het.network import can_make_hosts
from benchmarks.het.training import read_output
from benchmarks.het_link import NAMESPACES, PROXY, by_namespaces, by_proxy
from benchmarks.options import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2, DIM
from benchmarks.record import Record, add_results
from fleet_sparse.local_pservers import Child, run_together

BOUNDS = {"lag 100, share 1/4": ("--lag", "100"), "drift 2 x rate": ()}
RUN_LIMIT_S = 900.0

Round = dict[str, dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Saves with each bound once a round and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=AT_LEAST_1, default=1000, help="of every leg, Mbit/s")
    parser.add_argument("--dim", type=DIM, default=16)
    parser.add_argument("--workers", type=AT_LEAST_2, default=8)
    parser.add_argument("--rows", type=AT_LEAST_1, default=500_000, help="that each worker caches")
    parser.add_argument("--trace-steps", type=AT_LEAST_0, default=1500, help="batches of each worker; 0: all rows")
    parser.add_argument("--passes", type=AT_LEAST_1, default=12, help="trainings of all rows before the last one")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=1)
    parser.add_argument("--proxy", action="store_true", help="use the proxy in any case")
    add_results(parser)
    options = parser.parse_args(arguments)
    options.pservers = 1
    record, console = Record("het_save", options), Console(width=120)
    link = PROXY if options.proxy or not can_make_hosts() else NAMESPACES
    rounds: list[Round] = []
    for number in range(options.rounds):
        found: Round = {}
        for bound in BOUNDS:
            with console.status(f"round {number}: {bound}"):
                found[bound] = save(options, link, bound)
        rounds.append(found)
    table = Table(
        title=f"{options.workers} workers, {options.rows:,} rows of dim {options.dim}, {options.rate} Mbit/s ({link})"
    )
    table.add_column("rows", no_wrap=True)
    for heading in ("s that training waits", "rows with held updates, all workers"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bound in BOUNDS:
        waited_s, held = (float(np.median([each[bound][key] for each in rounds])) for key in ("waited_s", "held"))
        table.add_row(bound, f"{waited_s:.2f}", f"{held:,.0f}")
    console.print(table)
    record.append(rounds, link=link)


def save(options: argparse.Namespace, link: str, bound: str) -> dict[str, float]:
    """Trains and saves in new processes; returns the longest wait, and the rows of which updates were held."""
    reach = by_proxy(options) if link == PROXY else by_namespaces(options)
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as directory, reach as (places, _):
        command = [
            sys.executable,
            "-m",
            "benchmarks.het.saving",
            "--rows",
            str(options.rows),
            "--dim",
            str(options.dim),
        ]
        command += ["--trace-steps", str(options.trace_steps), "--passes", str(options.passes)]
        command += ["--directory", str(Path(directory)), *BOUNDS[bound]]
        workers = [
            Child(f"{bound}: worker {worker}", [*prefix, *command], environment)
            for worker, (prefix, environment) in enumerate(places)
        ]
        outputs = [read_output(output) for output in run_together(workers, limit_s=RUN_LIMIT_S)]
    return {"waited_s": max(each["waited_s"] for each in outputs), "held": sum(each["held"] for each in outputs)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
