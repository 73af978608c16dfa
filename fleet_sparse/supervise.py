"""Supervisor: a process that starts another one, passes signals on, and starts it again when it dies.

It imports little, so that it stays small. `Supervision` decides and `run` acts; `python -m fleet_sparse.supervise
COMMAND...` runs a command. The two processes hold the ends of one socket: see `fleet_sparse.lifeline`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fleet_sparse.lifeline import (
    ALIVE,
    ENDING,
    JOINED,
    LIFELINE,
    LINE_BYTES,
    LOSS,
    RESTART_AFTER_LOSS,
    STARTING,
)

_log = logging.getLogger(__name__)

STANDBY = "--standby"
"""The only option of a standby, which gets its arguments later."""
RESTARTS_WITHIN_S = 600.0
_FINAL_CODES = (0, 1, 2)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_SETTLED_S = 1.0
"""A request that ends a pserver is sent again at once, and ends the next one sooner than this."""
_AT_ONCE = 2
"""This many children in a row that did not settle are followed by the next one at once."""
_FAILED = 1
_GIVEN_UP = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPS = (signal.SIGTERM, signal.SIGINT)
_LATE_S = 2.0
_SILENT_STALLS = 4
"""A child says nothing while it loads modules, which takes long on a busy machine or over a network."""
_ENDING_S = 600.0
_STANDBY_PAUSE_S, _MAX_STANDBY_PAUSE_S = 60.0, 960.0


class Decision(NamedTuple):
    """What follows the end of a child: a start after a pause, or the end of the supervisor."""

    pause_s: float | None
    """None if there is no further start."""
    code: int = 0
    """Exit code of the supervisor if there is no further start."""
    reason: str = ""


class Supervision:
    """Decides whether and when a child is started again. No I/O, no clock of its own; `now` is monotonic.

    A child that ends by itself or in order, or by a signal that the supervisor got as well, is not started again. To
    end in order it has `_ENDING_S`. From the third one in a row on, the pause before a start doubles with each child
    that ended within `_SETTLED_S` of the time when it began to serve or joined its job, or before. A start that the
    system refuses counts as a child that ended so; if it is the first one, there is no other.

    Args:
        max_restarts: Number of restarts within `RESTARTS_WITHIN_S`.
        stall_s: Seconds without a sign of life after which the child is killed, before its first one
            `_SILENT_STALLS` times as many; and seconds that it has to end after a signal to stop.
        is_script: True for a script of the user: it may take any time until its first sign of life, and whatever code
            it ends with, it ended by itself.

    Attributes:
        options: Options that children set for the next start.
    """

    def __init__(self, max_restarts: int, stall_s: float, *, is_script: bool = False) -> None:
        self._max_restarts = max_restarts
        self._stall_s = stall_s
        self._is_script = is_script
        self._restarted_at: deque[float] = deque()
        self._num_unsettled = 0
        self._num_begun = 0
        self._has_spoken = False
        self._ready_at: float | None = None
        self._alive_at: float | None = None
        self._stopped_at: float | None = None
        self._ending_at: float | None = None
        self._received: set[int] = set()
        self._restarts_after_loss = False
        self._has_lost = False
        self.options: dict[str, str] = {}

    def begin(self, now: float) -> None:
        """A child was started."""
        self._alive_at = None if self._is_script else now
        self._num_begun += 1
        self._has_spoken = False
        self._ready_at = None
        self._has_lost = False

    def hear(self, line: str, now: float) -> None:
        """The child wrote a line."""
        self._has_spoken = True
        if line in (STARTING, ALIVE):
            self._alive_at = now
        if line in (ALIVE, JOINED) and self._ready_at is None:
            self._ready_at = now
        if line == ENDING and self._ending_at is None:
            self._ending_at = now
        word, _, rest = line.partition(" ")
        if word == "next":
            option, _, value = rest.partition(" ")
            self.options[option] = value
        self._restarts_after_loss |= line == RESTART_AFTER_LOSS
        self._has_lost |= line == LOSS

    def receive(self, number: int, now: float) -> None:
        """The supervisor got a signal, which it passes on. One to stop: the child is not started again."""
        self._received.add(number)
        if number in _STOPS and self._stopped_at is None:
            self._stopped_at = now

    @property
    def is_ready(self) -> bool:
        """True once the child serves, or has joined its job."""
        return self._ready_at is not None

    @property
    def is_stopping(self) -> bool:
        """True once it was told to stop, or the child ends in order."""
        return self._stopped_at is not None or self._ending_at is not None

    def kills_at(self) -> float | None:
        """Returns the time at which the child is to be killed; None for never."""
        if self._ending_at is not None:
            return self._ending_at + _ENDING_S
        if self._stopped_at is not None:
            return self._stopped_at + self._stall_s
        if self._alive_at is None:
            return None
        return self._alive_at + self._stall_s * (1 if self._has_spoken else _SILENT_STALLS)

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
        if self._is_of_its_own(status) and not is_loss:
            return Decision(None, status)
        what = f"signal {-status} ended it" if status < 0 else f"it ended with code {status}"
        if is_loss:
            what = "another process of the job was lost"
        if self.is_stopping or -status in self._received:
            return Decision(None, 128 - status if status < 0 else status, what)
        is_settled = self._ready_at is not None and now - self._ready_at >= _SETTLED_S
        return self._restart(what, now, is_settled=is_settled)

    def _is_of_its_own(self, status: int) -> bool:
        """Returns whether the child ended by itself.

        Python and the libraries that it loads end with 1, too, if there is no memory for them. A pserver says something
        before it can find a fault, and the first one may have been started wrongly.
        """
        if self._is_script:
            return status >= 0
        return status == 0 or (status in _FINAL_CODES and (self._has_spoken or self._num_begun <= 1))

    def refuse(self, error: OSError, now: float) -> Decision:
        """The system refused to start a child."""
        what = f"it cannot be started: {error}"
        return self._restart(what, now, is_settled=False) if self._num_begun else Decision(None, _FAILED, what)

    def _restart(self, what: str, now: float, *, is_settled: bool) -> Decision:
        while self._restarted_at and now - self._restarted_at[0] >= RESTARTS_WITHIN_S:
            self._restarted_at.popleft()
        num_recent = len(self._restarted_at)
        if num_recent >= self._max_restarts:
            reason = f"{what}, after {num_recent} restarts in {RESTARTS_WITHIN_S:g} s (FLEET_SPARSE_RESTARTS)"
            return Decision(None, _GIVEN_UP, reason)
        self._restarted_at.append(now)
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

    generation: int
    options: Mapping[str, str]
    """Options that children set for this start."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    lifeline: socket.socket
    """Our end of the socket."""
    ended: int
    """A file descriptor that is readable once the process has ended."""

    @classmethod
    def of(cls, command: Sequence[str]) -> _Child:
        """Starts a process."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                variables = {**os.environ, LIFELINE: str(theirs.fileno())}
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
            undo.callback(process.wait)
            undo.callback(process.kill)
            child = cls(process, ours, os.pidfd_open(process.pid))
            undo.pop_all()
            return child

    def close(self) -> None:
        """Closes what belongs to the process, which ends then."""
        self.lifeline.close()
        os.close(self.ended)

    def kill(self) -> None:
        """Ends the process at once."""
        self.close()
        self.process.kill()
        self.process.wait()


class Standby:
    """A process that has loaded what a child needs, and becomes the next one.

    One that ends while it waits, or that the system refuses to start, is replaced after a pause that doubles.

    Args:
        program: Command line of a child without its arguments.
        is_wanted: False to start each child when it is needed.
    """

    def __init__(self, program: Sequence[str], *, is_wanted: bool) -> None:
        self._program = program
        self._is_wanted = is_wanted
        self._waiting: _Child | None = None
        self._pause_s, self._paused_until = _STANDBY_PAUSE_S, -math.inf

    def prepare(self) -> None:
        """Starts it, unless there is one or it is too early for the next one."""
        if self._waiting is not None and (status := self._waiting.process.poll()) is not None:
            self.end()
            self._postpone(f"the standby ended with code {status}")
        if self._is_wanted and self._waiting is None and time.monotonic() >= self._paused_until:
            try:
                self._waiting = _Child.of([*self._program, STANDBY])
            except OSError as error:
                self._postpone(f"the standby cannot be started: {error}")

    def _postpone(self, reason: str) -> None:
        _log.warning("%s: the next one is started in %g s", reason, self._pause_s)
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_STANDBY_PAUSE_S)

    def begin(self, arguments: Sequence[str]) -> _Child:
        """Returns the child that begins with these arguments: a new process if the one that waited is gone.

        Raises:
            OSError: The system refuses to start a process.
        """
        child, self._waiting = self._waiting, None
        if child is not None and child.process.poll() is None:
            with contextlib.suppress(OSError):
                child.lifeline.sendall(json.dumps(list(arguments)).encode() + b"\n")
                return child
        if child is not None:
            child.kill()
        return _Child.of([*self._program, *arguments])

    def end(self) -> None:
        """Ends the process that waits."""
        child, self._waiting = self._waiting, None
        if child is not None:
            child.kill()


def run(
    program: Sequence[str],
    arguments_of: Callable[[Start], Sequence[str]],
    supervision: Supervision,
    name: str,
    *,
    has_standby: bool = False,
) -> int:
    """Runs a child until it is not started again; call it in the main thread. Returns the exit code.

    Args:
        program: Command line of a child without its arguments.
        arguments_of: Returns these.
        supervision: Decides.
        name: Name of the child in the log.
        has_standby: True to start the program with the option `STANDBY`, too, as soon as a child serves.
    """
    # If it is ignored, as whoever started this process may have left it, the kernel forgets how a child ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    generations, wake, woken = Generations(), *_signal_pipe()
    received: deque[int] = deque()
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup; the child ignores it as well
            signal.signal(number, lambda number, _: received.append(number))
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    standby = Standby(program, is_wanted=has_standby)
    try:
        while True:
            arguments = arguments_of(Start(generations.draw(), supervision.options))
            try:
                child = standby.begin(arguments)
            except OSError as error:
                decision = supervision.refuse(error, time.monotonic())
            else:
                with contextlib.closing(child):
                    supervision.begin(time.monotonic())
                    status = _attend(child, supervision, received, woken, name, standby)
                while received:  # a group of processes gets a signal at once, and the child may be faster
                    supervision.receive(received.popleft(), time.monotonic())
                decision = supervision.end(status, time.monotonic())
            if decision.pause_s is None:
                if decision.reason:
                    _log.error("%s ends: %s", name, decision.reason)
                return decision.code
            _log.warning("%s is started again in %.1f s: %s", name, decision.pause_s, decision.reason)
            if _is_stopped_in(decision.pause_s, received, woken):
                return 0
    finally:
        standby.end()


def _signal_pipe() -> tuple[int, int]:
    """Returns a file descriptor that signals write to, and one that is readable then."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    return wake, woken


