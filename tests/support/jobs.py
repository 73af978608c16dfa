"""Starts user scripts as users do, and returns their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fleet_sparse.local_pservers import LocalPservers, child_environment, local_pservers

SCRIPTS = Path(__file__).parent.parent / "e2e" / "scripts"
TIMEOUT_S = 110


class Job(NamedTuple):
    """A fleetrun that ended, with its logs by file name."""

    output: str
    logs: dict[str, str]


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a child: that of this process, with this checkout on the path, and `variables`.

    Pservers have no standby, which takes a core for a second: a test in which they die gives them one. A `print` is one
    write: an unbuffered one is a write for each of its parts, and log lines of other threads come between these.
    """
    defaults = {"OMP_NUM_THREADS": "1", "FLEET_SPARSE_STANDBY": "0", "PYTHONUNBUFFERED": ""}
    return child_environment(**{**defaults, **variables})


def fleetrun(
    script: str | Path,
    directory: Path,
    *arguments: str,
    num_servers: int,
    num_workers: int,
    timeout_s: float = TIMEOUT_S,
) -> Job:
    """Runs a script of `e2e/scripts`, or another one by its path, in `directory` until it ends."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "log"]
    command += ["--server_num", str(num_servers), "--worker_num", str(num_workers), str(SCRIPTS / script), *arguments]
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=timeout_s)
        finally:
            # A signal ends fleetrun but not its children, which are in its process group.
            with suppress(ProcessLookupError):  # all of them ended by themselves
                os.killpg(launcher.pid, signal.SIGKILL)
    return Job(output, {path.name: path.read_text() for path in sorted((directory / "log").iterdir())})


def python(script: str, directory: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a script of `e2e/scripts` in `directory` without fleetrun."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script)],
        cwd=directory,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def job(
    script: str,
    directory: Path,
    num_workers: int = 2,
    *,
    num_servers: int = 2,
    load: str | None = None,
    of_pservers: dict[str, str] | None = None,
    **variables: str,
) -> Iterator[tuple[LocalPservers, list[subprocess.Popen[str]]]]:
    """Pservers of a job and its workers, which run a script of `e2e/scripts`; all are killed at the end."""
    with (
        local_pservers(num_servers, root=directory, load_dirname=load, environment=of_pservers) as pservers,
        ExitStack() as stack,
    ):
        workers = []
        for index in range(num_workers):
            environment = {**pservers.environment(index, num_workers), **variables}
            workers.append(stack.enter_context(python(script, directory, **environment)))
            stack.callback(workers[-1].kill)
        yield pservers, workers


def outputs_of(script: str, directory: Path, num_workers: int = 2, **options: Any) -> list[str]:
    """Runs a `job` until its workers end; returns their outputs and checks exit codes of 0."""
    with job(script, directory, num_workers, **options) as (_, workers):
        outputs = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
    assert {worker.returncode for worker in workers} == {0}, outputs
    return outputs


def output_of(script: str, directory: Path, **variables: str) -> str:
    """Runs a script of `e2e/scripts` without fleetrun; returns its output and checks exit code 0."""
    with python(script, directory, **variables) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return output


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Reads the process's output until a line has `pattern`."""
    assert process.stdout is not None
    deadline = time.monotonic() + TIMEOUT_S
    read = []
    for line in process.stdout:
        read.append(line)
        found = re.search(pattern, line)
        if found:
            return found
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"no line with {pattern!r} in:\n{''.join(read)}")


def numbers(pattern: str, text: str) -> list[float]:
    """Returns the number after each occurrence of `pattern`."""
    return [float(number) for number in re.findall(pattern + r" ([-+.\de]+)", text)]
