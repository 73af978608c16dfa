"""Follower: keeps a read-only shard at the snapshot of a series that readers serve, by default the newest one."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fleet_sparse.core.version import Version
from fleet_sparse.snapshot.directory import Directory
from fleet_sparse.snapshot.manifest import version_of
from fleet_sparse.snapshot.store import SnapshotStore

from .content import Chain, Change, Post, deltas, differences, reversal
from .shard import ReadOnlyShard

_log = logging.getLogger(__name__)

SLICE_ROWS = 256
"""Rows that are applied between two requests, in about 0.1 ms."""
LOOK_S, REMOTE_LOOK_S = 0.1, 1.0
"""Seconds between two looks at a directory on this machine, and at one of a URL."""
RETRY_S = 1.0
"""Seconds after which a snapshot is tried again that could not be adopted."""


@dataclass(slots=True)
class FollowerStats:
    """What a follower did since its start.

    Attributes:
        num_adopted: Number of versions that it adopted.
        num_failed: Number of tries that failed.
        last_failure: Why the snapshot that should be served is not; empty if it is.
    """

    num_adopted: int = 0
    num_failed: int = 0
    last_failure: str = ""


class Follower:
    """Follows a series with one shard.

    The snapshot that `SERVE.json` names is adopted, without one the newest of all tables, also if it is older than the
    one that is served. If that file or the snapshot cannot be read, or it is one of another model, nothing changes, and
    the follower tries again.

    Args:
        shard: The shard, which has a version; nobody else changes it.
        directory: The directory of the series.
        post: Runs a task in the thread that owns the shard.
        version_keep_s: Seconds for which the older version stays readable at least.
        on_change: Called when a version was adopted or `last_failure` changed, in the thread of the follower.
        clock: Returns monotonic time in seconds.

    Attributes:
        on_change: As given.
        stats: What it did.
    """

    def __init__(
        self,
        shard: ReadOnlyShard,
        directory: Directory,
        post: Post,
        *,
        version_keep_s: float,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._store = SnapshotStore(directory)
        self._post = post
        self._version_keep_s = version_keep_s
        self.on_change = on_change
        self._clock = clock
        self._adopted_at: float | None = None
        self._failed_at: float | None = None
        self._look_s = LOOK_S if directory.renames else REMOTE_LOOK_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self.stats = FollowerStats()

    def start(self) -> None:
        """Follows from now on, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ends following. The thread that owns the shard still runs tasks, or has cancelled them."""
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """Looks at the series once and adopts the snapshot that should be served if it is not.

        Returns:
            True if a version was adopted. Raises nothing; failures are logged and in `stats`.
        """
        now = self._clock()
        if self._failed_at is not None and now - self._failed_at < RETRY_S:
            return False
        try:
            return self._adopt(now)
        except Exception as error:
            if not self._stopping.is_set():
                self._note_failure(error)
            return False

    def _run(self) -> None:
        while not self._stopping.wait(self._look_s):
            self.look()

    def _adopt(self, now: float) -> bool:
        name = self._store.served()
        served = self._shard.newest
        if name is None:
            self._note_failure(f"{self._store}: it has no snapshot any more; snapshot {served.number} is still served")
            return False
        chain = self._store.chain(name)
        version = version_of(chain[-1][1])
        if version == served:
            self._note_success()
            return False
        if self._adopted_at is not None and now - self._adopted_at < self._version_keep_s:
            return False
        begun_at = self._clock()
        change = self._change_to(chain, version)
        num_rows = self._apply(version, change)
        self._adopted_at = self._clock()
        self.stats.num_adopted += 1
        self._failed_at, self.stats.last_failure = None, ""
        log = _log.info if version.number > served.number else _log.warning
        log(
            "shard %d: serves snapshot %d (%016x) in place of %d: %d rows changed, in %.2f s",
            self._shard.shard_index,
            version.number,
            version.checksum,
            served.number,
            num_rows,
            self._adopted_at - begun_at,
        )
        self.on_change()
        return True

    def _change_to(self, chain: Chain, version: Version) -> Change:
        served, *older = self._shard.versions
        if version in older:
            return reversal(self._shard, self._post)
        checksums = [version_of(manifest).checksum for _, manifest in chain]
        if served.checksum in checksums:
            return deltas(self._shard, chain[checksums.index(served.checksum) + 1 :])
        return differences(self._shard, chain, self._post)

    def _apply(self, version: Version, change: Change) -> int:
        """Applies a change in slices; returns the number of rows that it changed."""
        shard, num_changed = self._shard, 0
        num_rows: Counter[int] = Counter()
        for table_id, ids, _ in change.rows:
            num_rows[table_id] += len(ids)
        # Memory is made and freed here, so that no request waits for it.
        rooms = {table_id: shard.tables[table_id].rows.room(count) for table_id, count in num_rows.items()}
        for dropped in self._post(lambda: shard.begin(version, rooms)).result():
            dropped.close()
        try:
            for table_id, ids, rows in change.rows:
                for begin in range(0, len(ids), SLICE_ROWS):
                    its_ids = np.ascontiguousarray(ids[begin : begin + SLICE_ROWS])
                    its_rows = np.ascontiguousarray(rows[begin : begin + SLICE_ROWS])
                    num_changed += self._post(partial(shard.apply, table_id, its_ids, its_rows)).result()
            self._post(lambda: shard.commit(change.values)).result()
        except BaseException:
            self._post(shard.abandon).result()
            raise
        return num_changed

    def _note_success(self) -> None:
        self._failed_at = None
        if self.stats.last_failure:
            self.stats.last_failure = ""
            self.on_change()

    def _note_failure(self, error: Exception | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._failed_at = self._clock()
        is_new = text != self.stats.last_failure
        # Before the count: another thread that sees the failure counted reads why.
        self.stats.last_failure = text
        self.stats.num_failed += 1
        if is_new:
            _log.warning("shard %d: the snapshot that should be served is not: %s", self._shard.shard_index, text)
            self.on_change()
