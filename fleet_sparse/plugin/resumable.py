"""Resumable loaders: a job that begins with a snapshot goes on with the batch behind those that the snapshot has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from fleet_sparse.worker.control.resumed import Position

from .active_session import active
from .session import Session

logger = logging.getLogger(__name__)


def resumable(loader: Iterable[Any]) -> Resumable:
    """The batches of `loader`, from where this worker stood in the snapshot that the pservers began with.

    ```python
    feeds = fleet_sparse.resumable(loader)
    for epoch in range(feeds.epoch, 10):
        for feed in feeds:
            exe.run(program, feed=feed, fetch_list=[loss])
    ```

    One pass over it is one epoch. Each snapshot says of this worker which epoch it is in and how many batches of it are
    done: those that were yielded before a training step ran. After a restart the first pass begins with the next one,
    and `epoch` is where the job left off. A pass that is left early counts as an epoch if a step ran in it.

    The batches before are read and thrown away, unless the loader has a method `skip(n)` that returns an iterable of
    its batches without the first n. Either way it must yield the same batches in the same order in the same epoch: seed
    what shuffles with `epoch`.

    If the snapshot is of another number of workers, whose shares of the data were others, all workers begin at the
    start of the earliest epoch that one of them was in; a warning says so.

    Args:
        loader: Any iterable that can be iterated once an epoch; `look_ahead` may be put around it or into it.

    Raises:
        PlanError: This worker has a resumable loader already; a snapshot has one position of each worker.
        FleetSparseError: It is read before `fleet.init_worker()`.
    """
    return Resumable(loader, active())


class Resumable:
    """What `resumable` returns: an iterable, as long as the loader's whole epoch.

    Args:
        loader: Of the batches.
        session: Of this worker, which asks where its loader stands.
    """

    def __init__(self, loader: Iterable[Any], session: Session) -> None:
        session.use_loader(self)
        self._loader = loader
        self._session = session
        self._begins_at: Position | None = None  # the next pass; None until it is known
        self._yielded: Position | None = None  # counts the batch that was yielded last; None before the first of a pass
        self._is_trained = False  # whether a step ran in this pass

    @property
    def epoch(self) -> int:
        """Of the present pass, or if none is under way, of the next one; from 0.

        Raises:
            FleetSparseError: Before `fleet.init_worker()`.
        """
        return self._yielded.epoch if self._yielded is not None else self._next_pass().epoch

    def position_after_step(self) -> Position:
        """Where the loader stands once the step that runs now has ended."""
        if self._yielded is None:
            return self._next_pass()
        self._is_trained = True
        return self._yielded

    def __iter__(self) -> Iterator[Any]:
        return self.read_by(iter)

    def read_by(self, reader: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """A pass, as `reader` yields it of the loader's batches: those count that it yields, not those that it read."""
        if self._yielded is not None and self._is_trained:  # the pass before was left early
            self._begins_at = Position(self._yielded.epoch + 1, 0)
        self._yielded, self._is_trained = None, False
        return self._pass(reader, self._next_pass())

    def __len__(self) -> int:
        """Raises `TypeError` if the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]  # of one without a length it raises what it should

    def _pass(self, reader: Callable[[Iterator[Any]], Iterator[Any]], begin: Position) -> Iterator[Any]:
        batches = reader(batches_from(self._loader, begin.batch))
        for number, batch in enumerate(batches, begin.batch + 1):
            self._yielded = Position(begin.epoch, number)
            yield batch
        self._begins_at = Position(begin.epoch + 1, 0)
        self._yielded = None

    def _next_pass(self) -> Position:
        if self._begins_at is None:
            self._begins_at = self._resumed()
        return self._begins_at

    def _resumed(self) -> Position:
        resumed = self._session.resumed
        begin = resumed.position or Position(0, 0)
        if resumed.num_workers and resumed.num_workers != self._session.num_workers:
            logger.warning(
                "snapshot %s is of %d workers, this job has %d: where their loaders stood says nothing of other shares "
                "of the data. All begin at the start of epoch %d",
                resumed.snapshot,
                resumed.num_workers,
                self._session.num_workers,
                begin.epoch,
            )
        elif resumed.snapshot and resumed.position is None:
            logger.warning(
                "snapshot %s does not say where this worker's loader stood; it begins at its start",
                resumed.snapshot,
            )
        return begin


def batches_from(loader: Iterable[Any], num_skipped: int) -> Iterator[Any]:
    """The batches of a loader without the first `num_skipped`."""
    if num_skipped == 0:
        return iter(loader)
    skip = getattr(loader, "skip", None)
    return iter(skip(num_skipped)) if callable(skip) else islice(iter(loader), num_skipped, None)
