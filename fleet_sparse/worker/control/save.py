"""Save: one snapshot, from the plan to the manifest, as its coordinator makes it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.errors import SnapshotError
from fleet_sparse.wire import control_pb2 as messages

from ..modes.step import Progress
from .control import ControlClient

FULL, DELTA = "full", "delta"


class Save:
    """A save that this worker coordinates: `begin`, then `finish`. A job has one at a time.

    If either of them raises, no pserver keeps anything of the save: earlier snapshots stay, and training may continue.
    The only exception is a day that ends with a complete snapshot.

    Args:
        control: Control client of the coordinator.
        dirname: Directory of the series.
        kind: `FULL`, or `DELTA` for what has changed since the newest snapshot. A delta becomes a full snapshot if
            there is none to extend, or a pserver does not know what has changed since.
        keep_last: Number of full snapshots that stay, with their deltas; None for all.
        tables: Names of the tables to save; empty for all tables and dense arrays.
        ends_day: True if the save ends a day of the tables.
        left_out: By table, criteria of the rows that a full snapshot does not have; they stay on the pservers.

    Attributes:
        num_rows: Number of rows of the snapshot, once it is finished.

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
        left_out: Mapping[str, Sequence[Criterion]] = MappingProxyType({}),
    ) -> None:
        if kind not in (FULL, DELTA):
            raise ValueError(f"save: kind is {kind!r}, should be {FULL!r} or {DELTA!r}")
        if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
            raise ValueError(f"save: keep_last is {keep_last!r}, should be a whole number of at least 1, or None")
        self.dirname = dirname  # constant after construction
        self._rpcs = control.snapshots
        self._kind = kind
        self._keep_last = keep_last
        self._tables = tables
        self._ends_day = ends_day
        self._left_out = left_out
        self._plan = messages.SavePlan()
        self.num_rows = 0

    def begin(self, progress: Progress) -> None:
        """Returns when every shard is cut; training may continue then.

        Args:
            progress: Position of the coordinator; its pushes up to there are applied, and it pushes nothing until this
                returns.

        Raises:
            SnapshotError: A worker did not report its position in time, or the directory cannot be used.
            ShardUnavailable: A pserver is gone.
        """
        # A full snapshot needs no base, so the second attempt fails only if a pserver contradicts itself.
        if not self._begin(self._kind, progress) and not self._begin(FULL, progress):
            raise SnapshotError(f"{self.dirname}: a pserver asks for the base of a full snapshot. See its log")

    def _begin(self, kind: str, progress: Progress) -> bool:
        """Returns whether all shards take part."""
        save_id = uuid.uuid4().hex
        with self._ended_by_errors(save_id):
            self._plan = self._rpcs.plan_save(self.dirname, save_id, kind)
            if self._rpcs.begin_save(
                self._plan, self._tables, progress, ends_day=self._ends_day, left_out=self._left_out
            ):
                return True
        self._rpcs.end_save(save_id, committed=False)
        return False

    def finish(self) -> str:
        """Returns the path or URL of the snapshot, as a load accepts it, once it is durable.

        Raises:
            SnapshotError: A pserver could not write. Or the snapshot is complete and ends a day, which has not ended on
                all pservers.
            ShardUnavailable: A pserver is gone.
        """
        plan = self._plan
        with self._ended_by_errors(plan.save_id):
            files = self._rpcs.write_save(plan.save_id)
            finished = self._rpcs.finish_save(plan, files, self._keep_last)
        errors = self._rpcs.end_save(
            plan.save_id,
            committed=True,
            checksum=finished.checksum,
            plan=plan,
            lacks_rows=bool(self._tables or self._left_out),
        )
        if errors and self._ends_day:
            raise SnapshotError(
                f"{finished.snapshot}: the snapshot is complete, but the day has not ended on all pservers. Load "
                f"the snapshot, which has the day. {errors[0]}"
            ) from errors[0]
        self.num_rows = finished.num_rows
        snapshot: str = finished.snapshot
        return snapshot

    @contextmanager
    def _ended_by_errors(self, save_id: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._rpcs.end_save(save_id, committed=False)
            raise
