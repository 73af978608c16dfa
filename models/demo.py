"""Shows on real data that pservers train what plain Paddle trains, how many bytes travel, and that saves are exact.

Runs DeepFM on the flights out of New York four times: in plain Paddle, with a pserver inside the process, under
fleetrun with 2 pservers and 2 workers, and for evaluation on pservers that load the snapshot of that run.
`scripts/demo` runs this module.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from . import flights

FOLDER = Path("output/demo")
"""Directory of results, logs and snapshot."""

DIM = 8
FLOATS_PER_ID = DIM + 1  # DeepFM has a row of V and one weight w for each id
NUM_PSERVERS = 2
NUM_WORKERS = 2

RUN_LIMIT_S = 180
STOP_LIMIT_S = 10
EMBEDDED_TOLERANCE = 0.0005
"""Largest difference of the test AUC to plain Paddle's, with one process, equal first rows and equal batches."""
DISTRIBUTED_TOLERANCE = 0.01
"""The same with several workers, which train concurrently, so that a step misses some updates of the others."""
RESTORED_TOLERANCE = 1e-9

# fleetrun exits with 0 even if one of its processes failed; therefore their logs are searched.
_FAILURE = re.compile(r"Traceback \(most recent call last\)|\b(ERROR|CRITICAL)\b|FatalError|^terminate called", re.M)


class DemoFailed(Exception):
    """A process failed, or a result is wrong."""


class Result(NamedTuple):
    """Metrics of a run, over all of its workers."""

    title: str
    test_auc: float
    examples_per_s: float
    """Sum over all workers; so are the next three."""
    num_steps: int
    bytes_pulled: int
    bytes_pushed: int
    pserver_rows: list[int] | None


