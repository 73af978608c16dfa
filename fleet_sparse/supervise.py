"""Supervisor: a process that starts another one, passes signals on, and starts it again when it dies.

It imports little, so that it stays small. `Supervision` decides and `run` acts; `python -m fleet_sparse.supervise
COMMAND...` runs a command. The two processes hold the ends of one socket: the child ends when the other end is closed,
and writes lines to its own: `starting` and `alive` are signs of life, before it serves and while it does; `joined` says
that a script is a worker of its job, and needs no signs; `next OPTION VALUE` sets an option of the next start; `loss`
says that another process of the job is lost, and `restart after loss` that code 1 is not final then.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_log = logging.getLogger(__name__)

TRY_AGAIN = 70
"""Exit code of a supervised process that another start may help, as after an unknown error; 0, 1 and 2 are final."""
LIFELINE = "_FLEET_SPARSE_LIFELINE"
"""Environment variable with the number of a child's end of the socket; empty in the processes that a child starts."""
RESTARTS_WITHIN_S = 600.0
_FINAL_CODES = (0, 1, 2)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_SETTLED_S = 2.0
_AT_ONCE = 2
"""So many children in a row that did not settle are followed by the next one at once."""
_FAILED = 1
_GIVEN_UP = 1
_STARTING, _ALIVE, _JOINED = "starting", "alive", "joined"
_LOSS, _RESTART_AFTER_LOSS = "loss", "restart after loss"
_LINE_BYTES = 1 << 16
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPS = (signal.SIGTERM, signal.SIGINT)
_BEATS_PER_STALL = 6
_PROGRESS_S = 0.1
"""Least time between two signs of life of a start."""
_LATE_S = 2.0


class Decision(NamedTuple):
    """What follows the end of a child: a start after a pause, or the end of the supervisor."""

    pause_s: float | None
    """None if there is no further start."""
    code: int = 0
    """Exit code of the supervisor if there is no further start."""
    reason: str = ""


class Supervision:
    """Decides whether and when a child is started again. No I/O, no clock of its own; `now` is monotonic.

    A child that ends by itself, or by a signal that the supervisor got as well, is not started again. From the third
    one in a row on, the pause before a start doubles with each child that ended within `_SETTLED_S` of the time when it
    began to serve or joined its job, or before.

    Args:
        max_restarts: Number of restarts within `RESTARTS_WITHIN_S`.
        stall_s: Seconds without a sign of life after which the child is killed; and seconds that it has to end after a
            signal to stop.
        is_silent_at_start: True if the child may take any time until its first sign of life.

    Attributes:
        options: Options that children set for the next start.
    """

    def __init__(self, max_restarts: int, stall_s: float, *, is_silent_at_start: bool = False) -> None:
        self._max_restarts = max_restarts
        self._stall_s = stall_s
        self._is_silent_at_start = is_silent_at_start
        self._restarted_at: deque[float] = deque()
        self._num_unsettled = 0
        self._ready_at: float | None = None
        self._alive_at: float | None = None
        self._stopped_at: float | None = None
        self._received: set[int] = set()
        self._restarts_after_loss = False
        self._has_lost = False
        self.options: dict[str, str] = {}

    def begin(self, now: float) -> None:
        """A child was started."""
        self._alive_at = None if self._is_silent_at_start else now
        self._ready_at = None
        self._has_lost = False

    def hear(self, line: str, now: float) -> None:
        """The child wrote a line."""
        if line in (_STARTING, _ALIVE):
            self._alive_at = now
        if line in (_ALIVE, _JOINED) and self._ready_at is None:
            self._ready_at = now
        word, _, rest = line.partition(" ")
        if word == "next":
            option, _, value = rest.partition(" ")
            self.options[option] = value
        self._restarts_after_loss |= line == _RESTART_AFTER_LOSS
        self._has_lost |= line == _LOSS

    def receive(self, number: int, now: float) -> None:
        """The supervisor got a signal, which it passes on. One to stop: the child is not started again."""
        self._received.add(number)
        if number in _STOPS and self._stopped_at is None:
            self._stopped_at = now

    @property
    def is_stopping(self) -> bool:
        """True once it was told to stop."""
        return self._stopped_at is not None

    def kills_at(self) -> float | None:
        """Returns the time at which the child is to be killed; None for never."""
        since = self._alive_at if self._stopped_at is None else self._stopped_at
        return None if since is None else since + self._stall_s

    def is_stalled(self, now: float) -> bool:
        """Returns whether the child is to be killed now.

        If nobody asked for long after that time, this process was suspended, and so may the child have been: it then
        has the whole time once more.
        """
        kills_at = self.kills_at()
        if kills_at is None or now < kills_at:
            return False
        if not self.is_stopping and now > kills_at + _LATE_S:
            self._alive_at = now
            return False
        return True

    def end(self, status: int, now: float) -> Decision:
        """The child ended.

        Args:
            status: Its exit code, or minus the number of the signal that ended it.
            now: The time.
        """
        is_loss = status == _FAILED and self._has_lost and self._restarts_after_loss
        if status in _FINAL_CODES and not is_loss:
            return Decision(None, status)
        what = f"signal {-status} ended it" if status < 0 else f"it ended with code {status}"
        if is_loss:
            what = "another process of the job was lost"
        if self.is_stopping or -status in self._received:
            return Decision(None, 128 - status if status < 0 else status, what)
        while self._restarted_at and now - self._restarted_at[0] >= RESTARTS_WITHIN_S:
            self._restarted_at.popleft()
        num_recent = len(self._restarted_at)
        if num_recent >= self._max_restarts:
            reason = f"{what}, after {num_recent} restarts in {RESTARTS_WITHIN_S:g} s (FLEET_SPARSE_RESTARTS)"
            return Decision(None, _GIVEN_UP, reason)
        self._restarted_at.append(now)
        is_settled = self._ready_at is not None and now - self._ready_at >= _SETTLED_S
        self._num_unsettled = 0 if is_settled else min(self._num_unsettled, num_recent) + 1
        if self._num_unsettled <= _AT_ONCE:
            return Decision(0.0, reason=what)
        pause_s = _FIRST_PAUSE_S * 2.0 ** (self._num_unsettled - _AT_ONCE - 1)
        return Decision(min(pause_s, _MAX_PAUSE_S), reason=what)


