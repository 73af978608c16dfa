"""What does a prediction cost outside of the job?

`python -m benchmarks.serving` from the root of a checkout. A job saves a model: 26 fields on one table, dim 16, 13
dense values, an MLP of 400x3. For each number of rows:

- one process predicts with the same network over a dense embedding of the rows, which is fed by positions: by
  `paddle.inference` and by `exe.run`; with the plain model of `fleet-sparse export`, which searches ids; and with the
  split network, whose rows are given, by `paddle.inference` and by onnxruntime, if that is installed;
- a reader reads the rows of a batch from one and from two read-only pservers on this host, and a `Predictor` predicts
  with them.

Batches of 1, 32 and 512 examples, ids uniform and Zipf 1.1 over the rows, others in each call; all are interleaved. At
the largest number of rows: reads at a constant rate without deltas, and with deltas of 100 000 rows every 2 s; from the
manifest of a delta to the first prediction with it; from a rollback, and from a promotion, to the first prediction with
that version; kill -9 of one of two replicas under load; memory and start of a
read-only pserver; size of dictionaries. The run fails if two ways predict differently.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import zipf
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, amount
from benchmarks.processes import Worker, asked, resident_bytes, workers
from benchmarks.record import Record, add_results
from benchmarks.served_model import DIM, IDS, MODEL, NUM_DENSE, NUM_FIELDS, ROWS, TABLE, inputs_and_prediction
from fleet_sparse.core.version import Version
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.models.embedding import LocalTables
from fleet_sparse.serving.exported_rows import RowChoice
from fleet_sparse.serving.model import NETWORK, read_model
from fleet_sparse.serving.paddle_export import MODEL as EXPORTED
from fleet_sparse.serving.paddle_export import loaded, sorted_tables
from fleet_sparse.serving.paddle_network import OpenNetwork, save_network
from fleet_sparse.serving.predictor import Predictor
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.serving.versions import Versions
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import MANIFEST, directory_at
from fleet_sparse.snapshot.reader import open_content

DENSE, EXECUTOR, PLAIN = "dense embedding, paddle.inference", "dense embedding, exe.run", "plain model"
SPLIT, ONNX = "split network, paddle.inference", "split network, onnxruntime"
READ, PREDICT = "read, {} pserver(s)", "Predictor, {} pserver(s)"
NUM_PSERVERS = (1, 2)
UNIFORM, ZIPF = "uniform", "Zipf"
QUIET, DELTAS = "reads without deltas", "reads with deltas"
ADOPTED, KILLED, MEMORY, START = "from manifest to prediction", "kill of a replica", "pserver", "start"
ROLLED_BACK, PROMOTED = "from rollback to prediction", "from promotion to prediction"
DICTIONARY = "dictionary, {}"
DTYPES = ("float32", "float16", "int8")
NUM_INPUTS = 40
TOLERANCE = 1e-6
READ_BATCH, READ_EVERY_S = 32, 0.004
DELTA_ROWS, DELTA_EVERY_S = 100_000, 2.0
NUM_ADOPTED = 4
KILL_S = 3.0

Ids = NDArray[np.int64]
Feed = dict[str, NDArray[Any]]
Result = dict[str, Any]


class Inputs(NamedTuple):
    """The inputs of one call, for every contender."""

    feed: Feed
    positions: Feed
    split: Feed
    unique: dict[str, Ids]


class Contender(NamedTuple):
    """Something that predicts or reads."""

    run: Callable[[Inputs], Any]
    pids: Sequence[int] = ()
    """Processes whose CPU time counts besides that of this one."""


class Served:
    """A saved model with its rows, sorted by id.

    Args:
        root: Directory of the job.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / MODEL
        self.directory = directory_at(str(self.path))
        self.model = read_model(self.directory)
        with open_content(str(root / ROWS)) as content:
            table = sorted_tables(content, [TABLE], RowChoice())[TABLE]
        self.ids, self.rows = table.ids, np.asarray(table.rows, np.float32)
        assert np.array_equal(self.ids, np.load(root / IDS))

    def inputs(self, batch: int, ids: str, number: int) -> list[Inputs]:
        """Returns different inputs of calls."""
        rng, found = np.random.default_rng(number), []
        ranks = zipf.sampler(len(self.ids))
        places = rng.permutation(len(self.ids))  # a frequent id has any place
        for _ in range(NUM_INPUTS):
            shape = batch, NUM_FIELDS
            chosen = rng.integers(0, len(self.ids), shape) if ids == UNIFORM else places[ranks(rng, shape)]
            dense = rng.random((batch, NUM_DENSE), np.float32)
            unique, index = np.unique(chosen, return_inverse=True)
            rows = np.concatenate([self.rows[unique], np.zeros((1, DIM), np.float32)])
            found.append(
                Inputs(
                    {"ids": self.ids[chosen], "dense": dense},
                    {"positions": chosen, "dense": dense},
                    {"dense": dense, f"{TABLE}@rows": rows, f"{TABLE}@index.0": index.reshape(shape)},
                    {TABLE: self.ids[unique]},
                )
            )
        return found


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=AT_LEAST_1, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--batches", type=AT_LEAST_1, nargs="+", default=[1, 32, 512])
    parser.add_argument("--rounds", type=AT_LEAST_2, default=5)
    parser.add_argument("--calls", type=AT_LEAST_1, default=100, help="calls of a block")
    parser.add_argument("--seconds", type=amount, default=8.0, help="of a block of reads at a constant rate")
    parser.add_argument("--delta-rows", type=AT_LEAST_1, default=DELTA_ROWS, help="rows of a delta")
    add_results(parser)
    options = parser.parse_args()
    record = Record("serving", options)
    paddle.enable_static()
    rounds: list[dict[str, Result]] = [{} for _ in range(options.rounds)]
    console = Console()
    for num_rows in sorted(options.rows):
        with tempfile.TemporaryDirectory(prefix="serving-benchmark-") as text, ExitStack() as stack:
            root = Path(text)
            command = ["benchmarks.served_model", str(root), str(num_rows)]
            with console.status(f"a model of {num_rows} rows is saved"):
                (job,) = stack.enter_context(workers([(command, {"OMP_NUM_THREADS": "1"})]))
                assert job.stdout is not None
                while job.stdout.readline() not in {"saved\n", ""}:
                    pass
                served = Served(root)
            prefix = f"{num_rows / 1e6:.3g} M rows"
            with console.status(f"{prefix}: predictions"):
                measure_predictions(served, root, options, prefix, rounds)
            if num_rows == max(options.rows):
                with console.status(f"{prefix}: deltas, replicas, memory"):
                    measure_service(served, root, job, options, prefix, rounds)
    show(console, rounds)
    record.append(rounds)