def main() -> None:
    """Runs all four and prints one table; exits with 1 if something failed."""
    console = Console()
    started_s = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    try:
        results = _run_all(console)
        num_ids = _num_trained_ids()
        console.print(_table(results, num_ids))
        _check(results, num_ids)
    except DemoFailed as failure:
        console.print(f"demo failed: {failure}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    auc = results[-1].test_auc
    console.print(
        f"The restarted pservers predict as before: AUC {auc:.12f}. Total time {time.monotonic() - started_s:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )


def _run_all(console: Console) -> list[Result]:
    local = [sys.executable]
    several = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "logs/{name}"]  # fleetrun
    several += ["--server_num", str(NUM_PSERVERS), "--worker_num", str(NUM_WORKERS)]
    together = f"{NUM_PSERVERS} pservers, {NUM_WORKERS} workers"
    again = ["--epochs", "0", "--load", "model"]
    return [
        _run(console, "plain", "plain Paddle", local, ["--plain", "--initial-rows", "plugin"], 1),
        _run(console, "embedded", "embedded pserver", local, [], 1),
        _run(console, "distributed", together, several, ["--save", "model"], NUM_WORKERS),
        _run(console, "restored", "started again", several, again, NUM_WORKERS),
    ]


def _run(
    console: Console, name: str, title: str, launcher: Sequence[str], options: Sequence[str], num_workers: int
) -> Result:
    """Trains in new processes, in `FOLDER`; raises `DemoFailed` if one of them failed."""
    command = [part.format(name=name) for part in launcher]
    command += [str(Path(__file__).with_name("train.py")), "--model", "deepfm", "--data", "flights", "--dim", str(DIM)]
    command += ["--metrics", f"{name}.json", *options]
    started_s = time.monotonic()
    with console.status(f"DeepFM on flights: {title}"):
        exit_code = _run_logged(command, FOLDER / f"{name}.log")
    if exit_code != 0:
        raise DemoFailed(f"{title}: exit code {exit_code}; {_last_lines(FOLDER / f'{name}.log')}")
    for log in (FOLDER / f"{name}.log", *sorted((FOLDER / "logs" / name).glob("*log.*"))):
        if _FAILURE.search(log.read_text(errors="replace")):
            raise DemoFailed(f"{title}: {_last_lines(log)}")
    result = _result(name, title, num_workers)
    took_s = time.monotonic() - started_s
    console.print(f"{title}: test AUC {result.test_auc:.4f}, {took_s:.0f} s", highlight=False, soft_wrap=True)
    return result


def _run_logged(command: Sequence[str], log: Path) -> int:
    """Runs a command with its output in `log`; stops it and its children after `RUN_LIMIT_S`."""
    ours = ("PADDLE_", "TRAINING_ROLE", "POD_IP")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=FOLDER, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"no end after {RUN_LIMIT_S} s; {_last_lines(log)}") from None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its process group: a fleetrun that is killed does not end its children."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(name: str, title: str, num_workers: int) -> Result:
    # A worker writes its file at its end: a missing file means that the worker failed.
    paths = [FOLDER / (f"{name}.worker-{i}.json" if i else f"{name}.json") for i in range(num_workers)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise DemoFailed(f"{title}: no {', '.join(missing)}; see {FOLDER / 'logs' / name}")
    workers = [json.loads(path.read_text()) for path in paths]
    return Result(
        title=title,
        test_auc=workers[0]["test_auc"],
        examples_per_s=sum(worker["examples_per_s"] for worker in workers),
        num_steps=sum(worker["num_steps"] for worker in workers),
        bytes_pulled=sum(worker["bytes_pulled"] for worker in workers),
        bytes_pushed=sum(worker["bytes_pushed"] for worker in workers),
        pserver_rows=workers[0]["pserver_rows"],
    )


def _num_trained_ids() -> int:
    data = flights.load()
    return np.unique(data.ids[~data.is_test]).size


def _check(results: Sequence[Result], num_ids: int) -> None:
    plain, embedded, trained, restored = results
    for result, tolerance in (
        (embedded, EMBEDDED_TOLERANCE),
        (trained, DISTRIBUTED_TOLERANCE),
        (restored, DISTRIBUTED_TOLERANCE),
    ):
        if not abs(result.test_auc - plain.test_auc) <= tolerance:
            raise DemoFailed(
                f"{result.title}: test AUC {result.test_auc:.6f}, in plain Paddle {plain.test_auc:.6f}; "
                f"the difference should be at most {tolerance}"
            )
        if result.pserver_rows is not None and sum(result.pserver_rows) != 2 * num_ids:
            raise DemoFailed(
                f"{result.title}: {sum(result.pserver_rows):,} rows on the pservers, "
                f"should be {2 * num_ids:,}: two tables with a row for each trained id"
            )
    if not abs(restored.test_auc - trained.test_auc) <= RESTORED_TOLERANCE:
        raise DemoFailed(f"AUC {trained.test_auc!r} before saving, {restored.test_auc!r} after starting again")


def _table(results: Sequence[Result], num_ids: int) -> Table:
    whole_bytes = num_ids * FLOATS_PER_ID * 4
    table = Table(
        title=f"DeepFM on flights: {num_ids:,} distinct ids trained, each with a row in two tables, "
        f"{whole_bytes / 1e6:.1f} MB of rows",
        caption="%: of full synchronisation, which sends all rows both ways in each step",
    )
    table.add_column("run", no_wrap=True)
    for name in ("test AUC", "examples/s", "rows per\npserver", "pulled\na step", "pushed\na step"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.title,
            f"{result.test_auc:.6f}",
            f"{result.examples_per_s:,.0f}" if result.num_steps else "-",
            "\n".join(f"{rows:,}" for rows in result.pserver_rows) if result.pserver_rows else "-",
            _per_step(result.bytes_pulled, result, whole_bytes),
            _per_step(result.bytes_pushed, result, whole_bytes),
        )
    return table


def _per_step(num_bytes: int, result: Result, whole_bytes: int) -> str:
    if not result.num_steps or result.pserver_rows is None:
        return "-"
    a_step = num_bytes / result.num_steps
    return f"{a_step / 1e3:,.0f} kB\n{a_step / whole_bytes:.1%}"


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-20:]
    return "\n".join([f"{log} ends with:", *lines])


if __name__ == "__main__":
    main()
