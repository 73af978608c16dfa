"""What do pservers add to the step of a click model, over the same program with its rows fed from memory?

`python -m benchmarks.step --pservers 2` from the root of a checkout. 26 fields on one table, dim 16, batch 512, an MLP
of 400x3, Adagrad; ids are Zipf 1.1 over 10 M a field. All programs train the same batches in a cycle, and each batch
once before anything is timed, so that all rows exist. The pservers train the dense parameters; in the floor Paddle
does. The program on the pservers runs plainly and behind `look_ahead`. Plain Paddle trains the model with a local
table of `--local-rows` rows, ids modulo that: by default, where the gradient of the table is as large as the table,
and in its legacy IR, where it has only the rows of the batch. Short blocks of steps of all programs are interleaved,
and each round another program begins; a ratio is taken within each round, and its median over rounds is shown.
`--mode` selects sync or geo training, and `--max-step-lag` bounds the steps that an async worker may be ahead.
`--serial` runs the ops of a program one after the other on the thread that calls `exe.run`, by Paddle's flag
`new_executor_serial_run`. `--mkl-avx2` selects the AVX2 kernels of the MKL in Paddle's wheels, which chooses its
slowest kernels for matrices on AMD. `--cached` also measures the program with a row cache (`benchmarks.cached_step`).
`--baseline` also measures PaddlePaddle 2.6's own parameter server, in a venv that
it makes; `--dataset-steps` the same with an `InMemoryDataset`, in blocks of that many steps, since a call of
`train_from_dataset` has a cost of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.distributed import fleet
from paddle.pir_utils import OldIrGuard
from rich.console import Console
from rich.table import Table

import fleet_sparse
from benchmarks.baselines import paddle_steps, zipf
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2, PSERVERS_OR_EMBEDDED, add_baseline
from benchmarks.processes import workers
from benchmarks.programs import AHEAD, CACHED, FLOOR, LOCAL, LOCAL_SPARSE, OURS, PADDLE, PADDLE_DATASET, PADDLE_PULLING
from benchmarks.record import Record, add_results
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.settings import CHANNELS

NUM_FIELDS, DIM, BATCH, NUM_DENSE = 26, 16, 512, 13
HIDDEN = (400, 400, 400)
LEARNING_RATE = 0.01
NUM_BATCHES = 100
_END_S = 60.0  # until a worker has ended its pservers
"""Number of batches, which are fed in a cycle; the same as in `baselines/paddle_step.py`."""

Feed = dict[str, NDArray[Any]]
Loss = Callable[[Any], Any]
"""Builds the loss of a model from the rows that were looked up."""


class Program(NamedTuple):
    """A program, its batches and its loss."""

    name: str
    program: Any
    loss: Any
    feeds: list[Feed]
    ir: Callable[[], Any] = nullcontext
    """Makes the context in which the program is built and run."""
    looks_ahead: bool = False


class Block(NamedTuple):
    """Times of one block of steps."""

    seconds: list[float]
    """Seconds of each step; only their mean where a baseline measures no single steps."""
    worker_cpu_s: float | None = None
    """CPU of all steps and all threads of this process; None for a baseline."""
    pservers_cpu_s: float | None = None
    """CPU of all steps and all pservers; None for a baseline."""


Round = dict[str, Block]
"""Blocks by name of the program."""


class BaselineSteps(NamedTuple):
    """A baseline, or another job, in other processes."""

    run: Callable[[int], list[float] | Block]
    """Runs a number of steps and returns their seconds, or what was measured of them."""
    steps: int
    """Steps of a block."""


def main() -> None:
    """Measures the model and prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("async", "sync", "geo"), default="async", help="mode of training")
    parser.add_argument("--steps", type=AT_LEAST_1, default=8, help="steps of a block")
    parser.add_argument("--dataset-steps", type=AT_LEAST_1, help="steps of a block of the baseline's dataset")
    add_options(parser)
    options = parser.parse_args()
    record = Record("step", options)
    measured = run(*model(options.batches), options, options.dataset_steps)
    show("CTR", options, measured)
    record.append([as_recorded(each) for each in measured], batch=BATCH)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the benchmarks of steps share."""
    parser.add_argument(
        "--pservers", type=PSERVERS_OR_EMBEDDED, default=2, help="processes; 0 is one inside this process"
    )
    parser.add_argument("--channel", choices=CHANNELS, default="stream", help="channel to pserver processes")
    parser.add_argument(
        "--max-step-lag", type=AT_LEAST_0, help="steps an async worker may be ahead; no bound by default"
    )
    parser.add_argument(
        "--rounds", type=AT_LEAST_2, default=26, help="blocks of steps of each program; the first is not timed"
    )
    parser.add_argument("--cached", action="store_true", help="also measure the program with a row cache")
    parser.add_argument(
        "--local-rows", type=AT_LEAST_0, default=1_000_000, help="rows of plain Paddle's table; 0 leaves it out"
    )
    add_program_options(parser)


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the programs and of the baseline."""
    add_execution_options(parser)
    parser.add_argument("--batches", type=AT_LEAST_1, default=NUM_BATCHES, help="number of batches")
    add_baseline(parser)
    add_results(parser)


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `apply_program_options` applies."""
    parser.add_argument("--serial", action="store_true", help="run ops one after the other, on the calling thread")
    parser.add_argument(
        "--mkl-avx2", action="store_true", help="use MKL's AVX2 kernels, which it does not choose on AMD"
    )


def model(num_batches: int) -> tuple[str, list[Feed], Loss]:
    """Returns the click model: its name for the baseline, its batches and its loss."""
    return "ctr", list(batches(num_batches)), click_loss


def run(
    baseline_model: str, feeds: list[Feed], loss_of: Loss, options: argparse.Namespace, dataset_steps: int | None = None
) -> list[Round]:
    """Starts pservers, programs and baselines by the options, and returns every round but the first.

    Args:
        baseline_model: Name of the model for the baseline.
        feeds: Batches of the flagged program.
        loss_of: Builds the loss of the model.
        options: Options of the command line.
        dataset_steps: Steps of a block of the baseline with its dataset; None does not measure it.
    """
    os.environ["FLEET_SPARSE_CHANNEL"] = options.channel
    apply_program_options(options)
    with ExitStack() as stack:
        pids: list[int] = []
        if options.pservers:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(options.pservers, root=root, log=subprocess.DEVNULL))
            os.environ.update(pservers.environment())
            pids = [each.process.pid for each in pservers.processes]
        programs = start(options.mode, feeds, loss_of, options.local_rows, options.max_step_lag)
        baselines = {}
        baseline_steps = options.steps if options.peer else None
        for name, feed, steps in (
            (PADDLE, "exe.run", baseline_steps),
            (PADDLE_PULLING, "exe.run, pulling", baseline_steps if baseline_model == "ctr" else None),
            (PADDLE_DATASET, "InMemoryDataset", dataset_steps),
        ):
            if steps:
                job = paddle_steps(baseline_model, servers=2, feed=feed, python=options.peer_python)
                baselines[name] = BaselineSteps(stack.enter_context(job), steps)
        if options.cached:
            baselines[CACHED] = BaselineSteps(stack.enter_context(cached_steps(baseline_model, options)), options.steps)
        measured = measure(programs, options.steps, options.rounds, baselines, pids)
        fleet.stop_worker()
    return measured


@contextmanager
def cached_steps(model: str, options: argparse.Namespace) -> Iterator[Callable[[int], Block]]:
    """Runs a job whose worker caches rows, `benchmarks.cached_step`, as long as the block lasts.

    Args:
        model: Name of the model for the baseline.
        options: Options of the command line.
    """
    arguments = ["benchmarks.cached_step", "--model", model, "--mode", options.mode, "--batches", str(options.batches)]
    arguments += ["--pservers", str(options.pservers)]
    arguments += ["--serial"] * options.serial + ["--mkl-avx2"] * options.mkl_avx2
    with workers([(arguments, {})]) as (process,):
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout

        def answer() -> Any:
            for line in lines:  # Paddle prints others
                if line.startswith("@@"):
                    return json.loads(line[2:])
            raise SystemExit("the worker with a row cache ended")

        def run_steps(num_steps: int) -> Block:
            print(num_steps, file=process.stdin, flush=True)
            return Block(**answer())

        try:
            answer()
            yield run_steps
        finally:
            process.communicate(timeout=_END_S)  # it ends its pservers, which would stay if it were killed


def apply_program_options(options: argparse.Namespace) -> None:
    """Sets how this process and its baselines compute."""
    paddle.set_flags({"FLAGS_new_executor_serial_run": options.serial})
    if options.mkl_avx2:
        os.environ["MKL_DEBUG_CPU_TYPE"] = "5"  # MKL reads it at the first product of matrices; baselines inherit it


def batches(count: int) -> Iterator[Feed]:
    """Yields batches of the click model."""
    rng, ranks_of = np.random.default_rng(0), zipf.sampler()
    for _ in range(count):
        ranks = ranks_of(rng, (BATCH, NUM_FIELDS))
        yield {
            "ids": 1 + ranks * NUM_FIELDS + np.arange(NUM_FIELDS),  # the baseline's dataset leaves out id 0
            "dense": rng.random((BATCH, NUM_DENSE), np.float32),
            "label": (rng.random((BATCH, 1)) < 0.3).astype(np.float32),
        }


def start(
    mode: str,
    feeds: list[Feed],
    loss_of: Loss,
    local_rows: int,
    max_step_lag: int | None = None,
    *,
    max_row_drift: float | None = None,
) -> list[Program]:
    """Builds all programs of the model `loss_of`."""
    fleet_sparse.install()
    paddle.enable_static()
    fleet.init()
    executor = paddle.static.Executor(paddle.CPUPlace())
    builds: list[tuple[str, Callable[[], Any], list[Feed], Callable[[], Any]]] = [
        (OURS, partial(flagged, mode, loss_of, max_step_lag, max_row_drift), feeds, nullcontext),
        (FLOOR, partial(floor, loss_of), [with_rows(feed) for feed in feeds], nullcontext),
    ]
    if local_rows:
        local_feeds = [{**feed, "ids": feed["ids"] % local_rows} for feed in feeds]
        build_local = partial(local, local_rows, loss_of)
        builds += [(LOCAL, build_local, local_feeds, nullcontext), (LOCAL_SPARSE, build_local, local_feeds, OldIrGuard)]
    programs = []
    for name, build, of_build, ir in builds:
        with ir():
            program, startup = paddle.static.Program(), paddle.static.Program()
            with paddle.static.program_guard(program, startup):
                loss = build()
            executor.run(startup)
        programs.append(Program(name, program, loss, of_build, ir))
    fleet.init_worker()
    return [programs[0], programs[0]._replace(name=AHEAD, looks_ahead=True), *programs[1:]]


def measure(
    programs: Sequence[Program],
    steps: int,
    rounds: int,
    baselines: Mapping[str, BaselineSteps],
    pids: Sequence[int],
) -> list[Round]:
    """Returns the blocks of every round but the first.

    Args:
        programs: Programs of this process; pushes of the first one create its rows.
        steps: Steps of a block of theirs.
        rounds: Number of rounds.
        baselines: Baselines in other processes, by name.
        pids: Process ids of the pservers.
    """
    measured: list[Round] = []
    block(programs[0], programs[0].feeds, pids)  # its rows are there from now on
    for each in baselines.values():
        each.run(len(programs[0].feeds))
    for number in range(rounds):
        blocks: dict[str, Callable[[], Block]] = {
            each.name: partial(block, each, turn(each.feeds, number, steps), pids) for each in programs
        }
        blocks |= {name: partial(baseline_block, each) for name, each in baselines.items()}
        measured.append(interleaved(blocks, number))
    return measured[1:]


def turn(feeds: Sequence[Feed], number: int, steps: int) -> list[Feed]:
    """Returns the batches of a block: those after the previous block's, in a cycle."""
    return [feeds[index % len(feeds)] for index in range(number * steps, (number + 1) * steps)]