class Generations:
    """Draws the generations of a child: seconds of the wall clock, and always larger than the one before."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._newest = 0

    def draw(self) -> int:
        """Returns the next one, below 2^32."""
        self._newest = max(int(self._clock()), self._newest + 1)
        return self._newest


class Start(NamedTuple):
    """What a child is started with."""

    lifeline_fd: int
    """Its end of the socket."""
    generation: int
    options: Mapping[str, str]
    """Options that children set for this start."""


def run(command_of: Callable[[Start], Sequence[str]], supervision: Supervision, name: str) -> int:
    """Runs a child until it is not started again; call it in the main thread. Returns the exit code.

    Args:
        command_of: Returns the command line of a child.
        supervision: Decides.
        name: Name of the child in the log.
    """
    generations, wake, woken = Generations(), *_signal_pipe()
    received: deque[int] = deque()
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup; the child ignores it as well
            signal.signal(number, lambda number, _: received.append(number))
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ours, theirs = socket.socketpair()
        start = Start(theirs.fileno(), generations.draw(), supervision.options)
        with ours:
            with theirs:
                variables = {**os.environ, LIFELINE: str(start.lifeline_fd)}
                child = subprocess.Popen(command_of(start), pass_fds=[start.lifeline_fd], env=variables)
            supervision.begin(time.monotonic())
            status = _attend(child, ours, supervision, received, woken, name)
        while received:  # a group of processes gets a signal at once, and the child may be faster
            supervision.receive(received.popleft(), time.monotonic())
        decision = supervision.end(status, time.monotonic())
        if decision.pause_s is None:
            if decision.reason:
                _log.error("%s ends: %s", name, decision.reason)
            return decision.code
        _log.warning("%s is started again in %.1f s: %s", name, decision.pause_s, decision.reason)
        select.select([woken], [], [], decision.pause_s)
        if any(number in _STOPS for number in received):
            return 0


def _signal_pipe() -> tuple[int, int]:
    """Returns a file descriptor that signals write to, and one that is readable then."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    return wake, woken


def _attend(
    child: subprocess.Popen[bytes],
    lifeline: socket.socket,
    supervision: Supervision,
    received: deque[int],
    woken: int,
    name: str,
) -> int:
    """Passes signals on and reads lines until the child has ended; returns its status, as of `Popen`."""
    ended = os.pidfd_open(child.pid)
    waited, rest = [ended, woken, lifeline.fileno()], b""
    try:
        while True:
            kills_at = supervision.kills_at()
            timeout_s = None if kills_at is None else max(kills_at - time.monotonic(), 0.0)
            readable, _, _ = select.select(waited, [], [], timeout_s)
            if woken in readable:
                os.read(woken, _LINE_BYTES)
            while received:
                number = received.popleft()
                supervision.receive(number, time.monotonic())
                child.send_signal(number)
            if lifeline.fileno() in readable:
                data = lifeline.recv(_LINE_BYTES)
                if not data:
                    waited.remove(lifeline.fileno())
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    supervision.hear(line.decode(errors="replace"), time.monotonic())
            if ended in readable:
                return child.wait()
            if not readable and supervision.is_stalled(time.monotonic()):  # all lines were read
                _log.error("%s gave no sign of life for too long (FLEET_SPARSE_STALL_S): it is killed", name)
                child.kill()
                return child.wait()
    finally:
        os.close(ended)


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

    def restart_after_loss(self) -> None:
        """Makes exit code 1 lead to another start if it follows `report_loss`."""
        self.say(_RESTART_AFTER_LOSS)

    def report_joined(self) -> None:
        """Says that this process is a worker of its job. It needs no further signs of life."""
        self.say(_JOINED)

    def report_loss(self) -> None:
        """Says that this process will end because another process of its job is lost."""
        self.say(_LOSS)

    def end_with_supervisor(self) -> None:
        """Sends this process SIGTERM once the supervisor is gone."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()

    def note_progress(self) -> None:
        """Says that the start of this process goes on. The thread that starts it calls this as often as it likes."""
        now = time.monotonic()
        if now >= self._noted_at + _PROGRESS_S:
            self._noted_at = now
            self.say(_STARTING)

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
                self.say(_ALIVE)
                time.sleep(stall_s / _BEATS_PER_STALL)

        threading.Thread(target=run, name="signs of life", daemon=True).start()


def main(command: Sequence[str]) -> int:
    """Runs a command until it is not started again. Returns the exit code."""
    from fleet_sparse.settings import Settings

    settings = Settings.from_environment()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s supervisor: %(message)s")
    supervision = Supervision(settings.restarts, settings.stall_s, is_silent_at_start=True)  # a script says nothing
    return run(lambda _: command, supervision, "the worker")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
