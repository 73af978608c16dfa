"""What to measure beside ours. Each runs in processes and a venv of its own, made when it is asked for."""

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
_LAST_CHARACTERS = 2000  # of what a process wrote before it ended
_MARK = "@@"  # begins what the script's answers; its libraries write other lines


class Venv(NamedTuple):
    """Where packages are that ours is measured beside."""

    directory: Path
    packages: tuple[str, ...]
    python_version: tuple[int, int] | None = None
    """That they need; any that runs this one when None."""

    def python(self) -> Path:
        """Its interpreter; the venv is made if it is not there, which takes minutes and some GB of disk.

        Raises:
            SystemExit: The packages do not run with the Python that runs this one.
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
        process: With pipes of text to and from it.
        name: For messages.
        log: Where its standard error goes, if that is kept.
    """

    def __init__(self, process: subprocess.Popen[str], name: str, log: IO[str] | None = None) -> None:
        self._process = process
        self._name = name
        self._log = log

    def ask(self, what: object) -> Any:
        """Its answer to a line."""
        print(what, file=self._process.stdin, flush=True)
        return self.told()

    def told(self) -> Any:
        """What it says next."""
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
    """A script of this directory, in a process that ends with the block.

    Args:
        name: For messages.
        python: Its interpreter.
        script: Name of its file.
        arguments: Of its command line.
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
    """What saving and loading takes in PaddlePaddle 2.6, as `paddle_ps.py` prints it.

    Args:
        rows: That are inserted, saved and loaded.
        dim: Of a row, trained with Adagrad.
        servers: Processes that hold them.
        shards: Files that the table is saved as.
        python: Interpreter with that Paddle; that of `PADDLE` when left out.

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
    model: str, *, servers: int, feed: str = "exe.run", python: Path | None = None
) -> Iterator[Callable[[int], list[float]]]:
    """Its servers and a trainer run as long as the block lasts; what is yielded runs steps and tells their seconds.

    Args:
        model: `ctr` or `lookup`, as `paddle_step.py` has them.
        servers: Processes.
        feed: `exe.run`, or `InMemoryDataset`, which tells the mean of the steps alone.
        python: As in `measure_paddle`.
    """
    arguments = ("--model", model, "--servers", str(servers), "--feed", feed)
    interpreter = python or PADDLE.python()
    with baseline_process("PaddlePaddle 2.6's trainer", interpreter, "paddle_step.py", *arguments) as steps:
        yield steps.ask


@contextmanager
def paddle_server(*, python: Path | None = None) -> Iterator[tuple[int, float]]:
    """One server that has no rows, once it listens; its process id, and the seconds from its start until then.

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
    """PyTorch that looks up and updates rows as long as the block lasts; asked as `torch_rows.py` says.

    Args:
        arguments: Of that script.
        python: Interpreter with PyTorch; that of `TORCH` when left out.
    """
    with baseline_process("PyTorch", python or TORCH.python(), "torch_rows.py", *arguments) as process:
        yield process
