"""Other parameter servers to measure beside ours. Each runs in a venv of its own, made when it is asked for."""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The versions that run together: a newer numpy or an older protobuf does not.
PADDLE_PACKAGES = ("paddlepaddle==2.6.2", "numpy==1.26.4", "protobuf==4.25.8", "setuptools==65.5.0")
PADDLE_VENV = Path(__file__).resolve().parents[2] / ".venv-paddle-2.6"


def paddle_python(directory: Path = PADDLE_VENV) -> Path:
    """The interpreter of a venv with PaddlePaddle 2.6.2, which still has a parameter server; made if it is not there.

    It needs some GB of disk, and minutes the first time. The interpreter that runs this one should be Python 3.11.
    """
    python, installed = directory / "bin" / "python", directory / "installed"
    packages = "\n".join(PADDLE_PACKAGES)
    if not installed.exists() or installed.read_text() != packages:
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PADDLE_PACKAGES], check=True)
        installed.write_text(packages)
    return python


def measure_paddle(*, rows: int, dim: int, servers: int, shards: int, python: Path | None = None) -> dict[str, Any]:
    """What saving and loading takes there, as `paddle_ps.py` prints it.

    Args:
        rows: That are inserted, saved and loaded.
        dim: Of a row, trained with Adagrad.
        servers: Processes that hold them.
        shards: Files that the table is saved as.
        python: Interpreter with that Paddle; that of `paddle_python` when left out.
    """
    command = [str(python or paddle_python()), str(Path(__file__).parent / "paddle_ps.py")]
    command += ["--rows", str(rows), "--dim", str(dim), "--servers", str(servers), "--shards", str(shards)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


@contextmanager
def paddle_steps(model: str, *, servers: int, python: Path | None = None) -> Iterator[Callable[[int], list[float]]]:
    """Its servers and a trainer run as long as the block lasts; what is yielded runs steps and tells their seconds.

    Args:
        model: `ctr` or `lookup`, as `paddle_step.py` has them.
        servers: Processes.
        python: As in `measure_paddle`.
    """
    command = [str(python or paddle_python()), str(Path(__file__).parent / "paddle_step.py")]
    with subprocess.Popen(
        [*command, "--model", model, "--servers", str(servers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = process.stdout

        def run(num_steps: int) -> list[float]:
            print(num_steps, file=process.stdin, flush=True)
            line = next((line for line in told if line.startswith("@@")), None)
            if line is None:
                raise SystemExit("PaddlePaddle 2.6's trainer ended before it was asked to")
            seconds: list[float] = json.loads(line.removeprefix("@@"))
            return seconds

        try:
            yield run
        finally:
            process.stdin.close()  # which ends its trainer, and so all of it


@contextmanager
def paddle_server(*, python: Path | None = None) -> Iterator[int]:
    """One server that has no rows, once it listens; its process id.

    Args:
        python: As in `measure_paddle`.
    """
    command = [str(python or paddle_python()), str(Path(__file__).parent / "paddle_step.py")]
    with subprocess.Popen(
        [*command, "--model", "lookup", "--servers", "1", "--idle"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("@@")), None)
        if line is None:
            raise SystemExit("PaddlePaddle 2.6's server did not start")
        try:
            yield int(json.loads(line.removeprefix("@@"))[0])
        finally:
            process.stdin.close()  # which ends it
