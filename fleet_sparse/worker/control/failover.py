"""Failover: how a worker continues with a pserver that was started again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from fleet_sparse.errors import FleetSparseError, ShardUnavailable

from ..net.shard_link import Registration, Resumption

logger = logging.getLogger(__name__)


class FailoverControl(Protocol):
    """The part of a control client that is used."""

    @property
    def can_fail_over(self) -> bool:
        """As `ControlClient`."""
        ...

    @property
    def is_sync(self) -> bool:
        """As `ControlClient`."""
        ...

    def rejoin(self, shard: int, resumption: Resumption) -> Registration:
        """As `ControlClient`."""
        ...


class FailoverClient(Protocol):
    """The part of a client that is used."""

    def observe_incarnation(self, shard: int, incarnation: int) -> None:
        """As `Client`."""
        ...

    def expect(self, shard: int, incarnation: int) -> Resumption:
        """As `Client`."""
        ...

    def rejoin(self, shard: int, registration: Registration, num_lost: int) -> None:
        """As `Client`."""
        ...

    def fail(self, shard: int, error: FleetSparseError) -> None:
        """As `Client`."""
        ...


class Failover:
    """Registers a worker again with each pserver that was started again, and sends its requests there.

    Args:
        control: Control client of the worker.
        client: Its client of the data plane.
        needs_values: Returns the names of the dense arrays that only the pservers have.

    Attributes:
        num_lost: Number of pushes of this worker that pservers lost.
    """

    def __init__(self, control: FailoverControl, client: FailoverClient, needs_values: Callable[[], set[str]]) -> None:
        self._control = control
        self._client = client
        self._needs_values = needs_values
        self._resumed_at: dict[int, int] = {}  # by shard: pushes up to this one were counted
        self._lock = threading.Lock()  # guards the next one
        self.num_lost = 0

    def observe(self, shard: int, incarnation: int) -> bool:
        """As `IncarnationWatcher`: the job continues with the pserver, or the shard fails.

        Several threads may call it, each for another shard.
        """
        if not self._control.can_fail_over:
            self._client.observe_incarnation(shard, incarnation)
            return False
        try:
            resumption = self._client.expect(shard, incarnation)
            registration = self._control.rejoin(shard, resumption)
        except ShardUnavailable as error:
            logger.info("shard %d: registering again: %s", shard, error)
            return True
        except FleetSparseError as error:
            self._client.fail(shard, error)
            return False
        loss = self._find_loss(registration, resumption)
        if loss is not None:
            self._client.fail(shard, loss)
            return False
        counted = max(registration.restored_seq, self._resumed_at.get(shard, 0))
        num_lost = max(resumption.push_seq - counted, 0)
        self._client.rejoin(shard, registration, num_lost)
        self._resumed_at[shard] = resumption.push_seq
        with self._lock:
            self.num_lost += num_lost
        if num_lost:
            logger.warning(
                "shard %d at %s was started again and continues from %s: %d of %d pushes of this worker are lost there",
                shard,
                registration.stream_endpoint or registration.data_endpoint,
                "its log" if registration.has_log else "the newest snapshot of the job",
                num_lost,
                resumption.push_seq,
            )
        else:
            logger.warning("shard %d was started again; no push of this worker is lost", shard)
        return True

    def _find_loss(self, registration: Registration, resumption: Resumption) -> ShardUnavailable | None:
        """Returns why the job cannot continue with a pserver; None if it can."""
        if not registration.is_restart:
            return _without_rows(registration)
        unassigned = {state.name for state in registration.tables if not state.assigned} & self._needs_values()
        if unassigned:
            return _without_values(registration, min(unassigned))
        if registration.has_log and self._control.is_sync and resumption.push_seq > registration.restored_seq:
            return _without_steps(registration, resumption)
        return None


def _without_rows(registration: Registration) -> ShardUnavailable:
    endpoint = registration.stream_endpoint or registration.data_endpoint
    return ShardUnavailable(
        f"shard {registration.shard} at {endpoint}: the pserver was started again, by another supervisor and without "
        "the log of the job: the rows that it held are gone. Start the job again from its last snapshot",
        shard=registration.shard,
        endpoint=endpoint,
    )


def _without_steps(registration: Registration, resumption: Resumption) -> ShardUnavailable:
    endpoint = registration.stream_endpoint or registration.data_endpoint
    return ShardUnavailable(
        f"shard {registration.shard} at {endpoint}: the pserver was started again, and its log ends with push "
        f"{registration.restored_seq} of this worker, which has {resumption.push_seq}: its machine lost steps of the "
        "job. Start the job again from its last snapshot. With FLEET_SPARSE_DURABILITY=sync no step is lost",
        shard=registration.shard,
        endpoint=endpoint,
    )


def _without_values(registration: Registration, name: str) -> ShardUnavailable:
    endpoint = registration.stream_endpoint or registration.data_endpoint
    return ShardUnavailable(
        f"shard {registration.shard} at {endpoint}: the pserver was started again, and no snapshot of the job has "
        f"{name!r}, whose values are gone. Start the job again, with fleet_sparse.save_every(dirname, seconds=60) for "
        "a first snapshot after a minute",
        shard=registration.shard,
        endpoint=endpoint,
    )
