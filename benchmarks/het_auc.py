"""What do row caches cost in AUC, and how many rows do they save? Real jobs of Paddle, on pservers of this machine.

`python -m benchmarks.het_auc` from the root of a checkout. Every run of a seed trains the same examples in async mode:
those of `models/synthetic.py`, with Criteo's field sizes scaled to `--ids`. Rows lag by at most a distance of twice the
learning rate, or by 100 updates and a quarter of all, or, as in HET, by 100 updates; or they are not cached. `--drifts`
and `--lags` add other bounds, for the plot of the AUC over the bound. All rows fit into the caches. A row is saved if
it did not travel: as a row, a gradient or a change of one. A second job without a cache shows how much two jobs of the
same seed differ.

A run that is stopped keeps the jobs that ended (`benchmarks.record.Jobs`): the same command goes on with the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.het.job import drawn_examples
from benchmarks.het.training import (
    BOUNDS,
    NO_CACHE,
    RATES,
    Bound,
    rows_saved,
    together,
    within_drift,
    within_lag,
)
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS, amount
from benchmarks.record import Jobs, Record, add_results
from fleet_sparse.local_pservers import Child, local_pservers, run_together

MODELS = ("wide_deep", "deepfm", "dcn")
RUN_LIMIT_S = 3600.0

Round = dict[str, dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains with every bound once a seed and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="wide_deep")
    parser.add_argument("--optimizer", choices=RATES, default="adagrad")
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=["again", "drift", "lag", "paper"])
    parser.add_argument("--drifts", nargs="+", type=amount, metavar="RATES", help="drifts, in learning rates")
    parser.add_argument("--lags", nargs="+", type=AT_LEAST_1, metavar="UPDATES", help="lags, with a share of 1/4")
    parser.add_argument("--workers", type=AT_LEAST_2, default=4)
    parser.add_argument("--pservers", type=PSERVERS, default=1)
    parser.add_argument("--examples", type=AT_LEAST_2, default=3_000_000, help="to train on")
    parser.add_argument("--tested", type=AT_LEAST_2, default=100_000, help="examples that are held out")
    parser.add_argument("--ids", type=AT_LEAST_1, default=600_000, help="distinct values of all fields")
    parser.add_argument("--batch", type=AT_LEAST_1, default=128, help="examples of a step of each worker")
    parser.add_argument("--dim", type=AT_LEAST_1, default=8)
    parser.add_argument("--seeds", type=AT_LEAST_1, default=1)
    add_results(parser)
    options = parser.parse_args(arguments)
    record, console = Record("het_auc", options), Console(width=120)
    jobs = Jobs(record, varying=("bounds", "drifts", "lags", "seeds"))
    rounds = [run(options, jobs, seed, console) for seed in range(options.seeds)]
    show(options, rounds, console)
    record.append(rounds, jobs=jobs.sources())
    jobs.forget()


def run(options: argparse.Namespace, jobs: Jobs, seed: int, console: Console) -> Round:
    """Trains the model with every bound that no run before has trained with."""
    found: Round = {}
    bounds = [Bound(NO_CACHE), *(BOUNDS[bound] for bound in options.bounds)]
    bounds += [*map(within_drift, options.drifts or ()), *map(within_lag, options.lags or ())]
    names = {bound: f"seed {seed}: {bound.name}" for bound in bounds}
    with drawn_examples(options, seed, are_needed=not jobs.has(names.values())) as examples:
        for bound, name in names.items():
            with console.status(name):
                trained = jobs.result(name, partial(train, options, bound, examples, seed))
            of = found[bound.name] = {key: value for key, value in trained.items() if key != "curve"}
            of["rows_saved"] = rows_saved(of, found[NO_CACHE])
            of["loss_of_auc"] = found[NO_CACHE]["auc"] - of["auc"]
            console.print(f"{name}: AUC {of['auc']:.5f}, {of['train_s']:.0f} s", highlight=False)
    return found


def train(options: argparse.Namespace, bound: Bound, examples: Path, seed: int) -> dict[str, Any]:
    """Trains in new processes, which end with this call."""
    rate = RATES[options.optimizer]
    command = [sys.executable, "-m", "benchmarks.het.job", "--examples", str(examples), "--seed", str(seed)]
    command += ["--model", options.model, "--optimizer", options.optimizer, "--learning-rate", str(rate)]
    command += ["--batch-size", str(options.batch), "--dim", str(options.dim), *bound.options(rate)]
    with (
        tempfile.TemporaryDirectory() as root,
        local_pservers(options.pservers, root=Path(root), log=subprocess.DEVNULL) as pservers,
    ):
        workers = [
            Child(f"{bound.name}: worker {worker}", command, pservers.environment(worker, options.workers))
            for worker in range(options.workers)
        ]
        return together(run_together(workers, limit_s=RUN_LIMIT_S))._asdict()


def show(options: argparse.Namespace, rounds: Sequence[Mapping[str, Mapping[str, float]]], console: Console) -> None:
    """Prints a table of medians over the seeds, with the AUC less that without a cache."""
    about = f"{options.workers} workers, {options.examples:,} examples, batch {options.batch}, dim {options.dim}"
    table = Table(title=f"{options.model}, {options.optimizer}, {about}")
    table.add_column("rows", no_wrap=True)
    for heading in ("AUC", "less no cache's", "rows saved, %", "hits, %", "examples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in rounds[0]:
        of = {key: float(np.median([each[name][key] for each in rounds])) for key in rounds[0][name]}
        cells = f"{of['auc']:.5f}", f"{-of['loss_of_auc']:+.5f}", f"{100 * of['rows_saved']:.1f}"
        table.add_row(name, *cells, f"{100 * of['hit_rate']:.1f}", f"{of['examples_per_s']:,.0f}")
    console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
