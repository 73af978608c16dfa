"""RecordCoordinator: leases as records of a store that replaces a record only if nobody else has replaced it before.

Each renewal replaces the record. So a lease is free once its record has not changed for longer than its ttl, by the
clock of the process that waits, and a process that was suspended finds that its record was replaced. The lease of a
process of this machine that has ended is free at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from .coordinator import CLOCKS_DIFFER, Holder, holder_from

_MAX_POLL_S = 0.5
_POLLS_PER_TTL = 20


class RecordStore(NamedTuple):
    """Records by the name of a shard. Each function raises `OSError` if the store cannot be reached."""

    read: Callable[[str], tuple[bytes, int]]
    """Returns a record and its version, from 1; version 0 if there is none."""
    write: Callable[[str, bytes, int], int]
    """Replaces a record of this version, and returns the new version; 0 if it has another one."""
    close: Callable[[], object]
    """Ends the connection."""


class RecordCoordinator:
    """Leases of one job; see `Coordinator`.

    Args:
        store: Keeps the records.
        where: Name of the store in messages.
        job: Identity of the job.
    """

    def __init__(self, store: RecordStore, where: str, job: str) -> None:
        self._store = store
        self._where = where
        self._job = job
        self._held: dict[str, tuple[Holder, int]] = {}
        self._observed: dict[str, tuple[int, float]] = {}  # version, and since when this process has seen it

    def lease(self, shard: str, ttl_s: float, *, after: int = 0) -> int | Holder:
        """As `Coordinator`."""
        while True:
            former, version, is_free = self._look(shard)
            if former is not None and not is_free:
                return former
            generation = max(0 if former is None else former.generation, after) + 1
            holder = Holder.of_this_process(generation, self._job, ttl_s)
            version = self._store.write(shard, holder.to_json(), version)
            if version:
                self._held[shard] = holder, version
                return generation

    def renew(self, shard: str) -> bool:
        """As `Coordinator`."""
        holder, version = self._held[shard]
        version = self._store.write(shard, holder.to_json(), version)
        if not version:  # a renewal before, whose answer was lost, may have been successful
            content, version = self._store.read(shard)
            version = self._store.write(shard, content, version) if content == holder.to_json() else 0
        if version:
            self._held[shard] = holder, version
        return version > 0

    def watch(self, shard: str, timeout_s: float) -> None:
        """As `Coordinator`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            former, _, is_free = self._look(shard)
            if former is None or is_free:
                return
            time.sleep(min(_MAX_POLL_S, former.ttl_s / _POLLS_PER_TTL))

    def release(self, shard: str) -> None:
        """As `Coordinator`. The record stays: it has the generation."""
        holder, version = self._held.pop(shard)
        self._store.write(shard, msgspec.structs.replace(holder, ttl_s=0.0).to_json(), version)

    def close(self) -> None:
        """As `Coordinator`."""
        self._store.close()

    def _look(self, shard: str) -> tuple[Holder | None, int, bool]:
        """Returns who has or had the lease, None if nobody had; the version of the record; and if it is free."""
        content, version = self._store.read(shard)
        if not version:
            return None, 0, True
        holder, now = holder_from(content, self._where), time.monotonic()
        seen, since = self._observed.get(shard, (0, now))
        if seen != version:
            self._observed[shard] = version, now
            since = now
        is_over = now - since > CLOCKS_DIFFER * holder.ttl_s
        return holder, version, is_over or not holder.ttl_s or holder.has_ended
