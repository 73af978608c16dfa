"""Resumed: where a worker stands when its pservers began with a snapshot."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..modes.step import Progress


class Position(NamedTuple):
    """Where a loader stands."""

    epoch: int
    batch: int
    """How many batches of the epoch were trained on."""

    def to_json(self) -> str:
        """As it travels and is saved."""
        return json.dumps(self._asdict())


class Resumed(NamedTuple):
    """Where this worker stands before its first step of its own. By default at the beginning."""

    snapshot: str = ""
    """Name of the snapshot that the pservers began with; empty without one."""
    step: int = 0
    """How many steps were trained: by this worker, or if the snapshot is of another number of workers, by each."""
    position: Position | None = None
    """None if nobody said one."""
    num_workers: int = 0
    """Of the job that saved."""
    tables: tuple[str, ...] = ()
    """Names of those that the snapshot has."""
    is_whole: bool = True
    """Whether it has all that the job that saved had: tables and dense parameters."""

    def warnings(self, tables: Collection[str]) -> list[str]:
        """What of a job with these tables does not go on where it was, though somebody may think so."""
        if not self.snapshot:
            return []
        found = []
        if not self.is_whole:
            found.append(f"snapshot {self.snapshot} has some tables only: {_listed(self.tables)}; all else begins anew")
        if self.is_whole and (new := set(tables) - set(self.tables)):
            found.append(f"snapshot {self.snapshot} has no {_listed(new)}; these tables begin anew")
        if unused := set(self.tables) - set(tables):
            found.append(f"snapshot {self.snapshot} has {_listed(unused)}, which no program here looks up so far")
        return found

    def plus(self, progress: Progress) -> Progress:
        """How far this worker is in all, if it is so far since then."""
        position = progress.position
        if position is None:
            position = self.position.to_json() if self.position is not None else ""
        return Progress(self.step + progress.num_steps, position)


def parse_resumed(text: str, worker_index: int, num_workers: int, *, in_step: bool) -> Resumed:
    """What the pservers' answer means for a worker.

    A snapshot of some tables only is a beginning, nothing to go on from. If it is of as many workers, each goes on
    where it was. If not, nobody's position is anybody's any more: all begin at the start of the earliest epoch, and
    count from the smallest number of steps.

    Args:
        text: JSON, as registration tells; empty if pservers began with nothing.
        worker_index: Of the worker.
        num_workers: Of the job.
        in_step: Whether all workers of the job count one and the same steps, as in sync training: then those that each
            worker had trained by itself are the most of any.
    """
    if not text:
        return Resumed()
    value = json.loads(text)
    name, workers, tables = value["snapshot"], value["workers"], tuple(value["tables"])
    if not value["is_whole"]:
        return Resumed(name, tables=tables, is_whole=False)
    positions = [_parse_position(worker["position"]) for worker in workers]
    own = [number for number, worker in enumerate(workers) if worker["worker"] == worker_index]
    if value["num_workers"] == num_workers and own:
        steps = [worker["step"] for worker in workers]
        return Resumed(name, max(steps) if in_step else steps[own[0]], positions[own[0]], num_workers, tables)
    step = min((worker["step"] for worker in workers), default=0)
    return Resumed(name, step, _earliest_epoch(positions), value["num_workers"], tables)


def _listed(tables: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(tables)))


def _parse_position(value: Any) -> Position | None:
    """None for what this version does not write."""
    try:
        return Position(int(value["epoch"]), int(value["batch"]))
    except (TypeError, KeyError, ValueError):
        return None


def _earliest_epoch(positions: Sequence[Position | None]) -> Position | None:
    known = [position.epoch for position in positions if position is not None]
    return Position(min(known), 0) if known and len(known) == len(positions) else None