def block(program: Program, feeds: Iterable[Feed], pids: Sequence[int]) -> Block:
    """Runs a block of steps of a program."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    seconds = []
    if program.looks_ahead:
        feeds = fleet_sparse.look_ahead(feeds, program.program)
    before = cpu_seconds([os.getpid()]), cpu_seconds(pids)
    with program.ir():
        begun_at = time.perf_counter()
        for feed in feeds:  # reading the loader is a part of the step
            executor.run(program.program, feed=feed, fetch_list=[program.loss])
            ended_at = time.perf_counter()
            seconds.append(ended_at - begun_at)
            begun_at = ended_at
    return Block(seconds, cpu_seconds([os.getpid()]) - before[0], cpu_seconds(pids) - before[1])


def baseline_block(baseline: BaselineSteps) -> Block:
    """Runs a block of steps of a baseline."""
    found = baseline.run(baseline.steps)
    return found if isinstance(found, Block) else Block(found)


def as_recorded(of_round: Round) -> dict[str, dict[str, Any]]:
    """Returns a round without the quantities that were not measured."""
    return {
        name: {key: value for key, value in each._asdict().items() if value is not None}
        for name, each in of_round.items()
    }


def show(model: str, options: argparse.Namespace, measured: Sequence[Round]) -> None:
    """Prints a table of medians, quartiles, ratios to the floor, examples and CPU time."""
    where = f"{options.pservers or 'embedded'} pserver(s), {options.channel}, OMP {os.environ['OMP_NUM_THREADS']}"
    table = Table(title=f"{model} step, {options.mode}, 1 worker, {where}")
    for heading in (
        "program",
        "median ms",
        "quartiles ms",
        "over the floor",
        "examples/s",
        "CPU ms, worker + pservers",
        "over the floor, ms",
    ):
        table.add_column(heading, justify="right")
    times = {name: np.concatenate([each[name].seconds for each in measured]) for name in measured[0]}
    for name, seconds in times.items():
        low, middle, high = np.percentile(seconds, [25, 50, 75]).tolist()
        quartiles = f"{low * 1e3:.2f} - {high * 1e3:.2f}"
        over_floor = np.median([np.median(each[name].seconds) / np.median(each[FLOOR].seconds) for each in measured])
        rates = f"{over_floor:.3f}", f"{BATCH / middle:,.0f}"
        table.add_row(name, f"{middle * 1e3:.2f}", quartiles, *rates, *cpu_cells(measured, name))
    Console(width=120).print(table)


def cpu_cells(measured: Sequence[Round], name: str) -> tuple[str, str]:
    """Returns the CPU ms of a step, worker + pservers, and the same less the floor's; empty for a baseline."""
    if measured[0][name].worker_cpu_s is None:
        return "", ""
    ours, base = (np.array([cpu_ms(each[program]) for each in measured]) for program in (name, FLOOR))
    cells = (" + ".join(f"{part:.1f}" for part in np.median(each, axis=0)) for each in (ours, ours - base))
    return next(cells), "" if name == FLOOR else next(cells)