# Predictions


def measure_predictions(
    served: Served, root: Path, options: argparse.Namespace, prefix: str, rounds: Sequence[dict[str, Result]]
) -> None:
    """Adds the time of each contender for each batch and kind of ids to the rounds."""
    with ExitStack() as stack:
        contenders = networks_of(served, root)
        for number in NUM_PSERVERS:
            pservers = stack.enter_context(read_only(root, number))
            pids = [each.process.pid for each in pservers.processes]
            if number == 1:
                for of_round in rounds:
                    of_round[f"{prefix}: {MEMORY}"] = {"resident_bytes": resident_bytes(pids[0])}
            reader = stack.enter_context(PserverReader(pservers.endpoints, Settings()))
            predictor = stack.enter_context(Predictor(str(served.path), pservers.endpoints, settings=Settings()))
            contenders[READ.format(number)] = Contender(partial(read_unique, reader), pids)
            contenders[PREDICT.format(number)] = Contender(partial(predicted, predictor), pids)
        for batch in options.batches:
            for ids in (UNIFORM, ZIPF):
                inputs = served.inputs(batch, ids, batch)
                check(contenders, inputs[0])
                for each in contenders.values():
                    block(each, inputs[:5], 5)
                for number, of_round in enumerate(rounds):
                    blocks = {
                        f"{prefix}, {ids}, batch {batch}: {name}": partial(block, each, inputs, options.calls)
                        for name, each in contenders.items()
                    }
                    of_round.update(interleaved(blocks, number))