def _is_stopped_in(pause_s: float, received: deque[int], woken: int) -> bool:
    """Waits for a pause, or until a signal to stop is received, and returns whether one was. Others are kept."""
    ends_at = time.monotonic() + pause_s
    while not any(stop in received for stop in _STOPS):  # a handler may append to it at any line of Python
        rest_s = ends_at - time.monotonic()
        if rest_s <= 0:
            return False
        if select.select([woken], [], [], rest_s)[0]:
            os.read(woken, LINE_BYTES)
    return True


def _attend(
    child: _Child,
    supervision: Supervision,
    received: deque[int],
    woken: int,
    name: str,
    standby: Standby,
) -> int:
    """Passes signals on and reads lines until the child has ended; returns its status, as of `Popen`.

    It starts the standby once the child serves.
    """
    process, lifeline, ended = child
    waited, rest, has_ended = [ended, woken, lifeline.fileno()], b"", False
    while True:
        while received:
            number = received.popleft()
            supervision.receive(number, time.monotonic())
            process.send_signal(number)
        kills_at = supervision.kills_at()
        timeout_s = None if kills_at is None else max(kills_at - time.monotonic(), 0.0)
        readable, _, _ = select.select(waited, [], [], timeout_s)
        if woken in readable:
            os.read(woken, LINE_BYTES)
        if lifeline.fileno() in readable:
            data = b""
            with contextlib.suppress(ConnectionError):  # it ended, and had not read its arguments
                data = lifeline.recv(LINE_BYTES)
            if not data:
                waited.remove(lifeline.fileno())
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                supervision.hear(line.decode(errors="replace"), time.monotonic())
            if supervision.is_ready and not supervision.is_stopping:
                standby.prepare()
        if has_ended and lifeline.fileno() not in readable:
            return process.wait()
        has_ended = ended in readable  # its last lines may have come after `select` had looked at them
        if not readable and supervision.is_stalled(time.monotonic()):  # all lines were read
            _log.error("%s gave no sign of life for too long (FLEET_SPARSE_STALL_S): it is killed", name)
            process.kill()
            return process.wait()


def main(command: Sequence[str]) -> int:
    """Runs a command until it is not started again. Returns the exit code."""
    from fleet_sparse.settings import Settings

    settings = Settings.from_environment()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s supervisor: %(message)s")
    supervision = Supervision(settings.restarts, settings.stall_s, is_script=True)
    return run(command, lambda _: (), supervision, "the worker")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
