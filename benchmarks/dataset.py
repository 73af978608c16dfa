"""How fast does a click model train from files, beside PaddlePaddle 2.6's own data sets, and how fast is text parsed?

`python -m benchmarks.dataset --pservers 2 --baseline` from the root of a checkout. The click model of
`benchmarks.step`, async, one worker, its examples in text files as data sets read them: for each input the number of
values, and the values. A block is one call of `train_from_dataset` over `--steps` batches: of an `InMemoryDataset` that
was loaded before; of one whose loading is timed, too; and of a `QueueDataset`, which reads and parses while the program
trains. `--threads` is the `thread_num` of the data sets: that many threads load, read and train. Beside them a loop of
`exe.run` over arrays in memory and, with `--baseline`, the same data sets of PaddlePaddle 2.6. Blocks are interleaved.
A block of the parser is one thread that parses the text of 26 slots of one value, and of all inputs of the click model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet
from rich.console import Console
from rich.table import Table

import fleet_sparse
from benchmarks.baselines import paddle_steps
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS_OR_EMBEDDED, add_baseline
from benchmarks.programs import IN_MEMORY, LOADING, LOOP, PADDLE, QUEUE
from benchmarks.record import Record, add_results
from benchmarks.step import BATCH, NUM_BATCHES, NUM_DENSE, NUM_FIELDS, Feed, batches, click_loss, flagged
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.plugin.datasets.parser import LineParser
from fleet_sparse.plugin.datasets.slots import Slot
from fleet_sparse.warm_up import warm_up

IDS = "parser, 26 slots of one id"
INPUTS = "parser, all inputs"

Round = dict[str, dict[str, float]]


def main() -> None:
    """Measures data sets and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pservers", type=PSERVERS_OR_EMBEDDED, default=2, help="processes; 0 is one inside this process"
    )
    parser.add_argument("--steps", type=AT_LEAST_1, default=300, help="steps of a block")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=6, help="blocks of each; the first is not timed")
    parser.add_argument("--batches", type=AT_LEAST_1, default=NUM_BATCHES, help="number of different batches")
    parser.add_argument("--threads", type=AT_LEAST_1, default=1, help="threads that load, read and train")
    parser.add_argument(
        "--mkl-avx2", action="store_true", help="use MKL's AVX2 kernels, which it does not choose on AMD"
    )
    add_baseline(parser)
    add_results(parser)
    options = parser.parse_args()
    record = Record("dataset", options)
    measured = run(options)
    show(measured)
    record.append(measured, batch=BATCH)


def run(options: argparse.Namespace) -> list[Round]:
    """Returns every round but the first."""
    if options.mkl_avx2:
        os.environ["MKL_DEBUG_CPU_TYPE"] = "5"  # MKL reads it at the first product of matrices; baselines inherit it
    feeds = list(batches(options.batches))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pids: list[int] = []
        if options.pservers:
            pservers = stack.enter_context(local_pservers(options.pservers, root=directory, log=subprocess.DEVNULL))
            os.environ.update(pservers.environment())
            pids = [each.process.pid for each in pservers.processes]
        blocks: dict[str, Callable[[], dict[str, float]]] = {
            name: partial(timed, task, options.steps, pids)
            for name, task in programs(feeds, directory, options.steps, options.threads).items()
        }
        for feed in (IN_MEMORY, LOADING, QUEUE) if options.peer else ():
            baseline = stack.enter_context(
                paddle_steps("ctr", servers=2, feed=feed, threads=options.threads, python=options.peer_python)
            )
            baseline(len(feeds))  # its rows are there from now on
            blocks[f"{PADDLE}, {feed}"] = partial(timed_baseline, baseline, options.steps)
        blocks |= {name: partial(parsed, *case) for name, case in texts(feeds).items()}
        measured = [interleaved(blocks, number) for number in range(options.rounds)]
        fleet.stop_worker()
    return measured[1:]


