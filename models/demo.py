"""Shows on real data that pservers train what plain Paddle trains, what goes over the wire, and that saves are exact.

DeepFM on the flights out of New York, four times: in plain Paddle, with a pserver inside the process, under fleetrun
with 2 pservers and 2 workers, and once more on pservers that are started again from what the others saved, where it is
only evaluated. `scripts/demo` runs this.
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
"""Results, logs and snapshot of the newest demo."""

DIM = 8
FLOATS_AN_ID = DIM + 1  # DeepFM has a row of V and one weight w for each id
NUM_PSERVERS = 2
NUM_WORKERS = 2

RUN_LIMIT_S = 180
STOP_LIMIT_S = 10
EMBEDDED_TOLERANCE = 0.0005
"""Of the test AUC against plain Paddle's: one process, the same initial rows, the same batches in the same order."""
DISTRIBUTED_TOLERANCE = 0.01
"""The same for several workers: they take their batches side by side, so rows see fewer of the others' steps."""
RESTORED_TOLERANCE = 1e-9

# fleetrun ends with 0 even when one of its processes failed, so that their logs are read as well.
_FAILURE = re.compile(r"Traceback \(most recent call last\)|\b(ERROR|CRITICAL)\b|FatalError|^terminate called", re.M)


class DemoFailed(Exception):
    """A process failed, or a figure is not what it must be."""


class Result(NamedTuple):
    """What the metrics files of a run's workers say together."""

    title: str
    test_auc: float
    examples_per_s: float
    """Of all workers together."""
    num_steps: int
    """Of all workers together, as are the bytes."""
    bytes_pulled: int
    bytes_pushed: int
    pserver_rows: list[int] | None


def main() -> None:
    """Runs all four and prints one table; ends the process with 1 where something failed."""
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
        f"The pservers started again predict as before: AUC {auc:.12f}. {time.monotonic() - started_s:.0f} s in all.",
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
    """Trains in new processes, in `FOLDER`; raises `DemoFailed` unless all of them did what they should."""
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
    """Runs a command with its output in `log`; stops it, and what it started, after `RUN_LIMIT_S`."""
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
    """Ends a process that leads a group, and the group: fleetrun dies of a signal and leaves behind what it started."""
    with suppress(ProcessLookupError):  # all of them ended by themselves
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(name: str, title: str, num_workers: int) -> Result:
    # A worker writes its file as its last act, so that a missing one means that it did not get there.
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
                f"they should not be more than {tolerance} apart"
            )
        if result.pserver_rows is not None and sum(result.pserver_rows) != 2 * num_ids:
            raise DemoFailed(
                f"{result.title}: {sum(result.pserver_rows):,} rows on the pservers, "
                f"should be {2 * num_ids:,}: two tables with a row for each id that was trained"
            )
    if not abs(restored.test_auc - trained.test_auc) <= RESTORED_TOLERANCE:
        raise DemoFailed(f"AUC {trained.test_auc!r} before saving, {restored.test_auc!r} after starting again")


def _table(results: Sequence[Result], num_ids: int) -> Table:
    whole_bytes = num_ids * FLOATS_AN_ID * 4
    table = Table(
        title=f"DeepFM on flights: {num_ids:,} distinct ids trained, {whole_bytes / 1e6:.1f} MB of rows",
        caption="%: of full synchronisation, which sends all rows each way every step",
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
