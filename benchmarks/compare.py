"""Are steps slower than at another commit of this repository?

`python -m benchmarks compare --against d2badd9 step lookup` from the root of a checkout. The other commit is
checked out in a temporary directory. Both sides train the same model from the same ids, each with a worker and pservers
of its own, which use the API of users only (`benchmarks/compare_job.py`). All rows exist before anything is timed.
Blocks of steps are interleaved, and each round the other side begins. The ratios of step time, CPU of the worker and
CPU of the pservers are taken within each round.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.baselines import BaselineProcess
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.measures import against
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS
from benchmarks.processes import NO_STANDBY, with_children
from benchmarks.record import RESULTS, ROOT, Record, git

MODELS = ("step", "lookup")
HOST = "127.0.0.1"
PARTS = {"step": "seconds", "worker CPU": "worker_cpu_s", "pservers CPU": "pservers_cpu_s"}


class Job(NamedTuple):
    """The running processes of one side."""

    trainer: BaselineProcess
    worker: int
    """Process id, as the next ones."""
    pservers: Sequence[int]


def main() -> None:
    """Measures the models and prints the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="step or lookup; both by default")
    parser.add_argument("--against", required=True, metavar="COMMIT", help="commit of this repository")
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="mode of training")
    parser.add_argument("--durability", choices=("none",), help="of this side's pservers, if not the default")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes on each side")
    parser.add_argument("--steps", type=AT_LEAST_1, default=20, help="steps of a block")
    parser.add_argument("--batches", type=AT_LEAST_1, default=100, help="batches that are fed again and again")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=41, help="blocks of each side; the first is not timed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results file")
    options = parser.parse_args()
    try:
        options.against = git("rev-parse", "--short=7", f"{options.against}^{{commit}}")
    except subprocess.CalledProcessError:
        parser.error(f"argument --against: {options.against!r} should be a commit of this repository")
    models = vars(options).pop("models") or MODELS
    if unknown := set(models) - set(MODELS):
        parser.error(f"argument MODEL: {', '.join(sorted(unknown))} should be {' or '.join(MODELS)}")
    with worktree(options.against) as other:
        for model in models:
            record = Record("compare", argparse.Namespace(**vars(options), model=model))
            rounds = measure(model, {"this": ROOT, "against": other}, options)
            record.append(rounds)
            for what, part in PARTS.items():
                low, middle, high = np.percentile(against(part)({"rounds": rounds}).of_rounds, [25, 50, 75])
                ratio = f"{middle:.3f} ({low:.3f} - {high:.3f})"
                print(f"{model}, {what} over that of commit {options.against}: {ratio}", flush=True)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Checks a commit out in a temporary directory for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="fleet_sparse-") as directory:
        tree = Path(directory).resolve() / "tree"
        git("worktree", "add", "--detach", "--force", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def measure(model: str, trees: Mapping[str, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what a block of each side took, by round."""
    with ExitStack() as stack:
        jobs = {side: stack.enter_context(job(tree, model, options)) for side, tree in trees.items()}
        for each in jobs.values():
            block(each, options.batches)  # the rows are there from now on
        blocks = {side: partial(block, each, options.steps) for side, each in jobs.items()}
        return [interleaved(blocks, number) for number in range(options.rounds)][1:]


def block(of: Job, num_steps: int) -> dict[str, Any]:
    """Returns the seconds of steps, and the CPU seconds of worker and pservers a step."""
    before = cpu_seconds([of.worker]), cpu_seconds(of.pservers)
    seconds = of.trainer.ask(num_steps)
    cpu = cpu_seconds([of.worker]) - before[0], cpu_seconds(of.pservers) - before[1]
    return {"seconds": seconds, "worker_cpu_s": cpu[0] / num_steps, "pservers_cpu_s": cpu[1] / num_steps}


@contextmanager
def job(tree: Path, model: str, options: argparse.Namespace) -> Iterator[Job]:
    """Runs pservers and one worker of a checkout for as long as the block lasts."""
    script = str(Path(__file__).with_name("compare_job.py"))
    # -P keeps the script's directory off the path: its modules have the names of others.
    command = [
        sys.executable,
        "-P",
        script,
        "--model",
        model,
        "--mode",
        options.mode,
        "--batches",
        str(options.batches),
    ]
    ports = free_ports(options.pservers)
    shared = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(f"{HOST}:{port}" for port in ports),
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ENDPOINTS": f"{HOST}:0",
        "PADDLE_TRAINER_ID": "0",
        "POD_IP": HOST,
        "FLEET_SPARSE_CONNECT_S": "600",  # a fresh checkout compiles its kernels first
        **known_settings(tree, NO_STANDBY),
    }
    if tree == ROOT and options.durability:
        shared["FLEET_SPARSE_DURABILITY"] = options.durability
    roles = [{"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": str(port)} for port in ports]
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        log = stack.enter_context((Path(root) / "log").open("w+", errors="replace"))

        def start(role: Mapping[str, str], pipe: int) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command, env={**shared, **role}, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=root
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        pservers = [start(role, subprocess.DEVNULL) for role in roles]
        worker = start({"TRAINING_ROLE": "TRAINER", "PADDLE_PORT": "0"}, subprocess.PIPE)
        trainer = BaselineProcess(worker, f"the worker of {tree}", log)
        if not Path(imported := trainer.told()).is_relative_to(tree):
            raise SystemExit(f"{imported}: is fleet_sparse of the worker, should be that of {tree}")
        yield Job(trainer, worker.pid, with_children([each.pid for each in pservers]))


def known_settings(tree: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that a checkout knows: an older one refuses others."""
    source = (tree / "fleet_sparse" / "settings.py").read_text("utf-8")
    return {
        name: value
        for name, value in settings.items()
        if f"    {name.removeprefix('FLEET_SPARSE_').lower()}:" in source
    }


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