def cpu_ms(of_program: Block) -> tuple[float, float]:
    """Returns the CPU ms of a step: of the worker, and of all pservers."""
    assert of_program.worker_cpu_s is not None
    assert of_program.pservers_cpu_s is not None
    num_steps = len(of_program.seconds)
    return 1e3 * of_program.worker_cpu_s / num_steps, 1e3 * of_program.pservers_cpu_s / num_steps


def flagged(mode: str, loss_of: Loss, max_step_lag: int | None = None, max_row_drift: float | None = None) -> Any:
    """Builds the user's program, minimized by fleet; returns its loss."""
    ids = paddle.static.data("ids", [-1, NUM_FIELDS], "int64")
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = paddle.static.nn.embedding(ids, [10**9, DIM], is_sparse=True, is_distributed=True, param_attr=attr)
    loss = loss_of(rows)
    strategy = fleet_sparse.PserverStrategy(max_step_lag=max_step_lag, max_row_drift=max_row_drift)
    strategy.a_sync = mode != "sync"
    if mode == "geo":
        strategy.a_sync_configs = {"k_steps": 10}
    fleet.distributed_optimizer(paddle.optimizer.Adagrad(LEARNING_RATE), strategy).minimize(loss)
    return loss


def floor(loss_of: Loss) -> Any:
    """Builds the same program with its rows and positions fed, and their gradient computed; returns its loss."""
    rows = paddle.static.data("rows", [-1, DIM], "float32")
    rows.stop_gradient = False
    positions = paddle.static.data("positions", [-1, NUM_FIELDS], "int64")
    loss = loss_of(_C_ops.embedding(positions, rows, -1, False))
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    pairs = paddle.base.backward.append_backward(loss, parameter_list=[*parameters, rows])
    dense = [(parameter, grad) for parameter, grad in pairs if not parameter.is_same(rows)]
    if dense:
        paddle.optimizer.Adagrad(LEARNING_RATE).apply_gradients(dense)
    return loss


