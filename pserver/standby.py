"""A standby: a process that has loaded all that a pserver needs, and becomes the next one when a pserver dies."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from importlib import import_module

from fleet_sparse.lifeline import take_lifeline
from fleet_sparse.settings import Settings
from fleet_sparse.supervise import STANDBY
from fleet_sparse.warm_up import warm_up, without_linear_algebra

from .supervised import SUPERVISED


def stand_by() -> list[str]:
    """Loads modules and kernels, and returns the arguments with which to begin; the process ends with its supervisor.

    Raises:
        SettingError: A variable cannot be read.
        SystemExit: No supervisor started this process.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, which the whole group gets, ends it without a traceback
    lifeline = take_lifeline()
    if lifeline is None:
        sys.exit(f"pserver: {STANDBY} is for the supervisor of a pserver. Start one with {SUPERVISED} instead")
    import_module(".command_line", __package__)  # loads every module of a pserver
    with nullcontext() if Settings.from_environment().rules else without_linear_algebra():
        warm_up(trains=False, on_progress=lifeline.note_progress)  # its arguments may have come
    return lifeline.await_arguments()
