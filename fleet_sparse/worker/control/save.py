"""Save: one snapshot, from the plan to the manifest, as the worker that asks for it goes through it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fleet_sparse.errors import SnapshotError
from fleet_sparse.wire import control_pb2 as messages

from ..modes.step import Progress
from .control import ControlClient

FULL, DELTA = "full", "delta"


class Save:
    """A save that is to be made. `begin`, then `finish`; one at a time in a job.

    Whatever either of them raises, no pserver keeps anything of the save: what was saved before stands, and training
    may go on.

    Args:
        control: Of the worker that asks.
        dirname: Directory of the series.
        kind: `FULL`, or `DELTA` for what changed since the newest snapshot; full as well if there is nothing that a
            delta could be on top of, or a pserver does not know what changed since.
        keep_last: How many full snapshots stay, with all deltas on top of them; None for all.
        tables: Names of those to save; empty for all of them and the dense arrays.
        ends_day: Whether a day of the tables ends with it.

    Raises:
        ValueError: There is no such kind, or `keep_last` is below 1.
    """

    def __init__(
        self,
        control: ControlClient,
        dirname: str,
        kind: str = FULL,
        *,
        keep_last: int | None = None,
        tables: Sequence[str] = (),
        ends_day: bool = False,
    ) -> None:
        if kind not in (FULL, DELTA):
            raise ValueError(f"save: kind is {kind!r}, should be {FULL!r} or {DELTA!r}")
        if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
            raise ValueError(f"save: keep_last is {keep_last!r}, should be a whole number of at least 1, or None")
        self.dirname = dirname  # constant after construction
        self._control = control
        self._kind = kind
        self._keep_last = keep_last
        self._tables = tables
        self._ends_day = ends_day
        self._plan = messages.SavePlan()

    def begin(self, mark: Progress) -> None:
        """Returns when every shard has fixed what will be saved; training may go on then.

        Args:
            mark: Of the worker that asks; its pushes up to there are applied, and it pushes nothing until this returns.

        Raises:
            SnapshotError: A worker did not bring its mark in time, or the directory cannot be used.
            ShardUnavailable: A pserver is gone.
        """
        # A full one always can be made, unless pservers and workers are of different opinions.
        if not self._begin(self._kind, mark) and not self._begin(FULL, mark):
            raise SnapshotError(f"{self.dirname}: a pserver says that a full snapshot has a base. Look into its log")

    def _begin(self, kind: str, mark: Progress) -> bool:
        """Whether all shards take part."""
        save_id = uuid.uuid4().hex
        with self._ended_by_errors(save_id):
            self._plan = self._control.plan_save(self.dirname, save_id, kind)
            if self._control.begin_save(self._plan, self._tables, mark, ends_day=self._ends_day):
                return True
        self._control.end_save(save_id, committed=False)
        return False

    def finish(self) -> str:
        """Returns when there is a snapshot: its path or URL, as a load takes it.

        Raises:
            SnapshotError: A pserver could not write.
            ShardUnavailable: A pserver is gone.
        """
        plan = self._plan
        with self._ended_by_errors(plan.save_id):
            files = self._control.write_save(plan.save_id)
            finished = self._control.finish_save(plan, files, self._keep_last)
            self._control.end_save(plan.save_id, committed=True, checksum=finished.checksum)
        snapshot: str = finished.snapshot
        return snapshot

    @contextmanager
    def _ended_by_errors(self, save_id: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._control.end_save(save_id, committed=False)
            raise
