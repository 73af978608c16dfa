"""How long do saving and loading a table take, beside what the disk can do, and how much does a save delay pushes?

`python -m benchmarks.snapshot` from the root of a checkout; 10 M rows of dim 16 with Adagrad on 2 pserver processes
take some minutes and 6 GB of disk in the directory that TMPDIR names. In each round, one after the other:

- as many processes as pservers write and fsync as many bytes as the snapshot has: what the disk can do;
- a full save, until it is committed, while nobody pushes; then, after pushes to 1 % and to 10 % of the rows, a delta of
  each, and pservers that start with all three;
- as many processes read the files; then pservers start with the snapshot, as many as saved and one more, and empty
  ones. What is read was thrown out of the page cache before;
- pushes of 13 000 distinct ids of those that there are, until each is applied: without a save, then during one;
- a pserver of a loaded job is killed and started again with the snapshot, until it answers a new worker's pull.

`--baseline` also measures PaddlePaddle 2.6's own parameter server, once, in a venv that it makes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from benchmarks.baselines import measure_paddle
from benchmarks.client import fill, push
from benchmarks.options import AT_LEAST_1, DIM, PSERVERS, TRAINED, add_baseline
from benchmarks.record import Record, add_results
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.counts import count_from
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.save import DELTA, FULL, Save
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.rows.deduplicator import Deduplicator, UniqueIds
from fleet_sparse.worker.rows.row_batch import RowBatch

BATCH = 13_000
NUM_LOOKED_UP = 10_000
CHUNK_BYTES = 1 << 20
WAIT_S = 600.0
MODEL = "model"

SHARES = (0.01, 0.1)
"""Shares of the rows that change before each delta."""
MIN_ROWS = 100  # each share is at least one row

# Names of the measurements of a round, in seconds unless they name a unit.
RAW_WRITE, SAVE, CUT = "raw write and fsync", "save", "save, until pushes may go on"
RAW_READ, LOAD, LOAD_WIDER, START = "raw read", "start and load", "start and load, one more", "start, empty"
LOAD_ALONE = "the load of that, by difference"
RESTART = "restart until it answers"
DELTA_SAVE, DELTA_BYTES, LOAD_DELTAS = (
    "save a delta of {:g} %",
    "bytes of a delta of {:g} %",
    "start and load, two deltas",
)
IDLE, SAVING, SAVE_PUSHED = "push", "push during a save", "save during pushes"
MEDIAN, P99, COUNT = ", median ms", ", p99 ms", ", count"

WRITER = """
import os, sys
path, num_bytes = sys.argv[1], int(sys.argv[2])
chunk = os.urandom({chunk})
print("ready", flush=True)
sys.stdin.readline()
with open(path, "wb", buffering=0) as file:
    while num_bytes:
        num_bytes -= file.write(chunk[:num_bytes])
    os.fsync(file.fileno())
"""
READER = """
import sys
chunk = bytearray({chunk})
print("ready", flush=True)
sys.stdin.readline()
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.readinto(chunk):
        pass
