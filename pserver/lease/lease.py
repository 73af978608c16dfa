"""Lease: the right of this process to answer for a shard, renewed by a thread of its own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fleet_sparse.errors import LeaseLost, SettingError

from .coordinator import VARIABLE, Coordinator, Holder

__all__ = ["Lease", "lease_clock", "take_lease"]

_log = logging.getLogger(__name__)

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_RENEWALS_PER_TTL = 4
_TRIES_PER_TTL = 20
"""After a renewal that failed."""
_WATCH_S = 1.0
_FOREIGN_TTLS = 2.0
"""A holder of another job that still has the lease after this multiple of its ttl is alive."""


def lease_clock() -> float:
    """Returns the time of leases in seconds: monotonic, and on Linux it goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


class Lease:
    """A lease that was taken; see `take_lease`. Its times are those of `lease_clock`.

    Args:
        coordinator: Granted it; closed with the lease.
        shard: Name of the shard.
        ttl_s: As of `Coordinator.lease`.
        generation: Generation of the lease.
        valid_until: Time up to which it is valid.

    Attributes:
        generation: As given.
        valid_until: Time up to which this process may answer. Without renewals it does not change, and minus
            infinity is final.
        on_lost: Called once by the thread of the lease when it is lost.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        shard: str,
        ttl_s: float,
        generation: int,
        valid_until: float,
    ) -> None:
        self.generation = generation
        self.valid_until = valid_until
        self.on_lost: Callable[[], object] = lambda: None
        self._coordinator = coordinator
        self._shard = shard
        self._ttl_s = ttl_s
        self._lock = threading.Lock()  # of changes of `valid_until` and `_error`
        self._error: LeaseLost | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True if this process may answer no more; it never may again."""
        if lease_clock() < self.valid_until:
            return False
        self.lose()
        return True

    def lose(self, error: LeaseLost | None = None) -> None:
        """Makes the loss final: no renewal that is under way makes the lease valid again.

        Args:
            error: Why it is lost; None if it was not renewed in time.
        """
        with self._lock:
            self.valid_until = -math.inf
            self._error = self._error or error

    def check(self) -> None:
        """Checks that the lease is valid.

        Raises:
            LeaseLost: It is not.
        """
        if self.is_lost:
            raise self._error or LeaseLost(
                f"{self._shard}: this process could not renew its lease, generation {self.generation}, for "
                f"{self._ttl_s:g} s (FLEET_SPARSE_LEASE_S): it was suspended, or {VARIABLE} was out of reach. Another "
                "pserver may answer for the shard now; this one answers nothing"
            )

    def release(self) -> None:
        """Ends the lease, so that another process gets it at once, unless it is lost. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            try:
                if not self.is_lost:
                    self.lose()
                    self._coordinator.release(self._shard)
            finally:
                self._coordinator.close()
        except OSError as error:
            _log.warning("%s: the lease was not released, it ends by itself: %s", self._shard, error)

    def _run(self) -> None:
        try:
            self._renew_until_lost()
        except Exception:  # of a client library
            _log.exception("%s: the lease cannot be renewed any more", self._shard)
        if not self._ended.is_set():
            self.lose()
            self.on_lost()

    def _renew_until_lost(self) -> None:
        pause_s = self._ttl_s / _RENEWALS_PER_TTL
        while not self._ended.wait(pause_s):
            asked_at = lease_clock()
            if asked_at >= self.valid_until:
                break
            try:
                is_held = self._coordinator.renew(self._shard)
            except OSError as error:
                _log.warning("%s: the lease was not renewed: %s", self._shard, error)
                pause_s = self._ttl_s / _TRIES_PER_TTL
                continue
            # The call may have outlasted the lease, so that another process may be taking it.
            if not is_held or lease_clock() >= self.valid_until:
                break
            pause_s = self._ttl_s / _RENEWALS_PER_TTL
            with self._lock:
                if self.valid_until > -math.inf:
                    self.valid_until = asked_at + self._ttl_s


def take_lease(
    coordinator: Coordinator,
    shard: str,
    ttl_s: float,
    *,
    job: str,
    after: int = 0,
    patience_s: float = 0.0,
    on_wait: Callable[[], object] = lambda: None,
) -> Lease:
    """Takes the lease of a shard; waits while another pserver of the job holds it.

    Args:
        coordinator: Grants it.
        shard: Name of the shard.
        ttl_s: As of `Coordinator.lease`.
        job: Identity of the job.
        after: As of `Coordinator.lease`.
        patience_s: Seconds for which a coordinator that has named a holder may be out of reach.
        on_wait: Called about once a second while it waits.

    Raises:
        SettingError: A pserver of another job holds it, and is alive; or as `Coordinator.lease`.
        OSError: The coordinator cannot be reached, or the system refuses a file of the lease.
    """
    holder: Holder | None = None
    held_since = 0.0
    away_since: float | None = None
    while True:
        asked_at, now = lease_clock(), time.monotonic()
        try:
            found = coordinator.lease(shard, ttl_s, after=after)
        except OSError as error:
            since = now if away_since is None else away_since
            if holder is None or error.filename is not None or now - since >= patience_s:
                raise
            if away_since is None:
                _log.warning("%s: waits for the lease; the coordinator cannot be reached: %s", shard, error)
            away_since = since
            on_wait()
            time.sleep(_WATCH_S)
            continue
        if not isinstance(found, Holder):
            _log.info("%s: took the lease, generation %d", shard, found)
            return Lease(coordinator, shard, ttl_s, found, asked_at + ttl_s)
        if found != holder or away_since is not None:  # it may have renewed the lease before the outage
            holder, held_since, away_since = found, now, None
            _log.warning(
                "%s: waits for the lease, which %s holds with generation %d", shard, found.process, found.generation
            )
        if found.job != job and now - held_since > _FOREIGN_TTLS * found.ttl_s:
            raise SettingError(
                f"{shard}: a pserver of another job, {found.process}, holds the lease of this shard. Give each job a "
                f"FLEET_SPARSE_LOG, or {VARIABLE}, of its own"
            )
        on_wait()
        with suppress(OSError):  # the next call says it
            coordinator.watch(shard, min(found.ttl_s, _WATCH_S))
