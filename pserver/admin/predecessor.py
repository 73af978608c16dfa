"""Predecessor: the process that had a shard before, and what the pserver continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.shard import Shard


@dataclass(slots=True)
class Predecessor:
    """The process that had a pserver's shard before, as far as this pserver continues from it.

    Attributes:
        is_restart: True if workers had registered with that process, and go on with this one.
        continues_log: True if the shard has what these workers pushed, from a log.
        may_take_over: True until a worker decides whether this pserver takes the shard over from one that left its log,
            as on a machine that is gone: its workers may still run.
        restored: By client, the newest of its pushes that the shard has from that process.
    """

    is_restart: bool
    continues_log: bool
    may_take_over: bool
    restored: Mapping[bytes, int]

    @classmethod
    def of(cls, shard: Shard, *, is_restart: bool, has_recovered: bool) -> Predecessor:
        """Returns that of a pserver that starts.

        Args:
            shard: Its shard, filled.
            is_restart: As the attribute.
            has_recovered: True if the shard is filled from the newest snapshot of the job.
        """
        has_workers = shard.log is not None and bool(shard.log.control.workers)
        marks = shard.ledger.watermarks() if has_workers or has_recovered else []
        return cls(
            is_restart,
            continues_log=is_restart and has_workers,
            may_take_over=not is_restart and has_workers,
            restored={mark.client_id: mark.watermark for mark in marks},
        )

    @property
    def may_have_workers(self) -> bool:
        """True if its workers may still run."""
        return self.is_restart or self.may_take_over

    def take_over(self) -> None:
        """A worker has decided that this pserver takes the shard over."""
        self.is_restart, self.continues_log, self.may_take_over = True, True, False
