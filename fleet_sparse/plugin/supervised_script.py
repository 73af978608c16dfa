"""A worker's script as the child of a small process that starts it again when it dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import fleet_sparse
from fleet_sparse.errors import ShardUnavailable, WorkerLost
from fleet_sparse.lifeline import LIFELINE, Lifeline, take_lifeline
from fleet_sparse.settings import PREFIX, Settings

_RESTARTS = f"{PREFIX}RESTARTS"

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_lifelines: list[Lifeline] = []
"""That of this script, if it has a supervisor."""
_last_calls: list[Callable[[], None]] = []
"""At most one call, which is made when an uncaught exception ends this script: it is not started again then."""


def supervise_script() -> None:
    """Replaces the process of a worker by a supervisor of its script if FLEET_SPARSE_RESTARTS is set.

    In the script that the supervisor starts, it only makes sure that the script ends with its supervisor; in the
    processes that this script starts, as `multiprocessing` does, it does nothing.
    """
    lifeline = take_lifeline()
    if lifeline is not None:
        _lifelines.append(lifeline)
        lifeline.end_with_supervisor(Settings.from_environment().stall_s)
        sys.excepthook = _reporting_loss(lifeline, sys.excepthook)
    if LIFELINE in os.environ or os.environ.get("TRAINING_ROLE") != "TRAINER" or _RESTARTS not in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ["PYTHONPATH"] = with_this_package(os.environ.get("PYTHONPATH", ""))
    os.execv(sys.executable, [sys.executable, "-m", "fleet_sparse.supervise", *sys.orig_argv])


def is_supervised() -> bool:
    """Returns whether this script is started again if a signal ends it."""
    return bool(_lifelines)


def call_at_exception(call: Callable[[], None]) -> None:
    """Calls `call`, and none given before, if an uncaught exception ends this script, which has a supervisor."""
    _last_calls[:] = [call]


def restart_after_loss() -> None:
    """Has this script started again, now and in its next lives, if an uncaught loss of a process ends it."""
    for lifeline in _lifelines:
        lifeline.restart_after_loss()


def report_joined() -> None:
    """Tells the supervisor that this script is a worker of its job now: its next start needs no growing pause."""
    for lifeline in _lifelines:
        lifeline.report_joined()


def is_loss(error: BaseException | None) -> bool:
    """Returns whether an error, or one that was handled when it was raised, says that a worker or pserver is lost."""
    while error is not None:
        if isinstance(error, WorkerLost | ShardUnavailable):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reporting_loss(lifeline: Lifeline, hook: _ExceptHook) -> _ExceptHook:
    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_loss(error):
            lifeline.report_loss()
        hook(kind, error, trace)
        for call in _last_calls:
            with suppress(Exception):  # the script ends all the same
                call()

    return report


def with_this_package(path: str) -> str:
    """A PYTHONPATH on which another interpreter finds this package, wherever it was imported from."""
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    return here if not path else path if here in path.split(os.pathsep) else os.pathsep.join([path, here])
