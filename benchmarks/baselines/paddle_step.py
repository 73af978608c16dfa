"""PaddlePaddle 2.6's own parameter server: steps of a model. Runs in the venv of `baselines.PADDLE`.

    echo 20 | .venv-paddle-2.6/bin/python benchmarks/baselines/paddle_step.py --model lookup

Servers and one trainer are processes on this machine, async. For each line of its standard input, a number of steps, it
writes one line: `@@` and their seconds, as JSON. `--feed` is how the trainer gets its batches: each by an `exe.run`,
which leaves the trainer's dense parameters as they are; by one that is followed by pulling them; or all of a line by
one `train_from_dataset` on `--threads` threads: of an `InMemoryDataset` that was loaded before, of one whose loading is
timed, too, or of a `QueueDataset`. Of that only the whole is known, and what is written is the mean of a step, alone.
Such a call takes about 0.11 s more than its steps, 0.1 s of it asleep until the servers have all that was pushed: ask
for many. With `--idle` there is no trainer, and the one line has the process ids of the servers, which end with
standard input, and the seconds from their start until all of them listened. The ids are of the distribution that
`benchmarks.step` has. The first steps, until servers have rows, are part of what it writes.
Dense parameters are trained with SGD: its servers have no Adagrad for them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zipf
from paddle_ps import START_S, configure, end, flush, free_ports, job_environment, wait_until_listening

NUM_FIELDS, NUM_DENSE, BATCH = 26, 13, 512
HIDDEN = (400, 400, 400)
NUM_BATCHES = 100
DATASETS = IN_MEMORY, LOADING, QUEUE = "InMemoryDataset", "InMemoryDataset and its loading", "QueueDataset"
FEEDS = EXE_RUN, PULLING, *_ = "exe.run", "exe.run, pulling", *DATASETS

Feed = dict[str, Any]
Run = Callable[[list[int]], list[float]]
"""Trains the batches with these numbers; returns the seconds of each, or their mean."""


def parsed() -> argparse.Namespace:
    """Returns the options, the same for all processes of a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("ctr", "lookup"), required=True)
    parser.add_argument("--feed", choices=FEEDS, default=EXE_RUN, help="what hands the trainer its batches")
    parser.add_argument("--threads", type=int, default=1, help="threads that train, with a dataset")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8, help="of the sparse table on a server")
    parser.add_argument("--idle", action="store_true", help="without a trainer: writes the servers' process ids")
    parser.add_argument("--ports", type=int, nargs="+", help="of the servers; free ones by default")
    parser.add_argument("--reached-at", type=int, nargs="+", help="ports that the trainer connects to, as a proxy's")
    parser.add_argument("--role", choices=("server", "trainer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.threshold, options.rule = 0, "adagrad"  # of `configure`
    return options


def launch(options: argparse.Namespace) -> None:
    """Runs the job until standard input ends."""
    ports = [*free_ports(1), *options.ports] if options.ports else free_ports(options.servers + 1)
    environment = job_environment(ports)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paddle-step-")))
        servers, begun = [], time.perf_counter()
        for index, port in enumerate(ports[1:]):
            log = stack.enter_context((directory / f"server{index}").open("wb"))
            variables = {**environment, "TRAINING_ROLE": "PSERVER", "PADDLE_PORT": str(port)}
            process = subprocess.Popen(
                [*command, "--role", "server"],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
            )
            stack.callback(end, process)
            servers.append(process)
        for process, port in zip(servers, ports[1:], strict=True):
            wait_until_listening(process, port, time.perf_counter() + START_S, directory)
        seconds = time.perf_counter() - begun
        if options.idle:
            print(f"@@{json.dumps([[process.pid for process in servers], seconds])}", flush=True)
            sys.stdin.read()
            return
        known = job_environment([ports[0], *options.reached_at]) if options.reached_at else environment
        variables = {**known, "TRAINING_ROLE": "TRAINER", "PADDLE_PORT": str(ports[0])}
        trainer = subprocess.Popen([*command, "--role", "trainer"], env=variables, cwd=directory)
        stack.callback(end, trainer)
        if trainer.wait():
            raise SystemExit(f"the trainer ended with exit code {trainer.returncode}")


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """Builds the program, minimized by fleet; returns paddle and its loss."""
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    fleet.init(is_collective=False)
    ids = paddle.static.data("ids", [None, 1], "int64", lod_level=1)
    dense = paddle.static.data("dense", [None, NUM_DENSE], "float32")
    label = paddle.static.data("label", [None, 1], "float32")
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = paddle.static.nn.sparse_embedding(input=ids, size=[2, options.dim], param_attr=attr)
    rows = paddle.reshape(rows, [-1, NUM_FIELDS * options.dim])
    if options.model == "ctr":
        hidden = paddle.concat([rows, dense], 1)
        for width in HIDDEN:
            hidden = paddle.static.nn.fc(hidden, width, activation="relu")
        logit = paddle.static.nn.fc(hidden, 1)
    else:  # it cannot be without a dense parameter
        logit = paddle.sum(rows, axis=1, keepdim=True) + paddle.static.nn.fc(dense, 1)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    configure(strategy.sparse_table_configs.add(), options)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), strategy).minimize(loss)
    return paddle, loss


