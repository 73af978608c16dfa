"""Baselines. Each runs in processes and a venv of its own, which is made at its first use."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_LAST_CHARACTERS = 2000  # of the output of a process that ended
_MARK = "@@"  # begins what the script's answers; its libraries write other lines


class Venv(NamedTuple):
    """A venv with the packages of a baseline."""

    directory: Path
    packages: tuple[str, ...]
    python_version: tuple[int, int] | None = None
    """Python version that the packages need; None for any."""

    def python(self) -> Path:
        """Returns its interpreter; makes the venv if it does not exist, which takes minutes and some GB of disk.

        Raises:
            SystemExit: The packages need another Python version than this process has.
        """
        if self.python_version not in (None, sys.version_info[:2]):
            here, needed = (".".join(map(str, each)) for each in (sys.version_info[:2], self.python_version or ()))
            raise SystemExit(
                f"{self.packages[0]}: Python is {here}, should be {needed}. Run the benchmark with that one, or name "
                "an interpreter that has the package with --baseline-python"
            )
        python, installed = self.directory / "bin" / "python", self.directory / "installed"
        packages = "\n".join(self.packages)
        if not installed.exists() or installed.read_text() != packages:
            venv.create(self.directory, with_pip=True, clear=True)
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *self.packages], check=True
            )
            installed.write_text(packages)
        return python


# Its last line that has a parameter server. A newer numpy or an older protobuf does not run with it.
PADDLE = Venv(
    _ROOT / ".venv-paddle-2.6",
    ("paddlepaddle==2.6.2", "numpy==1.26.4", "protobuf==4.25.8", "setuptools==65.5.0"),
    python_version=(3, 11),
)
# Where the index that pip is set to has builds with CUDA it takes one, of several GB; an interpreter with a build for
# CPUs is measured instead where it is named.
TORCH = Venv(_ROOT / ".venv-torch", ("torch==2.13.0", "numpy==2.4.6"))


class BaselineProcess:
    """A process that answers with lines of JSON, and ends with its standard input.

    Args:
        process: Process with text pipes to and from it.
        name: Name in messages.
        log: File of its standard error, if it is kept.
    """

    def __init__(self, process: subprocess.Popen[str], name: str, log: IO[str] | None = None) -> None:
        self._process = process
        self._name = name
        self._log = log

    def ask(self, what: object) -> Any:
        """Sends a line and returns the answer."""
        print(what, file=self._process.stdin, flush=True)
        return self.told()

    def told(self) -> Any:
        """Returns its next answer."""
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith(_MARK)), None)
        if line is None:
            raise SystemExit(f"{self._name} ended before it was asked to{self._last_words()}")
        return json.loads(line.removeprefix(_MARK))

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return f":\n{self._log.read()[-_LAST_CHARACTERS:]}"


@contextmanager
def baseline_process(name: str, python: Path, script: str, *arguments: str) -> Iterator[BaselineProcess]:
    """Runs a script of this directory in a process that ends with the block.

    Args:
        name: Name in messages.
        python: Interpreter of the script.
        script: File name.
        arguments: Arguments of its command line.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            [str(python), str(_HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        try:
            yield BaselineProcess(process, name, log)
        finally:
            process.stdin.close()


def measure_paddle(*, rows: int, dim: int, servers: int, shards: int, python: Path | None = None) -> dict[str, Any]:
    """Returns the times of a save and a load in PaddlePaddle 2.6, as `paddle_ps.py` prints them.

    Args:
        rows: Number of rows to insert, save and load.
        dim: Dim of a row, trained with Adagrad.
        servers: Number of server processes.
        shards: Number of files of the saved table.
        python: Interpreter with that Paddle; by default that of `PADDLE`.

    Raises:
        SystemExit: It failed; the message ends with what it wrote last.
    """
    command = [str(python or PADDLE.python()), str(_HERE / "paddle_ps.py")]
    command += ["--rows", str(rows), "--dim", str(dim), "--servers", str(servers), "--shards", str(shards)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{command[1]} ended with exit code {run.returncode}:\n{run.stderr[-_LAST_CHARACTERS:]}")
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


@contextmanager
def paddle_steps(
    model: str,
    *,
    servers: int,
    feed: str = "exe.run",
    threads: int = 1,
    ports: Sequence[int] = (),
    reached_at: Sequence[int] = (),
    python: Path | None = None,
) -> Iterator[Callable[[int], list[float]]]:
    """Runs servers and a trainer; yields a function that runs steps and returns their seconds.

    Args:
        model: `ctr` or `lookup`, as `paddle_step.py` has them.
        servers: Number of server processes.
        feed: `exe.run`, or a dataset as `paddle_step.py` has them, which returns only the mean of the steps.
        threads: Number of threads that train, with a dataset.
        ports: Ports of the servers, as many as there are; free ones by default.
        reached_at: Ports of 127.0.0.1 that the trainer connects to instead.
        python: As in `measure_paddle`.
    """
    arguments = ("--model", model, "--servers", str(servers), *numbers("--ports", ports))
    arguments += (*numbers("--reached-at", reached_at), "--threads", str(threads), "--feed", feed)
    interpreter = python or PADDLE.python()
    with baseline_process("PaddlePaddle 2.6's trainer", interpreter, "paddle_step.py", *arguments) as steps:
        yield steps.ask


def numbers(option: str, values: Sequence[int]) -> tuple[str, ...]:
    """Returns an option of a command line with its values; nothing if there are none."""
    return (option, *map(str, values)) if values else ()


@contextmanager
def paddle_server(*, python: Path | None = None) -> Iterator[tuple[int, float]]:
    """Runs a server without rows; yields its process id and the seconds from its start until it listens.

    Args:
        python: As in `measure_paddle`.
    """
    arguments = ("--model", "lookup", "--servers", "1", "--idle")
    interpreter = python or PADDLE.python()
    with baseline_process("PaddlePaddle 2.6's server", interpreter, "paddle_step.py", *arguments) as server:
        (pid,), seconds = server.told()
        yield pid, seconds


@contextmanager
def torch_rows(arguments: Sequence[str], *, python: Path | None = None) -> Iterator[BaselineProcess]:
    """Runs PyTorch as long as the block lasts; it looks up and updates rows as `torch_rows.py` says.

    Args:
        arguments: Arguments of that script.
        python: Interpreter with PyTorch; by default that of `TORCH`.
    """
    with baseline_process("PyTorch", python or TORCH.python(), "torch_rows.py", *arguments) as process:
        yield process
