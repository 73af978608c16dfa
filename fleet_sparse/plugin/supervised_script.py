"""A worker's script as the child of a small process that starts it again when it dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fleet_sparse
from fleet_sparse.settings import PREFIX
from fleet_sparse.supervise import LIFELINE, take_lifeline

_RESTARTS = f"{PREFIX}RESTARTS"


def supervise_script() -> None:
    """Replaces the process of a worker by a supervisor of its script if FLEET_SPARSE_RESTARTS is set.

    In the script that the supervisor starts, it only makes sure that the script ends with its supervisor; in the
    processes that this script starts, as `multiprocessing` does, it does nothing.
    """
    lifeline = take_lifeline()
    if lifeline is not None:
        lifeline.end_with_supervisor()
    if LIFELINE in os.environ or os.environ.get("TRAINING_ROLE") != "TRAINER" or _RESTARTS not in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ["PYTHONPATH"] = with_this_package(os.environ.get("PYTHONPATH", ""))
    os.execv(sys.executable, [sys.executable, "-m", "fleet_sparse.supervise", *sys.orig_argv])


def with_this_package(path: str) -> str:
    """A PYTHONPATH on which another interpreter finds this package, wherever it was imported from."""
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    return here if not path else path if here in path.split(os.pathsep) else os.pathsep.join([path, here])