def serve(options: argparse.Namespace) -> None:
    """Runs a server until it is killed."""
    build(options)
    from paddle.distributed import fleet

    fleet.init_server()
    fleet.run_server()


def train(options: argparse.Namespace) -> None:
    """Runs the number of steps that each line names."""
    paddle, loss = build(options)
    from paddle.distributed import fleet

    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    feeds, num_done = list(batches()), 0
    with tempfile.TemporaryDirectory(prefix="paddle-step-") as directory:
        run = (
            by_dataset(executor, loss, feeds, Path(directory), options)
            if options.feed in DATASETS
            else by_executor(executor, loss, feeds, dense_pull() if options.feed == PULLING else lambda: None)
        )
        for line in sys.stdin:
            coming = [number % NUM_BATCHES for number in range(num_done, num_done + int(line))]
            num_done += len(coming)
            seconds = run(coming)
            flush(fleet)
            print(f"\n@@{json.dumps(seconds)}", flush=True)
    fleet.stop_worker()


def batches() -> Iterator[Feed]:
    """Returns batches as in `benchmarks.step`."""
    import numpy as np

    rng, ranks_of = np.random.default_rng(0), zipf.sampler()
    for _ in range(NUM_BATCHES):
        ids = (1 + ranks_of(rng, (BATCH, NUM_FIELDS)) * NUM_FIELDS + np.arange(NUM_FIELDS)).reshape(-1, 1)
        dense = rng.random((BATCH, NUM_DENSE), np.float32)
        yield {"ids": ids, "dense": dense, "label": (rng.random((BATCH, 1)) < 0.3).astype(np.float32)}


def by_executor(executor: Any, loss: Any, feeds: list[Feed], pull: Callable[[], None]) -> Run:
    """Returns a trainer whose step is an `exe.run`, which leaves dense parameters as they are, and `pull`."""
    program = loss.block.program

    def run(numbers: list[int]) -> list[float]:
        seconds = []
        for number in numbers:
            begun = time.perf_counter()
            (value,) = executor.run(program, feed=feeds[number], fetch_list=[loss])
            pull()
            seconds.append(time.perf_counter() - begun)
        check("the loss", value)
        return seconds

    return run


def dense_pull() -> Callable[[], None]:
    """Returns a function that reads the servers' dense parameters. There is no public call for it."""
    from paddle.distributed import fleet
    from paddle.distributed.ps.utils.public import get_the_one_recv_context

    handle = fleet.fleet._runtime_handle
    context = get_the_one_recv_context(handle.context, split_dense_table=False)
    return lambda: handle._pull_all_dense(handle.scopes, handle._send_ctx, context)


def by_dataset(executor: Any, loss: Any, feeds: list[Feed], directory: Path, options: argparse.Namespace) -> Run:
    """Returns a trainer whose steps are one `train_from_dataset`; only their mean is known."""
    import numpy as np
    import paddle

    program, files = loss.block.program, []
    for number, feed in enumerate(feeds):
        file = directory / f"batch{number}"
        file.write_text("".join(lines(feed)))
        files.append(str(file))
    variables = [program.global_block().var(name) for name in feeds[0]]
    is_queue = options.feed == QUEUE
    dataset = paddle.distributed.QueueDataset() if is_queue else paddle.distributed.InMemoryDataset()
    dataset.init(batch_size=BATCH, thread_num=options.threads, use_var=variables, pipe_command="cat")
    last = paddle.static.global_scope().find_var(program.all_parameters()[-1].name)

    def load(num_lines: int) -> None:
        dataset.load_into_memory()
        if dataset.get_memory_data_size() != num_lines:
            raise SystemExit(f"{dataset.get_memory_data_size()} examples are loaded, should be {num_lines}")

    def run(numbers: list[int]) -> list[float]:
        dataset.set_filelist([files[number] for number in numbers])
        if options.feed == IN_MEMORY:
            load(len(numbers) * BATCH)
        before, begun = np.array(last.get_tensor()), time.perf_counter()
        if options.feed == LOADING:
            load(len(numbers) * BATCH)
        executor.train_from_dataset(program, dataset)
        seconds = time.perf_counter() - begun
        if not is_queue:
            dataset.release_memory()
        check("the last parameter", after := np.array(last.get_tensor()))
        if (after == before).all():
            raise SystemExit("the last parameter has not changed: nothing was trained")
        return [seconds / len(numbers)]

    return run


def lines(feed: Feed) -> Iterator[str]:
    """Returns each example as datasets read it: for each variable the number of values, and the values."""
    for ids, dense, label in zip(feed["ids"].reshape(BATCH, -1), feed["dense"], feed["label"], strict=True):
        values = (f"{len(each)} {' '.join(map(str, each.tolist()))}" for each in (ids, dense, label))
        yield " ".join(values) + "\n"


def check(name: str, value: Any) -> None:
    """Ends the trainer if a value is not finite."""
    import numpy as np

    if not np.isfinite(value).all():
        raise SystemExit(f"{name} is {value}")


def main() -> None:
    """Runs the part of a job that `--role` names."""
    options = parsed()
    {"server": serve, "trainer": train, None: launch}[options.role](options)


if __name__ == "__main__":
    main()
