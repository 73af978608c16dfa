"""Launch: what tells the processes of one job from those of another that uses the same addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LAUNCHER = "PADDLE_GLOO_FS_PATH"
"""fleetrun draws a fresh path at each start and passes it to all pservers and workers that it starts."""


class Launch(NamedTuple):
    """The way in which a process was started."""

    job_id: str = ""
    """`FLEET_SPARSE_JOB_ID`; empty if it is not set."""
    machine: str = ""
    launcher: str = ""
    """The fleetrun that started the process; empty if it was started without one."""

    @classmethod
    def of_process(cls, job_id: str, environment: Mapping[str, str] | None = None) -> Launch:
        """Returns the launch of this process.

        Args:
            job_id: `settings.job_id`.
            environment: That of the process; `os.environ` if it is None.
        """
        environment = os.environ if environment is None else environment
        return cls(job_id, _machine(), environment.get(_LAUNCHER, ""))

    def conflict(self, other: Launch) -> str:
        """Returns why two processes cannot belong to one job; empty if they can.

        Two ids must be equal. Without an id two processes on one machine must have the same launcher, if both have one.
        Launchers on several machines cannot be compared.
        """
        if self.job_id or other.job_id:
            if self.job_id == other.job_id:
                return ""
            return f"its FLEET_SPARSE_JOB_ID is {other.job_id!r}, here it is {self.job_id!r}"
        if self.machine != other.machine or not (self.launcher and other.launcher) or self.launcher == other.launcher:
            return ""
        return "another fleetrun on this machine started it"


def _machine() -> str:
    """Returns a name that containers of one machine do not share unless they share its host name."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return f"{socket.gethostname()} {boot_id}"