def read_unique(reader: PserverReader, inputs: Inputs) -> Any:
    """Reads the rows of a call."""
    return reader.read(inputs.unique)


def predicted(predictor: Predictor, inputs: Inputs) -> list[NDArray[Any]]:
    """Predicts."""
    return list(predictor.run(inputs.feed).outputs.values())


def networks_of(served: Served, root: Path) -> dict[str, Contender]:
    """Opens all networks that are measured in this process."""
    export = [sys.executable, "-m", "fleet_sparse.cli", "export", str(served.path), str(root / "plain"), "--force"]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    plain = OpenNetwork(root / "plain" / EXPORTED, has_onednn=False)
    dense, executor = dense_embedding(served, root)
    with loaded(served.directory, served.model, NETWORK) as (_, local):
        split = OpenNetwork(local / NETWORK, has_onednn=False)
        found = {
            DENSE: Contender(lambda inputs: dense.run(inputs.positions)),
            EXECUTOR: Contender(lambda inputs: executor(inputs.positions)),
            PLAIN: Contender(lambda inputs: plain.run(inputs.feed)),
            SPLIT: Contender(lambda inputs: split.run(inputs.split)),
        }
        if all(map(importlib.util.find_spec, ("onnxruntime", "paddle2onnx"))):
            from fleet_sparse.serving.onnx_network import OnnxNetworks

            onnx = OnnxNetworks(local / NETWORK).open({})
            found[ONNX] = Contender(lambda inputs: onnx.run(inputs.split))
    return found


def dense_embedding(served: Served, root: Path) -> tuple[OpenNetwork, Callable[[Feed], Any]]:
    """Returns the network over a dense embedding, by `paddle.inference` and by `exe.run`."""
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    executor = paddle.static.Executor(paddle.CPUPlace())
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        ids, dense, prediction = inputs_and_prediction("positions", LocalTables(served.ids))
    with loaded(served.directory, served.model, NETWORK) as (network, _):
        values = dict(network.values)
    values[TABLE] = served.rows[: len(served.ids)]
    parameters = {each.name for each in main.global_block().all_parameters()}
    for name in parameters:
        scope.var(name).get_tensor().set(np.ascontiguousarray(values[name]), paddle.CPUPlace())
    save_network(root / "dense", main, [ids, dense], [prediction], {name: values[name] for name in parameters})

    def run(feed: Feed) -> Any:
        with paddle.static.scope_guard(scope):
            return executor.run(main, feed=feed, fetch_list=[prediction])

    return OpenNetwork(root / "dense", has_onednn=False), run


def check(contenders: Mapping[str, Contender], inputs: Inputs) -> None:
    """Ends the run if two contenders that predict differ."""
    expected = None
    for name, each in contenders.items():
        if name.startswith("read"):
            continue
        (found,) = each.run(inputs)
        expected = found if expected is None else expected
        if not np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise SystemExit(f"{name}: it predicts other values, by up to {np.abs(found - expected).max()}")


def block(contender: Contender, inputs: Sequence[Inputs], num_calls: int) -> Result:
    """Returns the seconds of each call, and the CPU seconds of all calls."""
    pids = [os.getpid(), *contender.pids]
    seconds, cpu_s = [], cpu_seconds(pids)
    for number in range(num_calls):
        chosen = inputs[number % len(inputs)]
        begun_at = time.perf_counter()
        contender.run(chosen)
        seconds.append(time.perf_counter() - begun_at)
    return {"seconds": seconds, "cpu_s": cpu_seconds(pids) - cpu_s}


# Pservers that serve


@contextmanager
def read_only(root: Path, num_shards: int) -> Iterator[LocalPservers]:
    """Starts read-only pservers of the model."""
    quiet = {"FLEET_SPARSE_LOG_LEVEL": "ERROR"}
    with local_pservers(
        num_shards, root=root, load_dirname=ROWS, arguments=["--read-only"], environment=quiet
    ) as pservers:
        yield pservers


