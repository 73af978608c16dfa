"""Coordinator: grants the lease of each shard to one process at a time, and numbers the grants."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from fleet_sparse.errors import SettingError

VARIABLE = "FLEET_SPARSE_COORDINATOR"
_BEGUN = 19
"""Index of the time when a process began, in ticks since the boot, behind its name in `/proc/<pid>/stat`."""
CLOCKS_DIFFER = 1.1
"""A process waits this multiple of the ttl of a holder, because the clocks of two machines may differ in speed."""


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lease.

    Attributes:
        generation: Number of its grant, from 1.
        job: Identity of its job.
        process: Its machine and pid, for people.
        ttl_s: Seconds for which it holds the lease after each renewal.
        life: Names it among all processes, for those of its machine; empty if that is not known.
    """

    generation: int
    job: str
    process: str
    ttl_s: float
    life: str = ""

    @classmethod
    def of_this_process(cls, generation: int, job: str, ttl_s: float) -> Holder:
        """Returns this process as the holder."""
        return cls(generation, job, this_process(), ttl_s, life_of(os.getpid()))

    @property
    def has_ended(self) -> bool:
        """True if it is known to have ended: it was a process of this machine, and is none any more."""
        place, _, process = self.life.rpartition(" ")
        if place != life_of(os.getpid()).rpartition(" ")[0] or not place:
            return False
        return life_of(int(process.partition("-")[0])) != self.life

    def to_json(self) -> bytes:
        """Returns what a coordinator keeps."""
        return msgspec.json.encode(self)


def holder_from(content: bytes | str, where: str) -> Holder:
    """Returns what a coordinator kept.

    Raises:
        SettingError: It is something else.
    """
    try:
        return msgspec.json.decode(content, type=Holder)
    except msgspec.DecodeError as error:
        raise SettingError(f"{where}: it has no lease of a pserver: {error}. Set {VARIABLE} to another path") from error


def this_process() -> str:
    """Returns machine and pid of this process."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def life_of(pid: int) -> str:
    """Returns the place of the processes that see each other's pids, a pid, and when that process began.

    Empty if there is no such process, or the system does not say.
    """
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return f"{_place()} {pid}-{stat.rpartition(')')[2].split()[_BEGUN]}"
    return ""


def _place() -> str:
    """Returns the boot of this machine, and its namespace of pids.

    Raises:
        OSError: The system does not say.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


class Coordinator(Protocol):
    """Leases of the shards of one job. Calls of one shard are made by one thread at a time.

    Each call raises `OSError` if the coordinator cannot be reached.
    """

    def lease(self, shard: str, ttl_s: float, *, after: int = 0) -> int | Holder:
        """Takes the lease of a shard, unless another process holds it.

        Args:
            shard: Name of the shard.
            ttl_s: Seconds for which this process holds the lease after this call began, and after each renewal.
            after: The generation is larger than this one.

        Returns:
            The generation, larger than those of all leases of the shard before; or who holds the lease.

        Raises:
            SettingError: The coordinator keeps something else there.
        """
        ...

    def renew(self, shard: str) -> bool:
        """Renews a lease that this process took. Returns False if it is lost."""
        ...

    def watch(self, shard: str, timeout_s: float) -> None:
        """Returns once the lease of a shard may be free, or after `timeout_s`."""
        ...

    def release(self, shard: str) -> None:
        """Ends a lease that this process took, so that another process gets it at once."""
        ...

    def close(self) -> None:
        """Ends the connection. A lease that is not released stays until its time is over."""
        ...
