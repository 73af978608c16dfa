"""Supervised: a pserver as the child of a small process that starts it again when it dies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.launch import Launch
from fleet_sparse.settings import Settings
from fleet_sparse.supervise import Start, Supervision, run

SUPERVISED = "--supervised"
"""Option of a pserver that has a supervisor."""


def supervise(arguments: Sequence[str]) -> int:
    """Runs a pserver with these arguments until it is not started again. Returns the exit code.

    With durability `none` a pserver has nothing to continue from, and this process becomes the pserver.
    """
    try:
        settings = Settings.from_environment()
    except FleetSparseError as error:
        print(f"pserver: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    program = [sys.executable, "-m", "fleet_sparse.pserver"]
    if settings.durability == "none":
        os.execv(sys.executable, [*program, *arguments])
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s supervisor: %(message)s")

    # Only processes that this supervisor starts continue from the log, unless the user gives the job an id.
    job_id = settings.job_id or Launch.of_process("").launcher or os.urandom(8).hex()

    def arguments_of(start: Start) -> list[str]:
        of_start = [*arguments, "--generation", str(start.generation), "--log-job-id", job_id]
        for option, value in start.options.items():
            of_start += [option, value] if value else [option]
        return of_start

    supervision = Supervision(settings.restarts, settings.stall_s)
    return run(program, arguments_of, supervision, "the pserver", has_standby=settings.standby)
