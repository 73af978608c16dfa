"""Starts user scripts as users do, and says what came of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent.parent / "e2e" / "scripts"
ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 110


class Job(NamedTuple):
    """A fleetrun that ended; its logs by file name."""

    output: str
    logs: dict[str, str]


def environment(**variables: str) -> dict[str, str]:
    """This process's, with this checkout importable, and `variables`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def fleetrun(script: str, directory: Path, *, num_servers: int, num_workers: int) -> Job:
    """Runs a script of `e2e/scripts` in `directory` until it ends."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", "log"]
    command += ["--server_num", str(num_servers), "--worker_num", str(num_workers), str(SCRIPTS / script)]
    ended = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    logs = {path.name: path.read_text() for path in sorted((directory / "log").iterdir())}
    return Job(ended.stdout + ended.stderr, logs)


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
    """The number after each occurrence of `pattern`."""
    return [float(number) for number in re.findall(pattern + r" ([-+.\de]+)", text)]
