"""How well does each mode of training converge, 2 pservers and 2 workers against one process of plain Paddle?

`python -m benchmarks.convergence` from the root of a checkout. `models/train.py` trains the same examples from the same
first values in every run. A batch of plain Paddle is cut into one for each worker, so that a step of sync training is
one of plain Paddle. In async and geo every worker's half is an update of its own: plain Paddle with such batches, and
so with as many updates, is a run as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.options import AT_LEAST_1
from benchmarks.record import Record, add_results
from fleet_sparse.local_pservers import Child, local_pservers, run_together
from fleet_sparse.models.options import parse

NUM_PSERVERS, NUM_WORKERS = 2, 2
BATCH = 512
SHARE = BATCH // NUM_WORKERS
PLAIN = f"plain Paddle, batch {BATCH}"
ALONE = {
    PLAIN: ["--batch-size", str(BATCH)],
    f"plain Paddle, batch {SHARE}": ["--batch-size", str(SHARE)],
}
MODES = {
    "sync": ["--mode", "sync"],
    "async": ["--mode", "async"],
    "async, max_step_lag 4": ["--mode", "async", "--max-step-lag", "4"],
    "geo, k_steps 10": ["--mode", "geo", "--k-steps", "10"],
    "geo, k_steps 100": ["--mode", "geo", "--k-steps", "100"],
}
RUN_LIMIT_S = 600.0


class Run(NamedTuple):
    """Result of one training."""

    test_auc: float
    examples_per_s: float
    """Examples a second of all workers, over the time of the slowest."""


def main() -> None:
    """Trains in every mode once a seed and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Other options are handed to models/train.py, as --learning-rate."
    )
    parser.add_argument("--data", nargs="+", default=["flights"], help="data as models/train.py has it")
    parser.add_argument("--seeds", type=AT_LEAST_1, default=3, help="runs of each mode, with seeds from 0")
    others_than_plain = [name for name in (*ALONE, *MODES) if name != PLAIN]
    parser.add_argument("--modes", nargs="+", choices=others_than_plain, default=others_than_plain, metavar="MODE")
    add_results(parser)
    options, others = parser.parse_known_args()
    parse(["--data", *options.data, *others])  # or the first run would refuse them
    record = Record("convergence", options)
    console = Console()
    runs: dict[str, list[Run]] = {name: [] for name in (PLAIN, *options.modes)}
    for seed in range(options.seeds):
        for name, of_name in runs.items():
            with console.status(f"seed {seed}: {name}"):
                of_name.append(train(name, ["--data", *options.data, "--seed", str(seed), *others]))
            console.print(f"seed {seed}: {name}: test AUC {of_name[-1].test_auc:.6f}", highlight=False)
    show(console, " ".join(options.data), runs)
    by_seed = [{name: of_name[seed]._asdict() for name, of_name in runs.items()} for seed in range(options.seeds)]
    record.append(by_seed, others=others)


def train(name: str, options: Sequence[str]) -> Run:
    """Trains in new processes, which end with this call."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fleet_sparse.models.train", *options, "--metrics", f"{folder}/run.json"]
        if name in ALONE:
            command += ["--plain", *ALONE[name]]
            run_together([Child(name, command, {})], limit_s=RUN_LIMIT_S)
        else:
            command += ["--batch-size", str(SHARE), *MODES[name]]
            with local_pservers(NUM_PSERVERS, root=Path(folder), log=subprocess.DEVNULL) as pservers:
                workers = [
                    Child(f"{name}: worker {worker}", command, pservers.environment(worker, NUM_WORKERS))
                    for worker in range(NUM_WORKERS)
                ]
                run_together(workers, limit_s=RUN_LIMIT_S)
        return read_run([json.loads(path.read_text()) for path in Path(folder).glob("run*.json")])


def read_run(workers: Sequence[dict[str, float | None]]) -> Run:
    """Returns the metrics of all workers as one."""
    (test_auc,) = (auc for worker in workers if (auc := worker["test_auc"]) is not None)
    num_examples = sum(worker["num_examples"] or 0 for worker in workers)
    return Run(test_auc, num_examples / max(worker["train_s"] or 0 for worker in workers))


def show(console: Console, data: str, runs: dict[str, list[Run]]) -> None:
    """Prints a table of means over the seeds, and the difference of each seed to plain Paddle."""
    table = Table(
        title=f"DeepFM on {data}: {NUM_PSERVERS} pservers, {NUM_WORKERS} workers, OMP {os.environ['OMP_NUM_THREADS']}"
    )
    table.add_column("mode", no_wrap=True)
    for heading in ("test AUC", "difference", "of each seed", "examples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = np.array([run.test_auc for run in runs[PLAIN]])
    for name, of_name in runs.items():
        aucs = np.array([run.test_auc for run in of_name])
        table.add_row(
            name,
            f"{aucs.mean():.4f}",
            f"{(aucs - plain).mean():+.5f}",
            "\n".join(f"{difference:+.5f}" for difference in aucs - plain),
            f"{np.median([run.examples_per_s for run in of_name]):,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
