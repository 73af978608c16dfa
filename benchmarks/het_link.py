"""How soon does a model reach an AUC on a slow network, with and without row caches?

`python -m benchmarks.het_link` from the root of a checkout. Every worker and every pserver has a network namespace of
its own, and a token bucket bounds both directions of every leg (`benchmarks/het/network.py`). Where that is not
allowed, or with `--proxy`, all workers share one link of that rate for each direction, the proxy of `benchmarks.link`;
the record says which. Real jobs of Paddle train the same examples in async mode: without caches, with rows that lag by
at most a distance of twice the learning rate, and by 100 updates and a quarter of all. Tables of a smaller dim than
`--cache-min-dim`, as that of the wide part, are not cached. As in HET's hybrid, dense values stay beside the workers:
one more pserver on each of their hosts has them (`FLEET_SPARSE_ROW_SHARDS`), so that the legs of the others are free
for rows; with `--dense pservers`, and behind the proxy, the same pservers have both. The rows are on one pserver, whose
leg all workers share, as HET had one server; `--pservers` says otherwise. Worker 0 evaluates every `--evaluate-every`
steps: the barrier before, which sends what workers hold back, is in the time, and the evaluation is not. The target is
`--target` of the AUC with which the job without caches ends.

A run that is stopped keeps the jobs that ended (`benchmarks.record.Jobs`): the same command goes on with the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.het.job import drawn_examples
from benchmarks.het.network import can_make_hosts, hosts, pservers_on, worker_environment
from benchmarks.het.training import BOUNDS, NO_CACHE, RATES, Bound, seconds_to, together
from benchmarks.link import Shape, pservers_behind_a_link
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, DIM, PSERVERS, amount
from benchmarks.record import Jobs, Record, add_results
from fleet_sparse.local_pservers import Child, run_together

MODELS = ("wide_deep", "deepfm", "dcn")
NAMESPACES, PROXY = "namespaces", "proxy"
WORKERS, PSERVERS_ALONE = "workers", "pservers"
RUN_LIMIT_S = 3600.0

Place = tuple[Sequence[str], Mapping[str, str]]
"""What begins the command of a worker, and its environment."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains with and without caches once a seed and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=AT_LEAST_1, default=100, help="of every leg, Mbit/s")
    parser.add_argument("--dim", type=DIM, default=128)
    parser.add_argument("--model", choices=MODELS, default="wide_deep")
    parser.add_argument("--optimizer", choices=RATES, default="adagrad")
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=["drift", "lag"])
    parser.add_argument("--workers", type=AT_LEAST_2, default=4)
    parser.add_argument("--pservers", type=PSERVERS, default=1, help="for rows; HET had one server, too")
    parser.add_argument("--examples", type=AT_LEAST_2, default=400_000, help="to train on")
    parser.add_argument("--tested", type=AT_LEAST_2, default=5_000, help="examples that are held out")
    parser.add_argument("--ids", type=AT_LEAST_1, default=600_000, help="distinct values of all fields")
    parser.add_argument("--batch", type=AT_LEAST_1, default=128, help="examples of a step of each worker")
    parser.add_argument("--cache-percent", type=amount, default=10, help="rows that a worker caches")
    parser.add_argument("--cache-min-dim", type=DIM, default=2, help="smallest dim of a table that is cached")
    parser.add_argument("--evaluate-every", type=AT_LEAST_1, default=200, help="steps of each worker")
    parser.add_argument("--target", type=amount, default=0.999, help="of the last AUC without caches")
    parser.add_argument("--seeds", type=AT_LEAST_1, default=1)
    parser.add_argument("--proxy", action="store_true", help="use the proxy in any case")
    parser.add_argument(
        "--dense", choices=(WORKERS, PSERVERS_ALONE), help="whose hosts have the dense values; workers without a proxy"
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    link = PROXY if options.proxy or not can_make_hosts() else NAMESPACES
    if link == PROXY and options.dense == WORKERS:
        parser.error("--dense workers needs network namespaces; write --dense pservers")
    options.dense = options.dense or (PSERVERS_ALONE if link == PROXY else WORKERS)
    record, console = Record("het_link", options), Console(width=120)
    jobs = Jobs(record, varying=("bounds", "seeds", "target"))
    rounds = [run(options, jobs, link, seed, console) for seed in range(options.seeds)]
    show(options, link, rounds, console)
    record.append(rounds, link=link, jobs=jobs.sources())
    jobs.forget()


def run(options: argparse.Namespace, jobs: Jobs, link: str, seed: int, console: Console) -> dict[str, dict[str, Any]]:
    """Trains with every bound that no run before has trained with."""
    found: dict[str, dict[str, Any]] = {}
    bounds = [Bound(NO_CACHE), *(BOUNDS[bound] for bound in options.bounds)]
    names = {bound: f"{link}, seed {seed}: {bound.name}" for bound in bounds}
    with drawn_examples(options, seed, are_needed=not jobs.has(names.values())) as examples:
        for bound, name in names.items():
            with console.status(name):
                of = found[bound.name] = jobs.result(name, partial(train, options, link, bound, examples, seed))
            console.print(f"{name}: AUC {of['auc']:.5f}, {of['train_s']:.0f} s", highlight=False)
    return with_times(found, options.target)


def with_times(found: Mapping[str, dict[str, Any]], target: float) -> dict[str, dict[str, Any]]:
    """Adds the seconds to the target, those of all steps where it was not reached, and the AUC of the target."""
    wanted = target * found[NO_CACHE]["auc"]
    times = {bound: seconds_to(of["curve"], wanted) for bound, of in found.items()}
    return {
        bound: {
            **of,
            "target": wanted,
            "has_reached": bool(np.isfinite(times[bound])),
            "s_to_target": min(times[bound], of["train_s"]),
        }
        for bound, of in found.items()
    }


def train(options: argparse.Namespace, link: str, bound: Bound, examples: Path, seed: int) -> dict[str, Any]:
    """Trains in new processes; returns the result with the bytes that the kernel counted on the legs of the workers."""
    rate = RATES[options.optimizer]
    command = [sys.executable, "-m", "benchmarks.het.job", "--examples", str(examples), "--seed", str(seed)]
    command += ["--evaluate-every", str(options.evaluate_every), "--model", options.model, "--dim", str(options.dim)]
    command += ["--batch-size", str(options.batch), "--optimizer", options.optimizer]
    command += ["--learning-rate", str(rate), *bound.options(rate)]
    if bound.name != NO_CACHE:
        command += ["--cache-rows", str(max(int(options.ids * options.cache_percent / 100), 1))]
        command += ["--cache-min-dim", str(options.cache_min_dim)]
    is_hybrid = options.dense == WORKERS
    reach = by_proxy(options) if link == PROXY else by_namespaces(options, is_hybrid=is_hybrid)
    with reach as (places, counted):
        workers = [
            Child(f"{bound.name}: worker {worker}", [*prefix, *command], environment)
            for worker, (prefix, environment) in enumerate(places)
        ]
        trained = together(run_together(workers, limit_s=RUN_LIMIT_S))
        return {**trained._asdict(), "num_bytes_of_kernel": counted()}


@contextmanager
def by_namespaces(options: argparse.Namespace, *, is_hybrid: bool = False) -> Iterator[tuple[list[Place], Any]]:
    """Runs pservers on hosts of their own; yields the places of the workers and what counts their bytes.

    In a hybrid there is one more on the host of each worker, and these have the dense values.
    """
    num_hosts = options.pservers + options.workers
    num_pservers, row_shards = (num_hosts, options.pservers) if is_hybrid else (options.pservers, 0)
    setting = {"FLEET_SPARSE_ROW_SHARDS": str(row_shards)}
    with hosts(num_hosts, f"{options.rate}mbit") as all_hosts:
        own = all_hosts[options.pservers :]
        with pservers_on(all_hosts[:num_pservers], **setting) as endpoints:
            yield (
                [
                    (host.command(), setting | worker_environment(endpoints, worker, options.workers, host.address))
                    for worker, host in enumerate(own)
                ],
                lambda: sum(sum(host.bytes_of_leg()) for host in own),
            )


@contextmanager
def by_proxy(options: argparse.Namespace) -> Iterator[tuple[list[Place], Any]]:
    """Runs pservers behind the proxy of `benchmarks.link`, whose rate is that of all pservers' legs together."""
    with pservers_behind_a_link(options.pservers) as (pservers, link):
        link.shape(Shape(0.02, options.pservers * options.rate / 1e3))
        environments = [pservers.environment(worker, options.workers) for worker in range(options.workers)]
        places: list[Place] = [((), {**each, "FLEET_SPARSE_CHANNEL": "stream"}) for each in environments]
        yield places, lambda: None


def show(
    options: argparse.Namespace, link: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]], console: Console
) -> None:
    """Prints a table of medians over the seeds."""
    where = f"{options.rate} Mbit/s ({link}), {options.workers} workers, {options.pservers} pservers"
    table = Table(title=f"{options.model}, dim {options.dim}, {where}")
    table.add_column("rows", no_wrap=True)
    for heading in ("s to the target", "over no cache", "AUC", "s in all", "GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bound in rounds[0]:
        of = {
            key: float(np.median([each[bound][key] for each in rounds]))
            for key in ("s_to_target", "auc", "train_s", "num_bytes")
        }
        ratios = [each[bound]["s_to_target"] / each[NO_CACHE]["s_to_target"] for each in rounds]
        has_reached = all(each[bound]["has_reached"] for each in rounds)
        cells = f"{of['s_to_target']:.1f}" if has_reached else "not reached", f"{np.median(ratios):.2f}"
        table.add_row(bound, *cells, f"{of['auc']:.5f}", f"{of['train_s']:.1f}", f"{of['num_bytes'] / 1e9:.2f}")
    console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
