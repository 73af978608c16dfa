"""What does a lookup and an update of rows cost in one process, beside what others have for local tables?

`python -m benchmarks.local` from the root of a checkout. A cycle looks 13 000 distinct ids of 1 M rows up and trains
their rows with gradients that are given; every cycle has other ids. Interleaved, some cycles each:

- ours: pull and push of the store that a pserver keeps a table in. Its ids are any int64, found by hash; those of the
  others are positions in an array as long as the largest of them;
- NumPy: the rows and states taken out of arrays and put back, computed in between;
- PaddlePaddle's `nn.Embedding(sparse=True)`, forward and backward, and its optimizer, Adam with `lazy_mode`;
- PyTorch's, with SGD, Adagrad and SparseAdam, in a venv that the benchmark makes; `--no-torch` leaves it out. What pip
  takes from its index may be a build with CUDA, of several GB: `--torch-python` names an interpreter with another one.

Their order changes from round to round. All train the same rows, and in the end these are compared with NumPy's;
PaddlePaddle's Adam alone is not, which counts its steps otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import torch_rows
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, DIM, check_batch
from benchmarks.record import Record, add_results
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.warm_up import warm_up

OURS, NUMPY, PADDLE, TORCH = "fleet_sparse, a store", "NumPy", "PaddlePaddle", "PyTorch"
RULES = ("sgd", "adagrad", "adam")
LEARNING_RATE, EPSILON, BETAS, ADAM_EPSILON = 0.05, 1e-6, (0.9, 0.999), 1e-8
NUM_BATCHES = 64
NUM_LOOKED_UP = 100
TOLERANCE = 1e-4  # values are of 0.1 to 1; optimizers add their epsilon in other places
# Its t of sparse rows begins with 2.
OTHERWISE = {(PADDLE, "adam")}


class Work(NamedTuple):
    """Work of all trainers of a case."""

    rule: str
    initial: NDArray[np.float32]
    """`(num_rows, dim)`"""
    batches: NDArray[np.int64]
    """`(NUM_BATCHES, batch)`, positions of rows; those of a batch are distinct."""
    grads: NDArray[np.float32]
    """`(batch, dim)`, the same in every cycle."""


class Trainer(NamedTuple):
    """A library that looks rows up and trains them."""

    run: Callable[[int], list[float]]
    """Runs a number of cycles and returns the seconds of each."""
    rows: Callable[[], NDArray[np.float32]]
    """Returns the rows of the first ids of the first batch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=DIM, nargs="+", default=[16, 64])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--rows", type=AT_LEAST_1, default=1_000_000)
    parser.add_argument("--batch", type=AT_LEAST_1, default=13_000, help="distinct ids of a cycle")
    parser.add_argument("--cycles", type=AT_LEAST_1, default=30, help="cycles of each in a round")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=6, help="rounds; the first is not timed")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch out")
    parser.add_argument("--torch-python", type=Path, help="interpreter with PyTorch; by default a venv is made")
    add_results(parser)
    options = parser.parse_args(arguments)
    check_batch(parser, options.batch, options.rows)
    record = Record("local", options)
    rounds: list[dict[str, dict[str, list[float]]]] = [{} for _ in range(options.rounds - 1)]
    for rule in options.rules:
        for dim in options.dims:
            measured = measure(options, work(rule, dim, options.rows, options.batch))
            for of_round, found in zip(rounds, measured, strict=True):
                of_round[f"{rule}, dim {dim}"] = found
    show(options, rounds)
    record.append(rounds)


def work(rule: str, dim: int, num_rows: int, batch: int) -> Work:
    """Returns random rows, ids and gradients."""
    rng = np.random.default_rng(1)
    initial = rng.random((num_rows, dim), np.float32) - np.float32(0.5)
    batches = np.stack([rng.choice(num_rows, batch, replace=False) for _ in range(NUM_BATCHES)])
    grads = rng.standard_normal((batch, dim), np.float32)
    return Work(rule, initial, batches.astype(np.int64), grads)


def measure(options: argparse.Namespace, case: Work) -> list[dict[str, list[float]]]:
    """Returns the seconds of each cycle, by round but the first, and trainer."""
    kinds: dict[str, Callable[[Work], Any]] = {OURS: ours, NUMPY: of_numpy, PADDLE: of_paddle}
    measured: list[dict[str, list[float]]] = []
    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {name: stack.enter_context(kind(case)) for name, kind in kinds.items()}
        if options.torch:
            trainers[TORCH] = stack.enter_context(of_torch(case, options.torch_python))
        runs = {name: partial(trainer.run, options.cycles) for name, trainer in trainers.items()}
        for number in range(options.rounds):
            measured.append(interleaved(runs, number))
        check(case.rule, {name: trainer.rows() for name, trainer in trainers.items()})
    return measured[1:]


def check(rule: str, rows: dict[str, NDArray[np.float32]]) -> None:
    """Ends the benchmark if trainers trained different rows."""
    for name, found in rows.items():
        difference = np.abs(found - rows[NUMPY]).max()
        if (name, rule) not in OTHERWISE and not difference <= TOLERANCE:
            raise SystemExit(f"{name}, {rule}: rows are {difference:.2g} from NumPy's")