def measure_service(
    served: Served,
    root: Path,
    job: Worker,
    options: argparse.Namespace,
    prefix: str,
    rounds: Sequence[dict[str, Result]],
) -> None:
    """Adds memory, start, deltas and the kill of a replica to the rounds."""
    inputs = served.inputs(READ_BATCH, ZIPF, 1)
    sizes = {DICTIONARY.format(dtype): dictionary_bytes(served, root, dtype) for dtype in DTYPES}
    for of_round in rounds:
        begun_at = time.perf_counter()
        with read_only(root, 1):
            start_s = time.perf_counter() - begun_at
        of_round[f"{prefix}: {START}"] = {"seconds": [start_s]}
        for name, num_bytes in sizes.items():
            of_round[f"{prefix}: {name}"] = {"bytes_a_row": num_bytes / len(served.ids)}
    with read_only(root, 2) as pservers, read_only(root, 2) as replicas:
        endpoints = ["|".join(pair) for pair in zip(pservers.endpoints, replicas.endpoints, strict=True)]
        with (
            PserverReader(pservers.endpoints, Settings()) as reader,
            Predictor(str(served.path), pservers.endpoints, settings=Settings()) as predictor,
        ):
            for number, of_round in enumerate(rounds):
                found = interleaved(
                    {
                        QUIET: lambda: {"seconds": reads(reader, inputs, options.seconds)},
                        DELTAS: lambda: {"seconds": reads_under_deltas(reader, inputs, job, options)},
                    },
                    number,
                )
                of_round.update({f"{prefix}: {name}": each for name, each in found.items()})
                of_round[f"{prefix}: {ADOPTED}"] = {"seconds": adopted_s(predictor, inputs[0], job, root, options)}
                versions = Versions(directory_at(root / ROWS))
                newest = versions.promote()
                for name, move in ((ROLLED_BACK, versions.rollback), (PROMOTED, versions.promote)):
                    of_round[f"{prefix}: {name}"] = {"seconds": [followed_s(predictor, inputs[0], move)]}
                assert versions.unpin() == newest
        for of_round in rounds:
            with Predictor(str(served.path), endpoints, settings=Settings()) as predictor:
                of_round[f"{prefix}: {KILLED}"] = killed(predictor, pservers, inputs)


def dictionary_bytes(served: Served, root: Path, dtype: str) -> int:
    """Returns the size of all files of a dictionary."""
    with tempfile.TemporaryDirectory(dir=root) as out:
        command = ["export", str(served.path), out, "--format", "dictionary", "--dtype", dtype, "--force"]
        subprocess.run([sys.executable, "-m", "fleet_sparse.cli", *command], check=True, stdout=subprocess.DEVNULL)
        return sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())


def reads(reader: PserverReader, inputs: Sequence[Inputs], for_s: float) -> list[float]:
    """Reads at a constant rate; returns the seconds of each read, from the time at which it was due."""
    seconds: list[float] = []
    due_at = time.perf_counter()
    end_at = due_at + for_s
    while due_at < end_at:
        time.sleep(max(due_at - time.perf_counter(), 0.0))
        reader.read(inputs[len(seconds) % len(inputs)].unique)
        seconds.append(time.perf_counter() - due_at)
        due_at += READ_EVERY_S
    return seconds


def reads_under_deltas(
    reader: PserverReader, inputs: Sequence[Inputs], job: Worker, options: argparse.Namespace
) -> list[float]:
    """Reads at a constant rate while the job publishes deltas; returns the seconds of each read."""
    failures: list[BaseException] = []
    stopping = threading.Event()

    def publish() -> None:
        # This thread only waits for the job: a `Predictor.run` in it would hold the GIL while reads are timed.
        try:
            while not stopping.is_set():
                due_at = time.monotonic() + DELTA_EVERY_S
                asked([job], options.delta_rows)
                stopping.wait(max(due_at - time.monotonic(), 0.0))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        seconds = reads(reader, inputs, options.seconds)
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]
    return seconds


