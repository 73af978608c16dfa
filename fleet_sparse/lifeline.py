"""Lifeline: the socket between a supervised process and its supervisor, at the end of the process.

The process ends when the other end is closed, and writes lines: `starting` and `alive` are signs of life, before it
serves and while it does; `joined` says that a script is a worker of its job, and needs no signs; `next OPTION VALUE`
sets an option of the next start; `ending` says that it ends in order, which no start follows; `loss` says that another
process of the job is lost, and `restart after loss` that code 1 is not final then. A standby reads one line, JSON: the
arguments with which it begins.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

TRY_AGAIN = 70
"""Exit code of a supervised process that another start may help, as after an unknown error; 0, 1 and 2 are final."""
LIFELINE = "_FLEET_SPARSE_LIFELINE"
"""Environment variable with the number of a child's end of the socket; empty in the processes that a child starts."""
STARTING, ALIVE, JOINED, ENDING = "starting", "alive", "joined", "ending"
LOSS, RESTART_AFTER_LOSS = "loss", "restart after loss"
LINE_BYTES = 1 << 16
"""Longest line."""
_BEATS_PER_STALL = 6
_PROGRESS_S = 0.1
"""Least time between two signs of life of a start."""


def take_lifeline() -> Lifeline | None:
    """Returns the lifeline of this process if a supervisor started it; None in the processes that it starts itself."""
    number = os.environ.get(LIFELINE)
    if not number:
        return None
    os.environ[LIFELINE] = ""
    return Lifeline(int(number))


class Lifeline:
    """The child's end of the socket.

    Args:
        number: Its file descriptor, which is closed with this object.
    """

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(fileno=number)
        os.set_inheritable(number, False)  # a process that this one starts must not keep it open
        self._lock = threading.Lock()
        self._noted_at = -math.inf

    def say(self, line: str) -> None:
        """Writes a line; any thread may call it. A name with a newline is not said."""
        if "\n" not in line:
            with self._lock, contextlib.suppress(OSError):
                self._socket.sendall(line.encode() + b"\n")

    def set_next(self, option: str, value: str = "") -> None:
        """Sets an option of the next start; with an empty value, one that has none."""
        self.say(f"next {option} {value}")

    def await_arguments(self) -> list[str]:
        """Returns the arguments of a standby once its supervisor sends them; ends the process if that is gone.

        The next `take_lifeline` of this process then takes the socket.
        """
        line = b""
        while not line.endswith(b"\n"):
            part = b""
            with contextlib.suppress(ConnectionError):  # the supervisor is gone, and had not read all signs of life
                part = self._socket.recv(LINE_BYTES)
            if not part:
                self._socket.close()
                sys.exit(0)
            line += part
        os.environ[LIFELINE] = str(self._socket.detach())
        arguments: list[str] = json.loads(line)
        return arguments

    def restart_after_loss(self) -> None:
        """Makes exit code 1 lead to another start if it follows `report_loss`."""
        self.say(RESTART_AFTER_LOSS)

    def report_joined(self) -> None:
        """Says that this process is a worker of its job. It needs no further signs of life."""
        self.say(JOINED)

    def report_ending(self) -> None:
        """Says that this process ends in order, and may take a while to remove its log and to free its memory."""
        self.say(ENDING)

    def report_loss(self) -> None:
        """Says that this process will end because another process of its job is lost."""
        self.say(LOSS)

    def end_with_supervisor(self, stall_s: float) -> None:
        """Sends this process SIGTERM once the supervisor is gone, and SIGALRM if it still runs `stall_s` later."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            signal.setitimer(signal.ITIMER_REAL, stall_s)  # ends it even where it runs no Python code any more
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()

    def note_progress(self) -> None:
        """Says that the start of this process goes on. The thread that starts it calls this as often as it likes."""
        now = time.monotonic()
        if now >= self._noted_at + _PROGRESS_S:
            self._noted_at = now
            self.say(STARTING)

    def beat(self, ask: Callable[[Callable[[], None]], object], stall_s: float) -> None:
        """Says a line each time that a thread carries out what it is asked, several times in `stall_s`.

        Args:
            ask: Makes the thread whose life counts call its argument soon.
            stall_s: As of the supervisor.
        """

        def run() -> None:
            answered = threading.Event()
            while True:
                ask(answered.set)
                answered.wait()
                answered.clear()
                self.say(ALIVE)
                time.sleep(stall_s / _BEATS_PER_STALL)

        threading.Thread(target=run, name="signs of life", daemon=True).start()
