"""The text of the files of a data set, through its `pipe_command`."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import DatasetError

_CHUNK_BYTES = 1 << 20
_MIN_BYTES = 1 << 16  # of text from a slow command
_MAX_LINE_BYTES = 1 << 26
_PIPE_BYTES = 1 << 20
_NEWLINE = 10
_SHELL = "bash"  # for pipefail
_GOOD_STATUSES = (0, -signal.SIGPIPE, 128 + signal.SIGPIPE)
"""A pipeline whose last command stops reading, such as `head`, ends its first one by SIGPIPE."""


class Pipe(NamedTuple):
    """The way in which a file becomes text.

    Attributes:
        command: Shell command from the file's bytes on standard input to text on standard output; "cat" for the file
            itself.
        download_command: Shell command that, followed by a path, writes a file to standard output; "cat" to open it.
        timeout_s: Seconds that a command has to write more, and to end after its last output.
    """

    command: str = "cat"
    download_command: str = "cat"
    timeout_s: float = 600.0


@dataclass
class Processes:
    """The processes that read now; `end` ends them and keeps others from being started. Safe for several threads."""

    is_ended: bool = False
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def start(self, command: str, stdin: Any) -> subprocess.Popen[bytes]:
        """Starts a shell command as the leader of a process group.

        Raises:
            OSError: There is no `_SHELL`, or the system has no room for a process.
            InterruptedError: `end` was called.
        """
        with self._lock:
            if self.is_ended:
                raise InterruptedError
            process = subprocess.Popen(
                [_SHELL, "-c", f"set -o pipefail; {command}"],
                stdin=stdin,
                stdout=subprocess.PIPE,
                bufsize=0,
                pipesize=_PIPE_BYTES,
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Kills a process and its children if they still run, and waits for it."""
        _kill(process)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        with self._lock:
            self._running.discard(process)

    def end(self) -> None:
        """Kills all processes; their readers see the end of their output."""
        with self._lock:
            self.is_ended = True
            for process in self._running:
                _kill(process)


def text_of(path: str, pipe: Pipe, processes: Processes) -> Iterator[NDArray[np.uint8]]:
    """Yields the text of a file in pieces of whole lines, each valid until the next one is asked for.

    Raises:
        DatasetError: The file cannot be read; a command cannot be started, fails or writes nothing in time; or a line
            is too long.
        InterruptedError: `processes.end` was called.
    """
    try:
        with _opened(path, pipe, processes) as read:
            yield from _whole_lines(path, read)
    except InterruptedError:
        raise
    except OSError as error:
        raise DatasetError(
            f"{path!r}: cannot be read ({error.strerror or error}). Correct the list of files: dataset.set_filelist",
            path=path,
        ) from None


def _command_of(path: str, pipe: Pipe) -> str:
    commands = [] if pipe.download_command == "cat" else [f"{pipe.download_command} {shlex.quote(path)}"]
    commands += ["gzip -cd"] * path.endswith(".gz")
    # Paddle, too, reads through the command in a group, so that it may be a pipeline or have several parts.
    commands += [f"{{ {pipe.command}\n}}"] * (pipe.command.strip() != "cat")
    return " | ".join(commands)


_Read = Callable[[memoryview], int]
"""Reads bytes into a view and returns their number, 0 at the end."""


@contextlib.contextmanager
def _opened(path: str, pipe: Pipe, processes: Processes) -> Iterator[_Read]:
    command = _command_of(path, pipe)
    with contextlib.ExitStack() as stack:
        stdin: Any = subprocess.DEVNULL
        if pipe.download_command == "cat":
            stdin = stack.enter_context(open(path, "rb", buffering=0))  # the stack closes it
        if not command:
            yield lambda view: _read_file(stdin, view, processes)
            return
        try:
            process = processes.start(command, stdin)
        except InterruptedError:
            raise
        except OSError as error:
            raise DatasetError(
                f"{path!r}: {_SHELL!r}, the shell that runs pipe_command {_shown(path, pipe)}, cannot be started "
                f"({error.strerror or error}). Install it on this worker's machine, and put it on the PATH",
                path=path,
            ) from None
        stack.callback(processes.finish, process)
        poll = select.poll()
        assert process.stdout is not None
        poll.register(process.stdout, select.POLLIN | select.POLLHUP)
        yield lambda view: _read_output(path, process, poll, view, pipe, processes)


def _read_file(file: Any, view: memoryview, processes: Processes) -> int:
    if processes.is_ended:
        raise InterruptedError
    return file.readinto(view) or 0


def _read_output(
    path: str,
    process: subprocess.Popen[bytes],
    poll: select.poll,
    view: memoryview,
    pipe: Pipe,
    processes: Processes,
) -> int:
    if not poll.poll(pipe.timeout_s * 1e3):
        raise _late(path, pipe, "has written nothing")
    output: Any = process.stdout
    number = output.readinto(view) or 0
    if processes.is_ended:
        raise InterruptedError
    if number == 0:
        _check_end(path, process, pipe, processes)
    return number


def _whole_lines(path: str, read: _Read) -> Iterator[NDArray[np.uint8]]:
    buffer = bytearray(_CHUNK_BYTES + 1)  # the last byte is for the newline that the last line may lack
    held = 0  # bytes of it
    while True:
        number = read(memoryview(buffer)[held:-1])
        held += number
        if number == 0:
            if held:
                if buffer[held - 1] != _NEWLINE:
                    buffer[held] = _NEWLINE
                    held += 1
                yield np.frombuffer(buffer, np.uint8, held)
            return
        if held < _MIN_BYTES:
            continue
        end = buffer.rfind(b"\n", 0, held) + 1
        if end:
            yield np.frombuffer(buffer, np.uint8, end)
            memoryview(buffer)[: held - end] = memoryview(buffer)[end:held]
            held -= end
        elif held < len(buffer) - 1:
            continue
        elif held < _MAX_LINE_BYTES:
            buffer = buffer[:held] + bytearray(held + 1)
        else:
            raise DatasetError(
                f"{path!r}: has a line of more than {_MAX_LINE_BYTES >> 20} MB. Write one example per line", path=path
            )


def _check_end(path: str, process: subprocess.Popen[bytes], pipe: Pipe, processes: Processes) -> None:
    try:
        status = process.wait(pipe.timeout_s)
    except subprocess.TimeoutExpired:
        raise _late(path, pipe, "has closed its output and has not ended") from None
    if processes.is_ended:
        raise InterruptedError
    if status not in _GOOD_STATUSES:
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise DatasetError(
            f"{path!r}: pipe_command {_shown(path, pipe)} {ended}. Its messages are in the output of this worker",
            path=path,
        )


def _late(path: str, pipe: Pipe, what: str) -> DatasetError:
    return DatasetError(
        f"{path!r}: pipe_command {_shown(path, pipe)} {what} for {pipe.timeout_s:g} s, should write or end. Look for "
        "what it waits for, or set FLEET_SPARSE_PIPE_S higher",
        path=path,
    )


def _shown(path: str, pipe: Pipe) -> str:
    return repr(pipe.command) if pipe.command.strip() != "cat" else repr(_command_of(path, pipe))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # else the system may have given the number to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