def local(num_rows: int, loss_of: Loss) -> Any:
    """Builds the same program with a parameter as its table, trained by Paddle; returns its loss."""
    ids = paddle.static.data("ids", [-1, NUM_FIELDS], "int64")
    attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    table = paddle.static.create_parameter([num_rows, DIM], "float32", attr=attr)
    loss = loss_of(paddle.nn.functional.embedding(ids, table, sparse=True))
    paddle.optimizer.Adagrad(LEARNING_RATE).minimize(loss)
    return loss


def click_loss(rows: Any) -> Any:
    """Returns the loss of an MLP over rows and dense values."""
    return mlp_loss(paddle.reshape(rows, [-1, NUM_FIELDS * DIM]))


def mlp_loss(rows: Any) -> Any:
    """Returns the loss of an MLP over the rows of each example, joined, and dense values."""
    dense = paddle.static.data("dense", [-1, NUM_DENSE], "float32")
    label = paddle.static.data("label", [-1, 1], "float32")
    hidden = paddle.concat([rows, dense], axis=1)
    for width in HIDDEN:
        hidden = paddle.nn.functional.relu(paddle.nn.Linear(int(hidden.shape[-1]), width)(hidden))
    logit = paddle.nn.Linear(HIDDEN[-1], 1)(hidden)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


def with_rows(feed: Feed) -> Feed:
    """Returns the floor's batch with the same work as `feed`."""
    unique, positions = np.unique(feed["ids"], return_inverse=True)
    rows = np.full((len(unique), DIM), 0.01, np.float32)
    others = {name: array for name, array in feed.items() if name != "ids"}
    return {**others, "rows": rows, "positions": positions.reshape(BATCH, -1)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