def cycles_of(cycle: Callable[[int], None]) -> Callable[[int], list[float]]:
    """Returns a function that runs numbered cycles and returns their seconds."""
    num_done = 0

    def run(count: int) -> list[float]:
        nonlocal num_done
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            cycle(num_done)
            seconds.append(time.perf_counter() - begun)
            num_done += 1
        return seconds

    return run


@contextmanager
def ours(case: Work) -> Iterator[Trainer]:
    """Opens a store, its ids spread over all int64."""
    num_rows, dim = case.initial.shape
    spread = np.uint64(0x9E3779B97F4A7C15)  # odd, so that distinct positions become distinct ids
    ids = (np.arange(num_rows, dtype=np.uint64) * spread).view(np.int64)
    batches = ids[case.batches]
    warm_up()
    store = TableStore(TableSpec(name="table", dim=dim, rule=case.rule, initializer=constant(0.0)))
    for begin in range(0, num_rows, 50_000):
        store.set_rows(ids[begin : begin + 50_000], case.initial[begin : begin + 50_000])
    out = np.empty_like(case.grads)

    def cycle(number: int) -> None:
        batch = batches[number % len(batches)]
        store.pull(batch, out)
        store.push(batch, case.grads, LEARNING_RATE, number + 1)

    def rows() -> NDArray[np.float32]:
        ids = batches[0][:NUM_LOOKED_UP]
        found = np.empty((len(ids), dim), np.float32)
        store.pull(ids, found)
        return found

    yield Trainer(cycles_of(cycle), rows)
    store.close()


@contextmanager
def of_numpy(case: Work) -> Iterator[Trainer]:
    """Opens indexed arrays of NumPy."""
    table, grads = case.initial.copy(), case.grads
    states = [np.zeros_like(table) for _ in range(RULES.index(case.rule))]

    def cycle(number: int) -> None:
        ids = case.batches[number % len(case.batches)]
        rows = table[ids]
        if case.rule == "sgd":
            rows -= LEARNING_RATE * grads
        elif case.rule == "adagrad":
            moments = states[0][ids] + grads * grads
            states[0][ids] = moments
            rows -= LEARNING_RATE * grads / (np.sqrt(moments) + EPSILON)
        else:
            firsts = BETAS[0] * states[0][ids] + (1 - BETAS[0]) * grads
            seconds = BETAS[1] * states[1][ids] + (1 - BETAS[1]) * (grads * grads)
            states[0][ids], states[1][ids] = firsts, seconds
            first, second = (1 - beta ** (number + 1) for beta in BETAS)
            rows -= LEARNING_RATE / first * firsts / (np.sqrt(seconds / second) + ADAM_EPSILON)
        table[ids] = rows

    yield Trainer(cycles_of(cycle), lambda: table[case.batches[0][:NUM_LOOKED_UP]])


@contextmanager
def of_paddle(case: Work) -> Iterator[Trainer]:
    """Opens a layer and optimizer of this process's PaddlePaddle."""
    import paddle

    paddle.set_device("cpu")
    embedding = paddle.nn.Embedding(*case.initial.shape, sparse=True)
    embedding.weight.set_value(case.initial)
    optimizers = {
        "sgd": paddle.optimizer.SGD,
        "adagrad": paddle.optimizer.Adagrad,
        "adam": lambda *args, **kwargs: paddle.optimizer.Adam(*args, lazy_mode=True, **kwargs),
    }
    optimizer = optimizers[case.rule](LEARNING_RATE, parameters=embedding.parameters())
    grads = paddle.to_tensor(case.grads)
    batches = [paddle.to_tensor(ids) for ids in case.batches]

    def cycle(number: int) -> None:
        rows = embedding(batches[number % len(batches)])
        rows.backward(grads)
        optimizer.step()
        optimizer.clear_grad()

    def rows() -> NDArray[np.float32]:
        found: NDArray[np.float32] = embedding(batches[0][:NUM_LOOKED_UP]).numpy()
        return found

    yield Trainer(cycles_of(cycle), rows)


@contextmanager
def of_torch(case: Work, python: Path | None) -> Iterator[Trainer]:
    """Starts PyTorch in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="torch-rows-") as directory:
        for name in ("initial", "batches", "grads"):
            np.save(f"{directory}/{name}.npy", getattr(case, name))
        arguments = ["--rule", case.rule, "--learning-rate", str(LEARNING_RATE), "--directory", directory]
        with torch_rows(arguments, python=python) as torch:
            yield Trainer(torch.ask, lambda: np.array(torch.ask("rows"), np.float32))


def show(options: argparse.Namespace, rounds: Sequence[dict[str, dict[str, list[float]]]]) -> None:
    """Prints a table of medians, quartiles and ratios to ours."""
    table = Table(title=f"{options.batch:,} distinct ids of {options.rows:,}, looked up and trained")
    for heading in ("", "median ms", "quartiles ms", "M rows/s", "times ours"):
        table.add_column(heading, justify="right" if heading else "left")
    for case in rounds[0]:
        times = {name: np.concatenate([each[case][name] for each in rounds]) for name in rounds[0][case]}
        for name, seconds in times.items():
            low, middle, high = np.percentile(seconds, [25, 50, 75])
            rate, ratio = options.batch / middle / 1e6, middle / np.median(times[OURS])
            quartiles = f"{low * 1e3:.2f} - {high * 1e3:.2f}"
            table.add_row(f"{case}: {name}", f"{middle * 1e3:.2f}", quartiles, f"{rate:.2f}", f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