"""


class Job(NamedTuple):
    """A worker and its connections."""

    control: ControlClient
    client: Client
    spec: TableSpec
    deduplicator: Deduplicator


class Round(NamedTuple):
    """Measurements of one round."""

    figures: dict[str, float]
    num_bytes: int
    """Bytes of the full snapshot."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures saves and loads and prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count_from(MIN_ROWS), default=10_000_000)
    parser.add_argument("--dim", type=DIM, default=16)
    parser.add_argument("--rule", choices=TRAINED, default="adagrad")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=3)
    parser.add_argument(
        "--pushes", type=AT_LEAST_1, default=300, help="pushes of a round that are timed without a save"
    )
    add_baseline(parser)
    parser.add_argument(
        "--baseline-shards",
        dest="peer_shards",
        type=AT_LEAST_1,
        default=8,
        help="files of its table; 1000 is its default",
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    record = Record("snapshot", options)
    spec = TableSpec(name="table", dim=options.dim, rule=options.rule, initializer=uniform(-0.01, 0.01))
    console = Console()
    with tempfile.TemporaryDirectory(prefix="snapshot-benchmark-") as root, ExitStack() as stack:
        where = Path(root)
        with console.status("rows are inserted"):
            pservers = stack.enter_context(started(options.pservers, where))
            job = stack.enter_context(worker_of(pservers, spec))
            fill(job.client, spec, job.deduplicator, options.rows)
            expected = looked_up(job, options.rows)
            save(job)  # the first one makes the directory, and its size is the number of bytes
        rounds = []
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task("rounds", total=options.rounds)
            for _ in range(options.rounds):
                rounds.append(one_round(job, where, options.rows, options.pushes, expected))
                bar.advance(task)
    baseline = None
    if options.peer:
        with console.status("PaddlePaddle 2.6"):
            size = {
                "rows": options.rows,
                "dim": options.dim,
                "servers": options.pservers,
                "shards": options.peer_shards,
            }
            baseline = measure_paddle(**size, python=options.peer_python)
    show(console, options, rounds, baseline)
    record.append([each.figures for each in rounds], num_bytes=rounds[-1].num_bytes, peer=baseline)


def one_round(job: Job, root: Path, num_rows: int, num_pushes: int, expected: NDArray[np.float32]) -> Round:
    """Makes each measurement once, in an order that leaves the disk idle before each."""
    seconds: dict[str, float] = {}
    sizes = [path.stat().st_size for path in files_of(newest(root))]
    seconds[RAW_WRITE] = raw(WRITER, [(root / f"raw-{k}", str(size)) for k, size in enumerate(sizes)])
    for k in range(len(sizes)):
        (root / f"raw-{k}").unlink()
    seconds[CUT], seconds[SAVE] = save(job)
    files = files_of(newest(root))
    evict(files)
    seconds[RAW_READ] = raw(READER, [(path,) for path in files])
    for name, num_pservers, dirname in (
        (LOAD, len(sizes), MODEL),
        (LOAD_WIDER, len(sizes) + 1, MODEL),
        (START, len(sizes), None),
    ):
        evict(files)
        begun = time.perf_counter()
        with started(num_pservers, root, dirname) as pservers:
            seconds[name] = time.perf_counter() - begun
            if name == LOAD:
                evict(files)
                seconds[RESTART] = restart(pservers, job.spec, num_rows, expected)
    seconds[LOAD_ALONE] = seconds[LOAD] - seconds[START]
    seconds |= deltas(job, root, num_rows)
    times = pushed(job, num_rows, lambda count: count < num_pushes)
    seconds |= described(IDLE, times)
    times, seconds[SAVE_PUSHED] = pushed_while_saving(job, num_rows)
    seconds |= described(SAVING, times)
    # Pushes changed rows, so the rows that the next round compares are looked up again.
    expected[:] = looked_up(job, num_rows)
    save(job)
    return Round(seconds, sum(sizes))


@contextmanager
def started(num_pservers: int, root: Path, dirname: str | None = None) -> Iterator[LocalPservers]:
    """Starts pserver processes and waits until they are ready."""
    quiet = {"FLEET_SPARSE_LOG_LEVEL": "ERROR"}
    with local_pservers(num_pservers, root=root, load_dirname=dirname, environment=quiet) as pservers:
        yield pservers


@contextmanager
def worker_of(pservers: LocalPservers, spec: TableSpec) -> Iterator[Job]:
    """Opens the only worker of a job."""
    settings = Settings(barrier_s=WAIT_S)
    placement = Placement.even(len(pservers.endpoints))
    with ControlClient(pservers.endpoints, settings) as control:
        registrations = control.register([spec], 0, 1)
        channel = open_channel(registrations, settings)
        with Client(channel, control.identity, registrations, placement, settings) as client:
            yield Job(control, client, spec, Deduplicator(placement))


def save(job: Job, kind: str = FULL) -> tuple[float, float]:
    """Returns the seconds until pushes may continue, and until the snapshot is committed; keeps one full one."""
    job.client.flush()
    begun = time.perf_counter()
    saving = Save(job.control, MODEL, kind, keep_last=1)
    saving.begin(Progress(0, None))
    cut = time.perf_counter()
    saving.finish()
    return cut - begun, time.perf_counter() - begun


def deltas(job: Job, root: Path, num_rows: int) -> dict[str, float]:
    """Measures saves of the rows that changed since the save before, and a load of the full snapshot with them."""
    found: dict[str, float] = {}
    rng = np.random.default_rng(2)
    for share in SHARES:
        changed = rng.choice(num_rows, int(num_rows * share), replace=False)
        for ids in np.array_split(changed, -(-len(changed) // BATCH)):
            unique = unique_ids(job, ids)
            push(job.client, job.spec, unique, np.full((len(unique.ids), job.spec.dim), 0.01, np.float32), 1)
        _, found[DELTA_SAVE.format(100 * share)] = save(job, DELTA)
        files = files_of(newest(root, DELTA))
        found[DELTA_BYTES.format(100 * share)] = sum(path.stat().st_size for path in files)
    for kind in (FULL, DELTA):
        for snapshot in (root / MODEL).glob(f"*-{kind}"):
            evict(files_of(snapshot))
    begun = time.perf_counter()
    with started(len(files_of(newest(root))), root, MODEL) as pservers:
        found[LOAD_DELTAS] = time.perf_counter() - begun
        check(pservers, job.spec, num_rows, looked_up(job, num_rows))
    return found


def pushed(job: Job, num_rows: int, goes_on: Callable[[int], bool]) -> NDArray[np.float64]:
    """Returns the seconds of each push of random ids, until it is applied."""
    rng = np.random.default_rng(1)
    batches = [unique_ids(job, rng.choice(num_rows, min(BATCH, num_rows), replace=False)) for _ in range(20)]
    grads = np.full((len(batches[0].ids), job.spec.dim), 0.01, np.float32)
    times: list[float] = []
    while goes_on(len(times)):
        unique = batches[len(times) % len(batches)]
        begun = time.perf_counter()
        push(job.client, job.spec, unique, grads, len(times) + 2)
        job.client.flush()
        times.append(time.perf_counter() - begun)
    return np.array(times)


def pushed_while_saving(job: Job, num_rows: int) -> tuple[NDArray[np.float64], float]:
    """Returns the seconds of each push during a save, and of the save."""
    job.client.flush()
    begun = time.perf_counter()
    saving = Save(job.control, MODEL, keep_last=1)
    saving.begin(Progress(0, None))
    took: list[float] = []
    failures: list[BaseException] = []

    def finish() -> None:
        try:
            saving.finish()
        except BaseException as error:
            failures.append(error)
        took.append(time.perf_counter() - begun)

    thread = threading.Thread(target=finish)
    thread.start()
    times = pushed(job, num_rows, lambda count: count == 0 or not took)  # the save of a tiny table ends at once
    thread.join()
    if failures:
        raise failures[0]
    return times, took[0]


def restart(pservers: LocalPservers, spec: TableSpec, num_rows: int, expected: NDArray[np.float32]) -> float:
    """Returns the seconds from the death of one pserver until a new worker has rows of all."""
    begun = time.perf_counter()
    pservers.processes[0].restart("--load", MODEL)
    check(pservers, spec, num_rows, expected)
    return time.perf_counter() - begun


def check(pservers: LocalPservers, spec: TableSpec, num_rows: int, expected: NDArray[np.float32]) -> None:
    """Ends the benchmark if pservers hold other rows than were saved."""
    with worker_of(pservers, spec) as job:
        if not np.array_equal(looked_up(job, num_rows), expected):
            raise SystemExit("pservers loaded other rows than were saved")


def looked_up(job: Job, num_rows: int) -> NDArray[np.float32]:
    """Returns some of the rows."""
    unique = unique_ids(job, np.linspace(0, num_rows - 1, NUM_LOOKED_UP).astype(np.int64))
    out = np.empty((len(unique.ids), job.spec.dim), np.float32)
    job.client.pull([RowBatch(job.spec, unique, out)])
    return out[np.argsort(unique.ids)]


def unique_ids(job: Job, ids: NDArray[np.int64]) -> UniqueIds:
    """Returns a copy: a deduplicator reuses its arrays."""
    unique, _ = job.deduplicator.unique([ids.astype(np.int64)], job.spec.salt)
    return UniqueIds(unique.ids.copy(), unique.num_per_shard.copy())


def newest(root: Path, kind: str = FULL) -> Path:
    """Returns the directory of the newest snapshot of a kind."""
    return max((root / MODEL).glob(f"*-{kind}"))


def files_of(snapshot: Path) -> list[Path]:
    """Returns the rows files of a snapshot."""
    return sorted(snapshot.glob("*.fss"))


def evict(files: Sequence[Path]) -> None:
    """Drops files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw(code: str, arguments: Sequence[tuple[Path | str, ...]]) -> float:
    """Returns the seconds until processes with these arguments, all started at once, have ended."""
    command = [sys.executable, "-c", code.format(chunk=CHUNK_BYTES)]
    processes = [
        subprocess.Popen([*command, *map(str, each)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for each in arguments
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    begun = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    if any(process.returncode for process in processes):
        raise SystemExit("a process that only reads or writes failed")
    return time.perf_counter() - begun


def described(name: str, times: NDArray[np.float64]) -> dict[str, float]:
    """Returns the median, 99th percentile and number of pushes."""
    ms = times * 1e3
    return {name + MEDIAN: float(np.median(ms)), name + P99: float(np.quantile(ms, 0.99)), name + COUNT: len(ms)}


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    """Returns the median of each measurement over all rounds."""
    return {name: float(np.median([each.figures[name] for each in rounds])) for name in rounds[0].figures}


def show(
    console: Console, options: argparse.Namespace, rounds: Sequence[Round], baseline: dict[str, Any] | None
) -> None:
    """Prints three tables: files, pushes, and the baseline."""
    middle, num_bytes = medians(rounds), rounds[-1].num_bytes
    about = f"{options.rows:,} rows, dim {options.dim}, {options.rule}, {options.pservers} pservers"
    table = Table(title=f"{about}; {num_bytes / 1e6:,.0f} MB, {num_bytes / options.rows:.1f} bytes a row")
    for heading in ("", "median s", "all rounds", "MB/s", "over raw"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, base in (
        (RAW_WRITE, RAW_WRITE),
        (SAVE, RAW_WRITE),
        (SAVE_PUSHED, RAW_WRITE),
        (CUT, None),
        (RAW_READ, RAW_READ),
        (START, None),
        (LOAD, None),
        (LOAD_ALONE, RAW_READ),
        (LOAD_WIDER, None),
        (LOAD_DELTAS, None),
        (RESTART, None),
    ):
        ratio = f"{middle[name] / middle[base]:.2f}" if base else ""
        rate = f"{num_bytes / middle[name] / 1e6:,.0f}" if base else ""
        every = " ".join(f"{each.figures[name]:.2f}" for each in rounds)
        table.add_row(name, f"{middle[name]:.2f}", every, rate, ratio)
    for share in SHARES:
        name, num_delta_bytes = DELTA_SAVE.format(100 * share), middle[DELTA_BYTES.format(100 * share)]
        every = " ".join(f"{each.figures[name]:.2f}" for each in rounds)
        rate = f"{num_delta_bytes / middle[name] / 1e6:,.0f}"
        table.add_row(f"{name}, {num_delta_bytes / 1e6:.1f} MB", f"{middle[name]:.2f}", every, rate, "")
    console.print(table)
    table = Table(title=f"a push of {BATCH:,} ids, until it is applied")
    for heading in ("", "median ms", "p99 ms", "p99, all rounds", "pushes a round"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in (IDLE, SAVING):
        every = " ".join(f"{each.figures[name + P99]:.1f}" for each in rounds)
        numbers = (f"{middle[name + MEDIAN]:.2f}", f"{middle[name + P99]:.2f}", every, f"{middle[name + COUNT]:.0f}")
        table.add_row(name, *numbers)
    console.print(table)
    if baseline:
        console.print(beside(middle, num_bytes, baseline))


def beside(middle: dict[str, float], num_bytes: int, baseline: dict[str, Any]) -> Table:
    """Returns a table of the baseline's figures and ours."""
    table = Table(title=f"PaddlePaddle 2.6.2, {baseline['servers']} servers, {baseline['save_files']} files, one run")
    for heading in ("", "Paddle", "here", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, theirs, ours, unit in (
        ("save", baseline["save_s"], middle[SAVE], " s"),
        ("start and load", baseline["start_with_load_s"], middle[LOAD], " s"),
        ("load_model while running", baseline["load_model_s"], None, " s"),
        ("MB", baseline["save_bytes"] / 1e6, num_bytes / 1e6, ""),
    ):
        here = ("", "") if ours is None else (f"{ours:.1f}{unit}", f"{theirs / ours:.1f}")
        table.add_row(name, f"{theirs:.1f}{unit}", *here)
    return table


if __name__ == "__main__":
    main()