def programs(feeds: Sequence[Feed], directory: Path, steps: int, threads: int) -> Mapping[str, Callable[[], None]]:
    """Builds the program and its data sets; returns what runs all steps, by name."""
    fleet_sparse.install()
    paddle.enable_static()
    fleet.init()
    loss = flagged("async", click_loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    coming = [feeds[number % len(feeds)] for number in range(steps)]
    inputs = {
        value.name: value for op in program.global_block().ops for value in op.results() if op.name() == "pd_op.data"
    }
    paths = written(coming, directory, threads)
    datasets: dict[str, Any] = {
        IN_MEMORY: paddle.distributed.InMemoryDataset(),
        LOADING: paddle.distributed.InMemoryDataset(),
        QUEUE: paddle.distributed.QueueDataset(),
    }
    for dataset in datasets.values():
        use_var = [inputs[each] for each in feeds[0]]
        dataset.init(batch_size=BATCH, thread_num=threads, use_var=use_var, pipe_command="cat")
        dataset.set_filelist(paths)
    datasets[IN_MEMORY].load_into_memory()

    def loop() -> None:
        for feed in coming:
            executor.run(program, feed=feed, fetch_list=[loss])

    def load_and_train() -> None:
        datasets[LOADING].load_into_memory()
        executor.train_from_dataset(program, datasets[LOADING])
        datasets[LOADING].release_memory()

    train = partial(executor.train_from_dataset, program)
    runs = {name: partial(train, dataset) for name, dataset in datasets.items()}
    return {LOOP: loop, **runs, LOADING: load_and_train}


def written(feeds: Sequence[Feed], directory: Path, num_files: int) -> list[str]:
    """Writes the examples to files of whole batches; returns their paths."""
    paths = [directory / f"part-{number}" for number in range(num_files)]
    for number, path in enumerate(paths):
        path.write_text("".join(line for feed in feeds[number::num_files] for line in lines(feed)))
    return [str(path) for path in paths]


def lines(feed: Feed) -> Iterator[str]:
    """Yields each example as data sets read it."""
    for example in zip(*feed.values(), strict=True):
        yield " ".join(f"{len(values)} {' '.join(map(str, values.tolist()))}" for values in example) + "\n"


def texts(feeds: Sequence[Feed]) -> Mapping[str, tuple[Sequence[Slot], NDArray[np.uint8]]]:
    """Returns the slots and the text of each case of the parser."""
    slots = [Slot(f"slot{number}", False, (1,)) for number in range(NUM_FIELDS)]
    ids = "".join(" ".join(f"1 {each}" for each in row) + "\n" for feed in feeds for row in feed["ids"].tolist())
    inputs = [Slot("ids", False, (NUM_FIELDS,)), Slot("dense", True, (NUM_DENSE,)), Slot("label", True, (1,))]
    whole = "".join(line for feed in feeds for line in lines(feed))
    return {
        name: (of_case, np.frombuffer(text.encode(), np.uint8))
        for name, of_case, text in ((IDS, slots, ids), (INPUTS, inputs, whole))
    }


def timed(task: Callable[[], None], steps: int, pids: Sequence[int]) -> dict[str, float]:
    """Runs all steps; returns the mean seconds of a step, and its CPU in the worker and in all pservers."""
    before = cpu_seconds([os.getpid()]), cpu_seconds(pids)
    begun_at = time.perf_counter()
    task()
    return {
        "seconds": (time.perf_counter() - begun_at) / steps,
        "worker_cpu_s": (cpu_seconds([os.getpid()]) - before[0]) / steps,
        "pservers_cpu_s": (cpu_seconds(pids) - before[1]) / steps,
    }


def timed_baseline(baseline: Callable[[int], list[float]], steps: int) -> dict[str, float]:
    """Runs all steps in a baseline; returns the mean seconds of a step."""
    return {"seconds": baseline(steps)[0]}


def parsed(slots: Sequence[Slot], text: NDArray[np.uint8]) -> dict[str, float]:
    """Parses a text in chunks of whole lines, as they are read; returns lines and bytes a second."""
    warm_up()
    parser, ends = LineParser(slots), np.flatnonzero(text == ord("\n")) + 1
    chunks = np.split(text, ends[np.searchsorted(ends, np.arange(1 << 20, len(text), 1 << 20))])
    begun_at = time.perf_counter()
    num_lines = sum(lines.num_lines for chunk in chunks for lines in parser.parse(chunk, "text", 1))
    seconds = time.perf_counter() - begun_at
    if num_lines != len(ends):
        raise SystemExit(f"{num_lines} lines were parsed, the text has {len(ends)}")
    return {"lines_per_s": num_lines / seconds, "bytes_per_s": len(text) / seconds}


def show(measured: Sequence[Round]) -> None:
    """Prints a table of medians."""
    table = Table("case", "examples/s", "worker + pservers, CPU ms a step", "lines/s", "MB/s", title="data sets")
    for name in measured[0]:
        of = {key: float(np.median([each[name][key] for each in measured])) for key in measured[0][name]}
        if "lines_per_s" in of:
            table.add_row(name, "", "", f"{of['lines_per_s']:,.0f}", f"{of['bytes_per_s'] / 1e6:,.0f}")
        else:
            cpu = [f"{of[key] * 1e3:.1f}" for key in ("worker_cpu_s", "pservers_cpu_s") if key in of]
            table.add_row(name, f"{BATCH / of['seconds']:,.0f}", " + ".join(cpu), "", "")
    Console(width=120).print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
