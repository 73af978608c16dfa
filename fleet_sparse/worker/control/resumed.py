"""Resumed: the position of a worker whose pservers loaded a snapshot."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fleet_sparse.wire.control import WorkerProgress

from ..modes.step import Progress
from ..net.shard_link import Registration


class Position(NamedTuple):
    """Position of a loader."""

    epoch: int
    batch: int
    """Number of batches of the epoch that were trained."""

    def to_json(self) -> str:
        """Returns the position as it travels and is saved."""
        return json.dumps(self._asdict())


class Resumed(NamedTuple):
    """Position of this worker before its first step of its own. By default the beginning."""

    snapshot: str = ""
    """Name of the snapshot that the pservers loaded; empty without one."""
    step: int = 0
    """Number of steps that were trained: by this worker, or if the snapshot has another number of workers, by each."""
    position: Position | None = None
    """None if it is not known."""
    num_workers: int = 0
    """Number of workers of the job that saved."""
    tables: tuple[str, ...] = ()
    """Names of the tables of the snapshot."""
    is_whole: bool = True
    """True if the snapshot has all tables and dense parameters of the job that saved."""

    def warnings(self, tables: Collection[str]) -> list[str]:
        """Returns what of a job with these tables does not continue from the snapshot although a user may expect it."""
        if not self.snapshot:
            return []
        found = []
        if not self.is_whole:
            found.append(
                f"snapshot {self.snapshot} has only the tables {_listed(self.tables)}; everything else starts fresh"
            )
        if self.is_whole and (new := set(tables) - set(self.tables)):
            found.append(f"snapshot {self.snapshot} has no {_listed(new)}; these tables start empty")
        if unused := set(self.tables) - set(tables):
            found.append(f"snapshot {self.snapshot} has {_listed(unused)}, which no program here looks up so far")
        return found

    def plus(self, progress: Progress) -> Progress:
        """Returns the progress of this worker in all, from its progress since the snapshot."""
        position = progress.position
        if position is None:
            position = self.position.to_json() if self.position is not None else ""
        return progress._replace(num_steps=self.step + progress.num_steps, position=position)


def parse_resumed(text: str, num_workers: int, *, in_step: bool) -> Resumed:
    """Returns the position of a worker, from the pservers' answer to its registration.

    A snapshot of some tables only has no positions. If it has as many workers as the job, each continues where it was.
    If not, positions do not apply: all workers begin at the start of the earliest epoch, with the smallest number of
    steps.

    Args:
        text: JSON of the registration; empty if the pservers loaded no snapshot.
        num_workers: Number of workers of the job.
        in_step: True if all workers of the job count the same steps, as in sync training: then the largest number of
            any worker is that of each.
    """
    if not text:
        return Resumed()
    value = json.loads(text)
    name, own, tables = value["snapshot"], value["worker"], tuple(value["tables"])
    if not value["is_whole"]:
        return Resumed(name, tables=tables, is_whole=False)
    if value["num_workers"] == num_workers and own is not None:
        step = value["max_step"] if in_step else own["step"]
        return Resumed(name, step, _parse_position(own["position"]), num_workers, tables)
    epoch = value["min_epoch"]
    position = None if epoch is None else Position(epoch, 0)
    return Resumed(name, value["min_step"], position, value["num_workers"], tables)


def resumed_in_place(progress: WorkerProgress, num_workers: int) -> Resumed:
    """Returns where a worker continues that takes the place of another process in a running job.

    Args:
        progress: How far that process was.
        num_workers: Number of workers of the job.
    """
    position = _parse_position(json.loads(progress.position)) if progress.position else None
    return Resumed(step=progress.step, position=position, num_workers=num_workers)


def begun_behind(registrations: Sequence[Registration]) -> int:
    """Returns the step after which a worker begins that takes the place of another process in a job that counts steps.

    It makes the steps again that the process made after it had reported its position; shards that have them take them
    once. A job that has begun again counts from 0, and so do its shards. Where shard 0 has lost the position with its
    process, no step is made again.

    Args:
        registrations: Answers of all shards to the registration that tells them the mode.
    """
    newest = max(each.pushed_step for each in registrations)
    first = registrations[0]
    if first.progress is None:
        return newest if first.is_restart else 0
    return min(first.progress.pushed_step, newest)


def _listed(tables: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(tables)))


def _parse_position(value: Any) -> Position | None:
    """Returns None for a position that this version does not write."""
    try:
        return Position(int(value["epoch"]), int(value["batch"]))
    except (TypeError, KeyError, ValueError):
        return None