def adopted_s(
    predictor: Predictor, inputs: Inputs, job: Worker, root: Path, options: argparse.Namespace
) -> list[float]:
    """Publishes deltas; returns the seconds from each manifest to the first prediction with its snapshot."""
    found: list[float] = []
    for _ in range(NUM_ADOPTED):
        due_at = time.monotonic() + DELTA_EVERY_S
        (name,) = asked([job], options.delta_rows)
        found.append(adoption_s(predictor, inputs, root / ROWS / name.strip()))
        time.sleep(max(due_at - time.monotonic(), 0.0))
    return found


def adoption_s(predictor: Predictor, inputs: Inputs, snapshot: Path) -> float:
    """Returns the seconds from a manifest to the first prediction with its snapshot."""
    published_at = (snapshot / MANIFEST).stat().st_mtime
    number = int(snapshot.name.split("-")[0])
    until = time.monotonic() + 30
    while predictor.run(inputs.feed).version.number < number:
        if time.monotonic() > until:
            raise SystemExit(f"{snapshot.name} is not served after 30 s: {predictor.stats()}")
        time.sleep(0.002)
    return time.time() - published_at


def followed_s(predictor: Predictor, inputs: Inputs, move: Callable[[], Version]) -> float:
    """Returns the seconds from the beginning of a command to the first prediction with the version that it names."""
    time.sleep(Settings().version_keep_s)  # a version stays readable for that long before the next one is adopted
    begun_at = time.perf_counter()
    version = move()
    while predictor.run(inputs.feed).version != version:
        if time.perf_counter() > begun_at + 30:
            raise SystemExit(f"snapshot {version.number} is not served after 30 s: {predictor.stats()}")
        time.sleep(0.002)
    return time.perf_counter() - begun_at


def killed(predictor: Predictor, pservers: LocalPservers, inputs: Sequence[Inputs]) -> Result:
    """Kills a replica of the first shard under load and starts it again; returns the longest time without an answer."""
    process = pservers.processes[0]
    kill_at = time.perf_counter() + KILL_S / 3
    end_at = kill_at + 2 * KILL_S / 3
    answered_at, longest_s, num_failed, number, is_killed = time.perf_counter(), 0.0, 0, 0, False
    while time.perf_counter() < end_at:
        if not is_killed and time.perf_counter() > kill_at:
            process.process.send_signal(signal.SIGKILL)
            is_killed = True
        try:
            predictor.run(inputs[number % len(inputs)].feed)
        except Exception:
            num_failed += 1
        now = time.perf_counter()
        longest_s, answered_at, number = max(longest_s, now - answered_at), now, number + 1
    process.restart("--read-only", "--load", ROWS)
    return {"seconds": [longest_s], "num_failed": num_failed}


def show(console: Console, rounds: Sequence[dict[str, Result]]) -> None:
    """Prints the medians over all rounds."""
    table = Table(title="serving")
    for heading in ("what", "p50 ms", "p99 ms", "CPU ms", "bytes a row", "failed", "MB"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name in rounds[0]:
        cells = [""] * 6
        of_rounds = [each[name] for each in rounds]
        if "seconds" in of_rounds[0]:
            seconds = 1e3 * np.concatenate([each["seconds"] for each in of_rounds])
            cells[:2] = f"{np.median(seconds):.3f}", f"{np.percentile(seconds, 99):.3f}"
        if "cpu_s" in of_rounds[0]:
            cells[2] = f"{1e3 * np.median([each['cpu_s'] / len(each['seconds']) for each in of_rounds]):.3f}"
        if "bytes_a_row" in of_rounds[0]:
            cells[3] = f"{np.median([each['bytes_a_row'] for each in of_rounds]):.1f}"
        if "num_failed" in of_rounds[0]:
            cells[4] = f"{sum(each['num_failed'] for each in of_rounds)}"
        if "resident_bytes" in of_rounds[0]:
            cells[5] = f"{np.median([each['resident_bytes'] for each in of_rounds]) / 1e6:.0f}"
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
